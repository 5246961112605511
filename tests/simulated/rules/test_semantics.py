"""Operators whose meaning is easily lost: numbers that nothing partial passes by, decompositions, losses of one row."""

from __future__ import annotations

import collections
import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise._torch.tensors import decompositions
from shardwise.base.schema import schema_of
from shardwise.errors import OperatorError
from shardwise.propagation.operator import operator_of
from shardwise.propagation.table import find
from shardwise.tensor.fallback import choose, decompose
from shardwise.verify.spread import difference, spread

aten = torch.ops.aten
MESH = sw.Mesh(("a",), (2,), range(2), "cpu", "simulated")
THREE = sw.Mesh(("a",), (3,), range(3), "cpu", "simulated")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y, Z, A, B = values(4, 3), values(4, 3, seed=1), values(4, 3, seed=2) + 3, values(4, 5, seed=3), values(5, 3, seed=4)
NUMBERS = (math.inf, -math.inf, math.nan, 0, 0.0, -3.5)
#: Functions of a number and tensors, linear in some of them.
LINEAR: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mul": (lambda s, x: x * s, (X,)),
    "mul a tensor": (lambda s, x: torch.tensor(float(s)) * x, (X,)),
    "div": (lambda s, x: x / s, (X,)),
    "div by a tensor": (lambda s, x: x / torch.tensor(float(s)), (X,)),
    "div.Scalar": (lambda s, x: aten.div.Scalar(x, s), (X,)),
    "div in place": (lambda s, x: x.clone().div_(s), (X,)),
    "add a number": (lambda s, x: x + s, (X,)),
    "add": (lambda s, x, y: torch.add(x, y, alpha=s), (X, Y)),
    "add in place": (lambda s, x, y: x.clone().add_(y, alpha=s), (X, Y)),
    "rsub": (lambda s, x, y: torch.rsub(x, y, alpha=s), (X, Y)),
    "lerp": (lambda s, x, y: torch.lerp(x, y, s), (X, Y)),
    "addcmul": (lambda s, x, y: torch.addcmul(x, y, Z, value=s), (X, Y)),
    "addcdiv": (lambda s, x, y: torch.addcdiv(x, y, Z, value=s), (X, Y)),
    "addmm": (lambda s, x, a, b: torch.addmm(x, a, b, beta=s), (X, A, B)),
    "addr": (lambda s, x, a, b: torch.addr(x, a, b, alpha=s), (X, X[:, 0].clone(), B[0].clone())),
    "lists": (lambda s, x, y: torch._foreach_div([x, y], s), (X, Y)),
    "index_add": (lambda s, x, y: torch.index_add(x, 0, torch.tensor([0, 1, 1, 3]), y, alpha=s), (X, Y)),
    "backward": (lambda s, x, y: aten.leaky_relu_backward(x, y, s, False), (X, Y)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_no_partial_value_passes_by_a_number_that_is_not_finite_or_divides_by_0(name: str) -> None:
    function, tensors = LINEAR[name]
    options = (Partial(), Partial("max"), Replicate(), Shard(0))
    for number, placements in itertools.product(NUMBERS, itertools.product(options, repeat=len(tensors))):
        want = function(number, *tensors)
        spreads = [spread(x, MESH, [p], i) for i, (x, p) in enumerate(zip(tensors, placements, strict=True))]
        text = difference(function(number, *spreads), want)
        assert text is None, f"{number}, {placements}: {text}"


def test_a_finite_number_still_lets_a_sum_pass() -> None:
    x = spread(X, MESH, [Partial()])
    with sw.trace_comm() as log:
        assert (x * 2 / 3 * 0).placements == (Partial(),)
    assert not log.records


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_a_number_in_the_place_of_the_first_tensor(kind: str) -> None:
    x = torch.tensor([1, 2, 3, 0])
    for function in (lambda x: 1 << x, lambda x: x << 1, lambda x: x >> 1, lambda x: 64 >> x, lambda x: 7 - x, lambda x: 2**x):
        assert difference(function(spread(x, MESH, [Partial(kind)])), function(x)) is None


LABELS = torch.tensor([[1, 0, -1, 2, 3], [-1, 0, 1, 2, 3], [0, 1, 2, 3, 4], [4, -1, 4, -1, 4]])
MARGINS = {
    "labels": (F.multilabel_margin_loss, values(4, 5), LABELS),
    "labels of one row": (F.multilabel_margin_loss, values(5), LABELS[0]),
    "classes": (F.multi_margin_loss, values(4, 5), torch.tensor([1, 0, 2, 3])),
    "a class of one row": (F.multi_margin_loss, values(5), torch.tensor(1)),
    "a class of one row in a list": (F.multi_margin_loss, values(5), torch.tensor([1])),
}


@pytest.mark.parametrize("name", MARGINS)
def test_margin_losses(name: str) -> None:
    function, x, target = MARGINS[name]
    places = [Replicate(), Partial(), *(Shard(dim) for dim in range(x.ndim))]
    for reduction, place, cut in itertools.product(("none", "mean", "sum"), places, (False, True)):
        leaf, d = x.clone().requires_grad_(), spread(x, THREE, [place]).requires_grad_()
        t = spread(target, THREE, [Shard(0) if cut and target.ndim else Replicate()])
        want, got = function(leaf, target, reduction=reduction), function(d, t, reduction=reduction)
        assert difference(got, want) is None
        want.sum().backward()
        got.sum().backward()
        assert difference(d.grad, leaf.grad) is None


class Decomposed(TorchDispatchMode):
    """Compares torch's decompositions, where they serve here, with torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[Any] = collections.Counter()
        self.wrong: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        served = func.namespace == "aten" and find(func) is None and not schema_of(func).written
        if served and self.counts[func] < 40 and choose(operator_of(func)) is decompose:
            self.counts[func] += 1
            own = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
            found = decompositions[func](*own[0], **own[1])
            text = None if found is NotImplemented else difference(found, func(*args, **kwargs))
            self.wrong |= {func: text} if text is not None else {}
        return func(*args, **kwargs)


@pytest.mark.slow
def test_decompositions_that_serve_here_give_what_kernels_give() -> None:
    from shardwise.verify import samples

    mode = Decomposed()
    dtypes = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)
    samples.run_under(mode, samples.operators().values(), dtypes, 6)
    assert not mode.wrong and len(mode.counts) > 20


@pytest.mark.parametrize("cut", [0, 1])
def test_softmax_of_integers_is_refused(cut: int) -> None:
    x = spread(torch.arange(8).reshape(4, 2), MESH, [Shard(cut)])
    for function in (torch.softmax, torch.log_softmax):
        with pytest.raises(RuntimeError, match=r"not implemented for|takes floats"):
            function(x, 1)
    assert difference(torch.softmax(x, 1, dtype=torch.float32), torch.arange(8.0).reshape(4, 2).softmax(1)) is None


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_deep_copy_keeps_what_shares_memory_together(place: Any) -> None:
    x = spread(X, MESH, [place])
    tensor, row, column = copy.deepcopy([x, x[1], x[:, 2]])
    tensor.mul_(3)
    assert difference([tensor, row, column], [3 * X, 3 * X[1], 3 * X[:, 2]]) is None
    assert difference(x, X) is None
    view, tensor = copy.deepcopy([x.view(3, 4), x])
    tensor.mul_(3)
    assert difference(view, 3 * X.view(3, 4)) is None
    linear = torch.nn.Linear(3, 2)
    linear.weight = torch.nn.Parameter(x)
    both = copy.deepcopy(torch.nn.ModuleList([linear, linear]))
    assert both[0].weight is both[1].weight and isinstance(both[0].weight, torch.nn.Parameter)


@pytest.mark.parametrize("place", [Shard(0), Partial(), Replicate()], ids=str)
def test_memory_is_given_whole_or_refused(place: Any) -> None:
    x = spread(X, MESH, [place])
    assert torch.equal(torch.from_dlpack(x), X) and np.array_equal(np.from_dlpack(x), X.numpy())
    calls: list[Callable[[], Any]] = [x.share_memory_, x.data_ptr, x.storage, x.untyped_storage]
    calls += [
        lambda: x.apply_(abs),
        lambda: x.map_(x, max),
        lambda: x.map2_(x, x, max),
        torch.nn.ParameterList([x]).share_memory,
    ]
    for call in calls:
        with pytest.raises(OperatorError, match="has no memory of its own"):
            call()


def test_gradients_follow_a_layout_that_was_changed_by_data() -> None:
    p = torch.nn.Parameter(spread(X, MESH, [Shard(0)]))
    (p * Y).sum().backward()
    assert p.grad.placements == (Shard(0),)
    p.grad = None
    p.data = p.data.redistribute(placements=[Shard(1)])
    (p * Y).sum().backward()
    assert p.grad.placements == (Shard(1),) and difference(p.grad, Y) is None
