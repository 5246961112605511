"""Transforms of functions over DTensors: torch.func, forward-mode AD, gradients of gradients, torch.masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import shardwise as sw
from shardwise import DTensor, OperatorError, Replicate, Shard
from tests.helpers.one_device import MESHES, equal

#: In doubles: the second derivative of a determinant loses four digits, and which ones depends on the processor.
X, W, B = (
    torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) for shape in [(4, 6), (6, 8), (8,)]
)
PLACEMENTS = [Replicate()], [Shard(0)], [Shard(-1)]


def like_dense(function: Callable[..., Any], *tensors: Tensor, placements: Any = PLACEMENTS) -> None:
    """The function gives on DTensors what it gives on one device; all its tensors are sharded alike."""
    want = _flat(function(*tensors))
    for placement in placements:
        spread = [sw.distribute_tensor(t, MESHES["2"], placement) for t in tensors]
        for one, other in zip(_flat(function(*spread)), want, strict=True):
            torch.testing.assert_close(_plain(one), other, atol=1e-8, rtol=1e-8, equal_nan=True)


def _plain(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _flat(value: Any) -> list[Any]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list | tuple) else [value]


def loss(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w + b).pow(2).sum()


def pulled_back(w: Tensor, x: Tensor, b: Tensor) -> Any:
    out, pull = vjp(lambda w, b: torch.relu(x @ w + b), w, b)
    return out, pull(torch.ones_like(out))


def pushed_forward(w: Tensor, x: Tensor, b: Tensor) -> Any:
    return jvp(lambda w, b: torch.tanh(x @ w + b), (w, b), (torch.ones_like(W), torch.ones_like(b)))


def per_sample(w: Tensor, x: Tensor, b: Tensor) -> Any:
    return vmap(grad(loss, argnums=(0, 2)), in_dims=(None, 0, None))(w, x, b)


def second(w: Tensor, x: Tensor, b: Tensor) -> Any:
    return hessian(lambda b: loss(w, x, b))(b)


@pytest.mark.parametrize(
    "function",
    [
        lambda *args: grad(loss, argnums=(0, 1, 2))(*args),
        lambda *args: grad_and_value(loss)(*args),
        pulled_back,
        pushed_forward,
        per_sample,
        second,
        lambda w, x, b: jacrev(lambda w: torch.softmax(w, -1).sum(0))(w),
        lambda w, x, b: jacfwd(lambda w: torch.softmax(w, -1).sum(0))(w),
    ],
)
def test_transforms_mean_what_they_mean_on_one_device(function: Callable[..., Any]) -> None:
    like_dense(function, W, X, B)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ W,
        lambda x: torch.softmax(x, -1),
        lambda x: x.sum(),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x.clone().add_(1).index_put((torch.tensor([0, 1]),), X.new_tensor([1.0, 2.0])),
        lambda x: x.sort()[0],
        lambda x: torch.cat([x, x]).var(),
        lambda x: vmap(lambda y: y * x.sum())(x),
    ],
)
def test_vmap_over_a_dim_that_is_sharded_or_not(function: Callable[..., Any]) -> None:
    like_dense(vmap(function), X)
    like_dense(vmap(function, in_dims=1), X.t().contiguous())
    if function(X[0]).ndim:
        like_dense(vmap(function, out_dims=1), X)


def test_gradients_of_each_sample_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    names = [name for name, _ in model.named_parameters()]

    def of_one(parameters: Any, x: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,)).pow(2).mean()

    def function(x: Tensor, *parameters: Tensor) -> Any:
        return vmap(grad(of_one), in_dims=(None, 0))(parameters, x)

    like_dense(function, X, *(p.detach() for p in model.parameters()))


def test_linearize_is_refused() -> None:
    x = sw.distribute_tensor(X, MESHES["2"], [Shard(0)])
    with pytest.raises(OperatorError, match=r"input of make_fx.*take torch.func.jvp for each tangent"):
        linearize(torch.sin, x)


# ── operators under forward-mode AD and twice under backward ──────────────────────────────────────────────────────────

OPERATORS: dict[str, Callable[..., Any]] = {
    "mlp": lambda x, w, b: F.gelu(x @ w + b),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "softmax": lambda x: F.softmax(x, -1) + 1,
    "norm": lambda x: x.norm(dim=0),
    "index": lambda x: x[torch.tensor([0, 2])],
    "view": lambda x: x.view(-1)[3:9],
    "scaled": lambda x: x * torch.arange(6.0),
    "written": lambda x: x.clone().mul_(2).sin(),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy_with_logits(x, X.new_ones(4, 6)),
    "det": lambda x: torch.linalg.det(x[:4, :4]),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(2, 1, 2, 6)] * 3, attn_mask=X.new_ones(2, 2)),
    "convolution": lambda x, w: F.conv1d(x.view(2, 2, 6), w.view(4, 2, 6)),
}


def _tensors(function: Callable[..., Any]) -> list[Tensor]:
    return [X, W, B][: function.__code__.co_argcount]


@pytest.mark.parametrize("tangents", ["alike", "elsewhere", "plain"])
@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"attention"}))
def test_forward_mode(name: str, tangents: str) -> None:
    def function(*primals: Tensor) -> Any:
        with fwAD.dual_level():
            duals = [fwAD.make_dual(x, _tangent(x, tangents)) for x in primals]
            return tuple(fwAD.unpack_dual(OPERATORS[name](*duals)))

    like_dense(function, *_tensors(OPERATORS[name]))


def _tangent(primal: Tensor, kind: str) -> Tensor:
    tangent = torch.randn(primal.shape, dtype=primal.dtype, generator=torch.Generator().manual_seed(primal.ndim))
    if kind == "plain" or not isinstance(primal, DTensor):
        return tangent
    return sw.distribute_tensor(tangent, primal.mesh, primal.layout if kind == "alike" else [Shard(primal.ndim - 1)])


def test_a_plain_tangent_is_spread_like_its_primal() -> None:
    x = sw.distribute_tensor(X, MESHES["2"], [Shard(0)])
    with fwAD.dual_level(), sw.communication("forbid"):
        tangent = fwAD.unpack_dual(fwAD.make_dual(x, X.new_ones(4, 6)).sin()).tangent
    assert isinstance(tangent, DTensor) and tangent.placements == (Shard(0),)
    equal(tangent, X.cos(), "tangent of sin")


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_gradients_of_gradients(name: str) -> None:
    def function(*tensors: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = torch.autograd.grad(OPERATORS[name](*leaves).sin().sum(), leaves, create_graph=True)
        return first, torch.autograd.grad(sum((g * g).sum() for g in first), leaves)

    like_dense(function, *_tensors(OPERATORS[name]))


def test_many_gradients_at_once() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        x = x.detach().requires_grad_()
        several = torch.stack([torch.ones(4, 8), torch.arange(32.0).view(4, 8)])
        return torch.autograd.grad(torch.tanh(x @ w), x, several, is_grads_batched=True)

    like_dense(function, X, W)
    for words in ({"vectorize": True}, {"vectorize": True, "strategy": "forward-mode"}):
        like_dense(lambda x, words=words: torch.autograd.functional.jacobian(lambda x: x.sin().sum(0), x, **words), X)
    like_dense(lambda x: torch.autograd.functional.hvp(lambda x: x.sin().sum(), x, torch.ones(4, 6)), X)


# ── what asks for torch's `layout` ────────────────────────────────────────────────────────────────────────────────────

MASKED = "sum mean prod amax amin argmax softmax log_softmax softmin var std median cumsum cumprod logsumexp norm normalize"


@pytest.mark.parametrize("name", MASKED.split())
def test_masked_operators(name: str) -> None:
    operator: Any = getattr(torch.masked, name)
    first: Any = {"norm": (2.0, 1), "normalize": (2.0, 1), "var": (1, False), "std": (1, False)}.get(name, (1,))
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    like_dense(lambda x, m: operator(x, *first, mask=m), X, mask)
    like_dense(lambda x: operator(x, *first, mask=mask[:1]), X)


def test_tensors_are_distributed_inside_a_transform() -> None:
    def of(w: Tensor) -> Tensor:
        return sw.distribute_tensor(w, MESHES["2"], [Shard(0)])

    w = torch.arange(4.0)
    assert grad(lambda w: (of(w) ** 2).sum())(w).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert grad(lambda w: (of(torch.ones(4)) * w).sum())(of(w)).tolist() == [1.0] * 4
    assert grad(lambda w: grad(lambda w: (of(w) ** 3).sum())(w).sum())(w).tolist() == [0.0, 6.0, 12.0, 18.0]
    assert torch.equal(hessian(lambda w: (of(w) ** 2).sum())(w), 2 * torch.eye(4))
    assert vmap(lambda w: (of(w) ** 2).sum())(torch.ones(3, 4)).tolist() == [4.0] * 3
    assert jvp(lambda w: of(w) ** 2, (w,), (torch.ones(4),))[1].tolist() == [0.0, 2.0, 4.0, 6.0]
