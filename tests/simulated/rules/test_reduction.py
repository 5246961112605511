"""Reductions, scans and norms through autograd, compared with one device; and that a sharded dim is not gathered for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.propagation.table import TABLE
from tests.helpers.one_device import MESHES, distributed, equal, every_placement, placements_of, sample

aten = torch.ops.aten
X, W, B = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(7)), torch.rand(4) + 0.5, torch.rand(4)
#: So far apart that a rounding error in a partial sum changes no order.
APART = ((torch.arange(60) * 17) % 60 / 10 + 0.05).view(5, 3, 4)

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softmax": (lambda x: F.softmax(x, -1), (X,)),
    "softmax of dim 0": (lambda x: x.softmax(0), (X,)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), (X,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (X, W, B)),
    "layer_norm over two dims": (lambda x: F.layer_norm(x, (3, 4)), (X,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), (X, W)),
    "group_norm": (lambda x, w, b: F.group_norm(x.transpose(1, 2), 2, w, b), (X, W, B)),
    "var": (lambda x: x.var(0), (X,)),
    "var of all": (lambda x: x.var(correction=0), (X,)),
    "std_mean": (lambda x: torch.std_mean(x, (0, 2), keepdim=True), (X,)),
    "norm": (lambda x: x.norm(), (X,)),
    "norm of rows": (lambda x: x.norm(dim=-1), (X,)),
    "norm 1": (lambda x: torch.linalg.vector_norm(x, 1, dim=0), (APART,)),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 1)), (APART,)),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, math.inf, dim=1), (APART,)),
    "logsumexp": (lambda x: x.logsumexp((0, 2)), (X,)),
    "mean": (lambda x: x.mean((0, 1)), (X,)),
    "prod": (lambda x: x.prod(0), (APART,)),
    "amax": (lambda x: x.amax(0), (APART,)),
    "amin of all": (lambda x: x.amin(), (APART,)),
    "max": (lambda x: x.max(1)[0], (APART,)),
    "max of all": (lambda x: x.max(), (APART,)),
    "cumsum": (lambda x: x.cumsum(0), (X,)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (X,)),
    "mse by hand": (lambda x, y: (x - y).square().mean(), (X, APART[0])),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, -1), (X, APART[:1])),
    "activations": (lambda x: F.gelu(x) + F.silu(x) * F.softplus(x) - F.leaky_relu(x) / (1 + x.sigmoid()), (X,)),
    "clamp and where": (lambda x: torch.where(x > 3, x.clamp(1.0, 4.5), x.tanh()), (APART,)),
    "log_sigmoid": (F.logsigmoid, (X,)),
    "glu": (F.glu, (X,)),
}


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_one_device(name: str, mesh: str) -> None:
    function, tensors = CASES[name]
    dense = [t.clone().requires_grad_() for t in tensors]
    want = function(*dense)
    want = want if isinstance(want, tuple) else (want,)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator) for out in want]
    grads = torch.autograd.grad(want, dense, cotangents)
    for placements in placements_of(sample(function, *tensors), MESHES[mesh], 6, seed=3):
        spread = [distributed(t, MESHES[mesh], p).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
        about = f"{name} of {[repr(x.layout) for x in spread]}"
        got = function(*spread)
        got = got if isinstance(got, tuple) else (got,)
        for one, other in zip(got, want, strict=True):
            equal(one.detach(), other.detach(), about)
        torch.autograd.backward(got, [distributed(c, MESHES[mesh], [Replicate()] * MESHES[mesh].ndim) for c in cotangents])
        for x, grad in zip(spread, grads, strict=True):
            assert x.grad is not None and x.grad.layout is x.layout.reduced(), f"{about}: {x.grad!r}"
            torch.testing.assert_close(x.grad.full_tensor(), grad, atol=1e-4, rtol=1e-4, msg=partial("{}\n{}".format, about))


#: An operator on a [12@tp, 64] tensor, and the collectives it may make: none may gather the tensor.
SMALL: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "softmax": (lambda x: x.softmax(0), {"all_reduce": 2}),
    "log_softmax": (lambda x: x.log_softmax(0), {"all_reduce": 2}),
    "logsumexp": (lambda x: x.logsumexp(0), {"all_reduce": 2}),
    "layer_norm": (lambda x: F.layer_norm(x.t(), (12,)), {"all_reduce": 2}),
    "sum, left partial": (lambda x: x.sum(0), {}),
    "mean, left partial": (lambda x: x.mean(), {}),
    "amax, left partial": (lambda x: x.amax(0), {}),
    "var, left partial": (lambda x: x.var(0), {"all_reduce": 1}),
    "norm": (lambda x: x.norm(), {"all_reduce": 1}),
    "argmax": (lambda x: x.argmax(0), {"all_reduce": 2}),
    "argmax of all": (lambda x: x.argmax(), {"all_reduce": 2}),
    "max": (lambda x: x.max(0), {"all_reduce": 2}),
    "cumsum": (lambda x: x.cumsum(0), {"all_gather": 1}),
    "cumprod": (lambda x: x.cumprod(0), {"all_gather": 1}),
    "softmax of the other dim": (lambda x: x.softmax(1), {}),
    "layer_norm of the other dim": (lambda x: F.layer_norm(x, (64,)), {}),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_sharded_dim_is_not_gathered(name: str) -> None:
    function, counts = SMALL[name]
    x = distributed(torch.randn(12, 64), sw.init_mesh(tp=4), [Shard(0)])
    with sw.trace_comm() as log:
        function(x)
    assert log.counts() == counts, str(log)
    assert all(record.bytes <= 64 * 4 * 4 for record in log.records), str(log)


def test_layer_norm_reduces_a_partial_gradient_once() -> None:
    mesh = sw.init_mesh(tp=2)
    x, w = (distributed(t, mesh, [Replicate()]).requires_grad_() for t in (torch.randn(6, 4), torch.rand(4)))
    out = F.layer_norm(x, (4,), w, w)
    grad = distributed(torch.randn(6, 4), mesh, [Partial()])
    with sw.trace_comm() as log:
        out.backward(grad)
    assert log.counts() == {"all_reduce": 1}, str(log)


def _increasing(name: str) -> Callable[..., Any]:
    packet = getattr(aten, name.split(".")[1])
    numbers = {"clamp": (-0.5, 0.5), "clamp_min": (0.1,), "clamp_max": (0.1,)}.get(name.split(".")[1], ())
    return lambda x: packet(x, *numbers)


ORDERED = [name for name, row in TABLE.items() if row.passes in ("up", "down") and len(row.inputs) == 1]


@pytest.mark.parametrize("name", [name for name in ORDERED if name != "aten.bitwise_not"])  # floats only
@pytest.mark.parametrize("kind", ["max", "min"])
def test_a_partial_extreme_passes(name: str, kind: str) -> None:
    x = torch.linspace(-2, 2, 10).view(5, 2)
    x[1, 0] = math.nan
    function, mesh = _increasing(name), MESHES["2x2"]
    out = function(distributed(x, mesh, [Shard(0), Partial(kind)]))
    swapped = {"max": "min", "min": "max"}[kind] if TABLE[name].passes == "down" else kind
    assert out.placements == (Shard(0), Partial(swapped)), f"{out!r}"
    equal(out, function(x), name)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_writing_to_a_partial_tensor_writes_the_value(kind: str) -> None:
    x, mesh = torch.tensor([[1.0, 2.0, 4.0]] * 2), MESHES["2x2"]
    source = distributed(x.flip(1), mesh, [Partial(), Shard(0)])
    for write in (
        lambda t, s: t.fill_(3.0),
        lambda t, s: t.zero_(),
        lambda t, s: t.copy_(s),
        lambda t, s: t.add_(s),
        lambda t, s: t.exp_(),
        lambda t, s: t.masked_fill_(s > 2, 7.0),
    ):
        target, dense = distributed(x, mesh, [Partial(kind)] * 2), x.clone()
        layout = target.layout
        write(target, source)
        write(dense, x.flip(1))
        assert target.layout is layout
        equal(target, dense, f"{kind}")


def test_a_partial_sum_of_bools_is_reduced_before_it_becomes_a_number() -> None:
    mesh = MESHES["2"]
    ones = sw.DTensor.from_local(sw.Bundle([torch.tensor([True, False])] * 2), mesh, [Partial()])
    for function in (lambda t: t * 1.0, lambda t: t.float(), lambda t: t + torch.zeros(2), lambda t: t.sum()):
        equal(function(ones), function(torch.tensor([True, False])), "True + True is True")


def test_extremes_of_integers_are_not_negated_while_partial() -> None:
    x = torch.tensor([0, 1, 2], dtype=torch.uint8)
    shards = sw.Bundle([x, torch.zeros_like(x)])
    equal(-sw.DTensor.from_local(shards, MESHES["2"], [Partial("max")]), -x, "uint8 wraps around")


def test_moving_to_another_device_is_refused() -> None:
    x = distributed(torch.ones(4), MESHES["2"], [Shard(0)])
    with pytest.raises(sw.OperatorError, match=r"f32\[4@a\] cannot move to device cuda: a DTensor lives on its mesh's"):
        torch.ops.aten._to_copy(x, device="cuda")


@pytest.mark.parametrize("name", ["amax", "amin", "argmax", "max", "logsumexp", "var", "cumsum", "mean"])
def test_most_shards_may_be_empty(name: str) -> None:
    mesh, x = sw.init_mesh(a=3, b=2), torch.tensor([[1.5], [-2.0]])
    for placements in every_placement(x, mesh):
        got = getattr(torch, name)(distributed(x, mesh, placements), 0)
        want = getattr(torch, name)(x, 0)
        for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            equal(one, other, f"{name} {placements}")


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp"])
def test_a_sharded_dim_without_elements(name: str) -> None:
    x = torch.randn(3, 0)
    d = distributed(x, sw.init_mesh(a=2), [Shard(1)]).requires_grad_()
    got = getattr(torch, name)(d, 1)
    equal(got.detach(), getattr(torch, name)(x, 1), name)
    got.sum().backward()
    assert d.grad.shape == (3, 0)
