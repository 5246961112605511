"""Redistribution between any two layouts of a mesh gives the target exactly: uneven, empty, reordered, factors, all kinds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import LayoutError, Partial, Replicate, Shard
from shardwise.layout import Factor, Layout, make_layout, whole
from tests.laws import distributed, equal, pieces_of

CUTS = [Replicate(), Shard(0), Shard(1), Partial("sum")]
KINDS = ["sum", "avg", "max", "min", "product"]


def layouts(shape: tuple[int, int], axes: dict[str, int]) -> Iterator[Layout]:
    """Every placement of every axis in every order of axes, and some that placements cannot say."""
    mesh = sw.init_mesh(**axes)
    seen = {}
    for order in itertools.permutations(axes):
        for placements in itertools.product(CUTS, repeat=len(axes)):
            layout = make_layout(shape, mesh, dict(zip(order, placements, strict=True)))
            seen[layout] = None
    first = mesh.axes[0]
    n = mesh.shape[first]
    lopsided = (0,) * (n - 1) + (shape[0],)
    seen[Layout.of(mesh, [[Factor(shape[0], (first,), lopsided)], [whole(shape[1])]])] = None
    if shape[1] % 2 == 0:
        half = shape[1] // 2
        seen[Layout.of(mesh, [[whole(shape[0])], [whole(2), Factor(half, (first,), _sizes(half, n))]])] = None
    return iter(seen)


def _sizes(size: int, n: int) -> tuple[int, ...]:
    return tuple(make_layout((size,), sw.init_mesh(a=n), [Shard(0)]).dims[0][0].sizes)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((5, 3), {"a": 2}), ((4, 6), {"a": 3}), ((1, 2), {"a": 4}), ((5, 4), {"a": 2, "b": 2}), ((6, 4), {"a": 2, "b": 3})],
    ids=str,
)
def test_every_pair_of_layouts(shape: tuple[int, int], axes: dict[str, int]) -> None:
    x = torch.arange(float(shape[0] * shape[1])).view(shape)
    every = list(layouts(shape, axes))
    for have, want in itertools.product(every, every):
        got = distributed(x, have.mesh, have).redistribute(placements=want)
        assert got.layout is want
        equal(got, x, f"{have} → {want}")
        if not want.partials:
            for piece, exact in zip(got.to_local().pieces, pieces_of(x, want).pieces, strict=True):
                assert torch.equal(piece, exact), f"{have} → {want}"


def test_three_axes_sampled() -> None:
    x = torch.arange(5 * 4.0).view(5, 4)
    every = list(layouts((5, 4), {"a": 2, "b": 2, "c": 2}))
    picks = torch.randint(len(every), (250, 2), generator=torch.Generator().manual_seed(0)).tolist()
    for i, j in picks:
        equal(distributed(x, every[i].mesh, every[i]).redistribute(placements=every[j]), x, f"{every[i]} → {every[j]}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_partial(kind: str) -> None:
    mesh = sw.init_mesh(a=2, b=2)
    x = torch.arange(1.0, 13.0).view(4, 3)
    goals: list[Any] = [[Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Partial(kind)]]
    for goal in goals:
        for have in ([Partial(kind), Partial(kind)], [Partial(kind), Replicate()], [Shard(1), Partial(kind)]):
            equal(distributed(x, mesh, have).redistribute(placements=goal), x, f"{have} → {goal}")


def test_sum_and_avg_mix_in_one_reduction() -> None:
    mesh = sw.init_mesh(a=2, b=2)
    x = torch.arange(6.0).view(2, 3)
    d = distributed(x, mesh, [Partial("sum"), Partial("avg")])
    with sw.trace_comm() as log:
        equal(d.redistribute(), x, "sum and avg")
    assert log.counts() == {"all_reduce": 1}


def test_other_mixes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"cannot be pending max and sum at once.*only sum and avg mix"):
        sw.layout((4, 4), sw.init_mesh(a=2, b=2), [Partial("sum"), Partial("max")])


def test_reductions_over_several_axes_merge() -> None:
    mesh = sw.init_mesh(a=2, b=2, c=2)
    plan = sw.plan(sw.layout((4, 4), mesh, [Partial(), Replicate(), Partial()]), sw.layout((4, 4), mesh, [Replicate()] * 3))
    assert [(step.kind, step.axes) for step in plan.steps] == [("all_reduce", ("a", "c"))]


def test_gradients_go_back_to_the_layout_they_came_from() -> None:
    mesh = sw.init_mesh(a=2, b=2)
    x = torch.randn(5, 3)
    for have, want in itertools.product(itertools.product(CUTS, repeat=2), repeat=2):
        d = distributed(x, mesh, list(have)).requires_grad_()
        (d.redistribute(placements=list(want)) * 3).square().sum().backward()
        assert d.grad.layout is d.layout.reduced()
        equal(d.grad, 18 * x, f"{have} → {want}")
