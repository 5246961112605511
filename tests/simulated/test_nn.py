"""torch.nn.functional on DTensors, forward and backward: values and gradients are those of one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Mesh, Replicate, Shard
from tests.laws import distributed, equal

MESHES = {"2": sw.init_mesh(a=2), "3": sw.init_mesh(a=3), "2x2": sw.init_mesh(a=2, b=2)}
R = Replicate()

pytestmark = pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def every(mesh: Mesh, *dims: Sequence[int]) -> Iterator[list[tuple[Any, ...]]]:
    """Placements of tensors, each replicated or cut on one of its `dims`: by the first axis, then by each axis its own way."""
    options = [[R, *(Shard(d) for d in own)] for own in dims]
    if mesh.ndim == 1:
        yield from ([(p,) for p in choice] for choice in itertools.product(*options))
        return
    for first in itertools.product(*options):
        for second in itertools.product(*options):
            if sum(p != R for p in first + second) <= 3:
                yield list(zip(first, second, strict=True))


def check(function: Callable[..., Tensor], tensors: Sequence[Tensor], mesh: Mesh, placements: Sequence[Any]) -> None:
    """Value and gradients, for a random cotangent."""
    dense = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    want = function(*dense)
    cotangent = randn(*want.shape)
    want.backward(cotangent)
    spread = [distributed(t, mesh, p).requires_grad_(t.is_floating_point()) for t, p in zip(tensors, placements, strict=True)]
    about = f"{[repr(x.layout) for x in spread]} on {mesh}"
    got = function(*spread)
    equal(got, want.detach(), about)
    got.backward(distributed(cotangent, mesh, [R] * mesh.ndim))
    for x, d in zip(spread, dense, strict=True):
        if x.requires_grad:
            assert x.grad.layout.dims == x.layout.dims and not x.grad.layout.partials, f"{about}: {x.grad!r}"
            equal(x.grad, d.grad, f"gradient of {x!r}: {about}")


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 2, 4), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(mesh: Mesh, shape: tuple[int, ...], bias: bool) -> None:
    tensors = [randn(*shape), randn(5, 4), *([randn(5)] if bias else [])]
    for placements in every(mesh, range(len(shape)), (0, 1), *([(0,)] if bias else [])):
        check(F.linear, tensors, mesh, placements)


@pytest.mark.parametrize(
    "shapes",
    [((3,), (3,)), ((5, 3), (3,)), ((3,), (2, 3, 5)), ((2, 1, 5, 3), (3, 3, 2)), ((3, 5, 3), (3, 2))],
    ids=str,
)
def test_matmul(mesh: Mesh, shapes: tuple[tuple[int, ...], ...]) -> None:
    for placements in every(mesh, *(range(len(shape)) for shape in shapes)):
        check(torch.matmul, [randn(*shape) for shape in shapes], mesh, placements)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("bij,bjk->bik", ((3, 2, 5), (3, 5, 2))), ("bhld,bhsd->bhls", ((2, 3, 2, 5), (2, 3, 3, 5))), ("i,j->ij", ((3,), (5,)))],
)
def test_einsum(mesh: Mesh, equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    for placements in every(mesh, *(range(min(2, len(shape))) for shape in shapes)):
        check(lambda *t: torch.einsum(equation, *t), [randn(*shape) for shape in shapes], mesh, placements)
