"""Redistribution between any two layouts of a mesh gives the target exactly: uneven, empty, reordered, factors, all kinds.

A sample of the pairs is tried: SHARDWISE_SWEEP=20 tries twenty times as many, SHARDWISE_SWEEP=all every one.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

import shardwise as sw
from shardwise import Bundle, DTensor, LayoutError, Mesh, Partial, PlanError, Replicate, Shard
from shardwise.layouts.layout import Layout
from shardwise.redistribution.run import move
from tests.helpers.layout_moves import BITS, KINDS, agree, check, layouts, most, pairs, spread
from tests.helpers.one_device import distributed, equal

R, P = Replicate(), Partial()
CUTS = [R, Shard(0), Shard(1), P]


class Case(NamedTuple):
    """A tensor on a mesh, what may be partial, whether explicit sizes and factors take part, and how many pairs are tried."""

    shape: tuple[int, ...]
    axes: dict[str, int]
    count: int
    kinds: tuple[str, ...] = ("sum",)
    odd: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return (
            f"{list(self.shape)} on {'x'.join(map(str, self.axes.values()))} {','.join(self.kinds)}{' odd' if self.odd else ''}"
        )


ONE, TWO, THREE = {"a": 2}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}
CASES = [
    Case((5,), ONE, 500, KINDS),
    Case((6,), {"a": 3}, 500, KINDS),
    Case((4, 3), ONE, 500, KINDS),
    Case((1, 2), {"a": 4}, 500),
    Case((0, 3), ONE, 500),
    Case((2, 3, 4), ONE, 500),
    Case((5, 4), ONE, 500, BITS, dtype=torch.int64),
    Case((5, 3), TWO, 2500, KINDS, odd=False),
    Case((5, 4), TWO, 1500),
    Case((4, 6), {"a": 2, "b": 3}, 1500),
    Case((8,), TWO, 1000),
    Case((1, 4), TWO, 500),
    Case((4, 3), {"a": 1, "b": 2}, 500),
    Case((4, 2, 3), TWO, 500),
    Case((3, 4), TWO, 500, BITS, odd=False, dtype=torch.uint8),
    Case((8,), THREE, 200),
    Case((5, 4), THREE, 400, KINDS, odd=False),
    Case((5, 4), THREE, 150),
    Case((4, 2, 3), THREE, 200, odd=False),
    Case((4, 2, 3), THREE, 50),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_of_layouts(case: Case) -> None:
    every = layouts(case.shape, sw.init_mesh(**case.axes), case.kinds, case.odd, case.dtype)
    for have, want in pairs(every, most(case.count)):
        redistributed(have, want)


def redistributed(have: Layout, want: Layout) -> None:
    """Move a tensor from one layout to another and hold every rank's shard against the target's index sets."""
    got = DTensor.from_local(spread(have), have.mesh, have, run_check=False).redistribute(placements=want)
    assert got.layout is want
    check(got.to_local(), want, f"{have} → {want}")


def test_axes_that_a_sub_mesh_leaves_out_stay_as_they_are() -> None:
    for have, want in pairs(layouts((5, 4), sw.init_mesh(a=2, b=2, c=2)["c", "a"]), most(200)):
        redistributed(have, want)


def test_a_source_that_is_not_contiguous() -> None:
    mesh = sw.init_mesh(a=2, b=2)
    for have, want in itertools.product(layouts((5, 4), mesh, odd=False), repeat=2):
        turned = Bundle(shard.mT.contiguous().mT for shard in spread(have).shards)
        moved = move(turned, have, want)
        check(Bundle(shard.contiguous() for shard in moved.shards), want, f"{have} → {want}")


def test_nothing_that_a_rank_gets_shares_memory_with_what_it_had() -> None:
    mesh = sw.init_mesh(a=2, b=2)
    for have, want in itertools.permutations(layouts((4, 4), mesh, (), odd=False), 2):
        local = spread(have)
        moved = move(local, have, want)
        for before, after in zip(local.shards, moved.shards, strict=True):
            assert before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr(), f"{have} → {want}"


# ── one collective for what can be done in one ────────────────────────────────────────────────────────────────────────


def order(*axes: str) -> dict[str, Shard]:
    """Dim 0 sharded by axes, major to minor."""
    return {axis: Shard(0) for axis in axes}


MERGED: list[tuple[Any, Any, Any, dict[str, int]]] = [
    # shape, from, to, the collectives
    ((4, 4), [P, R, P], [R, R, R], {"all_reduce": 1}),
    ((4, 4), [P, P], [R, R], {"all_reduce": 1}),
    ((4, 4), [P, Shard(0), P], [R, Shard(0), R], {"all_reduce": 1}),
    ((4, 4), [P, Partial("avg")], [R, R], {"all_reduce": 1}),
    ((4, 4), [P, P], [Shard(0), Shard(1)], {"reduce_scatter": 1}),
    ((5, 3), [P, P], [Shard(0), Shard(1)], {"reduce_scatter": 1}),
    ((8, 3), [P, P], order("b", "a"), {"reduce_scatter": 1}),
    ((5, 3), [Partial("avg"), P], order("b", "a"), {"reduce_scatter": 1}),
    ((8, 8), [P, Shard(0), P], [Shard(1), Shard(0), Shard(1)], {"reduce_scatter": 1}),
    ((4, 4), [Shard(0), Shard(1)], [R, R], {"all_gather": 1}),
    ((5, 3), [Shard(0), Shard(0)], [R, R], {"all_gather": 1}),
    ((5, 3), [Shard(0), Shard(1)], [R, R], {"all_gather": 1}),
    ((8, 3), order("b", "a"), [R, R], {"all_gather": 1}),
    ((5, 3), order("b", "a"), [R, R], {"all_gather": 1}),
    ((5, 3), order("c", "a"), [R, R, R], {"all_gather": 1}),
    ((8, 8), [Shard(0), Shard(1), Shard(0)], [R, Shard(1), R], {"all_gather": 1}),
    ((8, 8), [Shard(0), Shard(0)], [Shard(1), Shard(1)], {"all_to_all": 1}),
    ((8, 8), order("b", "a"), [Shard(1), Shard(1)], {"all_to_all": 1}),
    ((8, 8), [Shard(0), Shard(0), R], {"b": Shard(1), "a": Shard(1)}, {"all_to_all": 1}),
    ((5, 3), [Shard(0), Shard(0)], [Shard(1), Shard(1)], {"all_to_all": 1}),
    ((4, 4), [Shard(0), Shard(1)], [Shard(1), Shard(0)], {"all_to_all": 1}),
    ((8, 8), order("a", "b"), order("b", "a"), {"all_to_all": 1}),
    ((4, 4), [Shard(0), R], [R, Shard(0)], {"all_to_all": 1}),
    ((4, 4), [R, R], [Shard(0), P], {}),
    ((4, 4), [Shard(0), P], [P, Partial("avg")], {}),
]


@pytest.mark.parametrize(("shape", "have", "want", "counts"), MERGED, ids=str)
def test_what_goes_in_one_collective(shape: Any, have: Any, want: Any, counts: dict[str, int]) -> None:
    mesh = sw.init_mesh(**dict.fromkeys("abc" if len(have) + len(want) > 4 or "c" in have else "ab", 2))
    one, other = (sw.layout(shape, mesh, p if isinstance(p, dict) else dict(zip("abc", p, strict=False))) for p in (have, want))
    with sw.trace_comm() as log:
        redistributed(one, other)
    assert log.counts() == counts


def test_reductions_over_several_axes_merge() -> None:
    mesh = sw.init_mesh(a=2, b=2, c=2)
    plan = sw.plan(sw.layout((4, 4), mesh, [P, R, P]), sw.layout((4, 4), mesh, [R] * 3))
    assert [(step.kind, step.axes) for step in plan.steps] == [("all_reduce", ("a", "c"))]


def test_other_mixes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"cannot be partial max and sum at once.*only sum and avg mix"):
        sw.layout((4, 4), sw.init_mesh(a=2, b=2), [Partial("sum"), Partial("max")])


def test_too_little_memory_is_refused() -> None:
    mesh = sw.init_mesh(a=2)
    have, want = sw.layout((4, 4), mesh, [Shard(0)]), sw.layout((4, 4), mesh, [R])
    with pytest.raises(PlanError, match=r"max_bytes=60: a rank holds 32 bytes before and 64 after.*needs at least 64"):
        move(spread(have), have, want, max_bytes=60)
    check(move(spread(have), have, want, max_bytes=64), want, "as much as it takes")


# ── replicas and gradients ────────────────────────────────────────────────────────────────────────────────────────────


def test_replicas_agree_to_the_last_bit() -> None:
    """Summands that round differently in every order: whoever holds the same part of the result holds the same bits."""
    mesh = sw.init_mesh(a=2, b=2, c=2)
    every = layouts((5, 4), mesh, ("sum", "avg", "product"), odd=False)
    partials = [layout for layout in every if len(layout.partials) > 1]
    generator = torch.Generator().manual_seed(0)
    for have, want in pairs(partials, most(300), [layout for layout in every if not layout.partials]):
        replicas = {}
        shards = []
        for place in range(mesh.size()):
            held = [mesh.coordinates[place][mesh.axes.index(axis)] for axis in have.states]
            shard = torch.randn(have.local_shape(place), generator=generator)
            shards.append(replicas.setdefault(tuple(held), shard))
        moved = move(Bundle(shards), have, want).shards
        agree(moved, want, f"{have} → {want}")


def test_gradients_go_back_to_the_layout_they_came_from() -> None:
    mesh: Mesh = sw.init_mesh(a=2, b=2)
    x = torch.randn(5, 3)
    for have, want in itertools.product(itertools.product(CUTS, repeat=2), repeat=2):
        d = distributed(x, mesh, list(have)).requires_grad_()
        (d.redistribute(placements=list(want)) * 3).square().sum().backward()
        assert d.grad.layout is d.layout.reduced()
        equal(d.grad, 18 * x, f"{have} → {want}")
