"""Every kind of step does what it says, between every two layouts that it can join; no planner takes part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Bundle, Layout, Mesh, Shard
from shardwise.comm import Simulated
from shardwise.planning.plan import Plan
from shardwise.planning.step import Step
from shardwise.redistribution.run import move
from tests.helpers.layout_moves import BITS, KINDS, check, layouts, most, sampled, spread

CASES = [
    ((5,), {"a": 2}),
    ((6,), {"a": 3}),
    ((4, 3), {"a": 2}),
    ((1, 2), {"a": 4}),
    ((5, 4), {"a": 2, "b": 2}),
    ((4, 6), {"a": 2, "b": 3}),
    ((1, 4), {"a": 2, "b": 2}),
    ((4, 3), {"a": 1, "b": 2}),
    ((8, 3), {"a": 2, "b": 2}),
    ((8,), {"a": 2, "b": 2, "c": 2}),
    ((5, 4), {"a": 2, "b": 2, "c": 2}),
    ((2, 4, 2), {"a": 2, "b": 2, "c": 2}),
]
cases = pytest.mark.parametrize(("shape", "axes"), CASES, ids=str)


def stepped(kind: str, axes: Any, before: Layout, after: Layout) -> Bundle:
    """What one step makes of the local value of `before`."""
    step = Step(kind, before.mesh.sorted_axes(axes), before, after)
    return move(spread(before), before, Plan(before, after, (step,)), "a test")


def every_step(kind: str, steps: Iterator[tuple[Any, Layout, Layout]]) -> int:
    """Run a sample of the steps; gives how many ran."""
    found = sampled(list(steps), most(400))
    for axes, before, after in found:
        check(stepped(kind, axes, before, after), after, f"{kind} over {axes}: {before} → {after}")
    return len(found)


def subsets(axes: Any) -> Iterator[tuple[str, ...]]:
    """Every choice of some of the axes."""
    axes = list(axes)
    return chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1))


def ends(layout: Layout) -> Iterator[tuple[tuple[str, ...], Layout]]:
    """Each set of axes that stand at the minor ends of factors, and the layout without them."""
    for axes in subsets(axis for axis, state in layout.states.items() if isinstance(state, int)):
        factors = [factor for dim in layout.dims for factor in dim]
        gone = [[axis in axes for axis in factor.axes] for factor in factors]
        if all(row == sorted(row) for row in gone):
            yield axes, layout.without(axes)


def pending(layout: Layout, axes: Any, kinds: Any) -> Layout:
    return layout.replace(partials=[*layout.partials, *zip(axes, kinds, strict=True)])


def choices(axes: tuple[str, ...], layout: Layout, kinds: Any = KINDS) -> Iterator[tuple[str, ...]]:
    """The kinds that may be partial over `axes` beside what is partial already."""
    for chosen in product(kinds, repeat=len(axes)):
        mixed = {*chosen, *(kind for _, kind in layout.partials)}
        if len(mixed) == 1 or mixed <= {"sum", "avg"}:
            yield chosen


def some_layouts(shape: tuple[int, ...], axes: dict[str, int], kinds: Any = ("sum",)) -> list[Layout]:
    return layouts(shape, sw.init_mesh(**axes), kinds, odd=len(axes) < 3 or len(shape) < 2)


# ── gathers and reductions ────────────────────────────────────────────────────────────────────────────────────────────


@cases
def test_all_gather(shape: Any, axes: Any) -> None:
    every = some_layouts(shape, axes)
    assert every_step("all_gather", ((gone, have, after) for have in every for gone, after in ends(have)))


@cases
def test_reduce_scatter(shape: Any, axes: Any) -> None:
    every = some_layouts(shape, axes)
    steps = (
        (gone, pending(before, gone, kinds), want)
        for want in every
        for gone, before in ends(want)
        for kinds in choices(gone, before)
    )
    assert every_step("reduce_scatter", steps)


@cases
def test_all_reduce(shape: Any, axes: Any) -> None:
    every = [layout for layout in some_layouts(shape, axes, KINDS) if layout.partials]
    steps = ((gone, have, have.without(gone)) for have in every for gone in subsets(axis for axis, _ in have.partials))
    assert every_step("all_reduce", steps)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.int16])
def test_bits_are_reduced(dtype: torch.dtype) -> None:
    mesh = sw.init_mesh(a=2, b=3)
    kinds = (*BITS, "sum", "max", "min", "product") if dtype is torch.bool else BITS
    every = layouts((5, 4), mesh, (), dtype=dtype)
    cut = [(gone, want, before) for want in every for gone, before in ends(want)]
    scatters = ((g, pending(b, g, k), want) for g, want, b in cut for kind in kinds for k in choices(g, b, [kind]))
    assert every_step("reduce_scatter", scatters)
    embeds = ((g, want, pending(b, g, k)) for g, want, b in cut for kind in kinds for k in choices(g, b, [kind]))
    assert every_step("embed", embeds)


# ── exchanges ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@cases
def test_all_to_all(shape: Any, axes: Any) -> None:
    """Equal shards and others: what cannot be packed evenly is still brought where it belongs."""
    left: dict[Any, list[Layout]] = {}
    for layout in some_layouts(shape, axes):
        for gone, rest in ends(layout):
            left.setdefault((gone, rest), []).append(layout)
    steps = ((gone, one, other) for (gone, _), some in left.items() for one in some for other in some if one is not other)
    assert every_step("all_to_all", steps) or len(shape) == 1


@cases
def test_permute(shape: Any, axes: Any) -> None:
    grids: dict[Any, list[Layout]] = {}
    for layout in some_layouts(shape, axes):
        grids.setdefault((tuple(tuple(f.sizes for f in dim) for dim in layout.dims), layout.partials), []).append(layout)
    pairs = [(one, other) for some in grids.values() for one in some for other in some if one is not other]
    ran = every_step("permute", ((_moving(one, other), one, other) for one, other in pairs))
    assert ran or len(axes) == 1


def _moving(one: Layout, other: Layout) -> set[str]:
    changed = [dim for dim in range(one.ndim) if one.dims[dim] != other.dims[dim]]
    return {axis for layout in (one, other) for dim in changed for axis in layout.axes_of(dim)}


@cases
def test_exchange(shape: Any, axes: Any) -> None:
    every = some_layouts(shape, axes)
    cut = {layout: [axis for axis, state in layout.states.items() if isinstance(state, int)] for layout in every}
    steps = ((cut[one], one, other) for one in every for other in every if one.partials == other.partials and cut[one])
    assert every_step("exchange", steps)


# ── local steps ───────────────────────────────────────────────────────────────────────────────────────────────────────


@cases
def test_take(shape: Any, axes: Any) -> None:
    every = some_layouts(shape, axes)
    pairs = ((one, other) for one in every for other in every if one.partials == other.partials and _within(other, one))
    assert every_step("take", (((), one, other) for one, other in pairs))


def _within(part: Layout, of: Layout) -> bool:
    held = [[_indices(layout, place) for place in range(layout.mesh.size())] for layout in (part, of)]
    return all(a <= b for one, other in zip(*held, strict=True) for a, b in zip(one, other, strict=True))


def _indices(layout: Layout, place: int) -> list[set[int]]:
    return [{i for low, high in layout.runs(dim, place) for i in range(low, high)} for dim in range(layout.ndim)]


@cases
def test_split(shape: Any, axes: Any) -> None:
    every = some_layouts(shape, axes)
    steps = (
        (new, have, pending(have, new, kinds))
        for have in every
        for new in subsets(axis for axis in axes if axis not in have.states)
        for kinds in choices(new, have)
    )
    assert every_step("split", steps)


@cases
def test_embed(shape: Any, axes: Any) -> None:
    every = some_layouts(shape, axes)
    steps = (
        (gone, have, pending(after, gone, kinds))
        for have in every
        for gone, after in ends(have)
        for kinds in choices(gone, after)
    )
    assert every_step("embed", steps)


@cases
def test_scale(shape: Any, axes: Any) -> None:
    every = [layout for layout in some_layouts(shape, axes, ("sum", "avg")) if layout.partials]
    pairs = ((one, other) for one in every for other in every if one.dims == other.dims and one is not other)
    steps = (
        ([axis for axis in kinds if kinds[axis] != dict(other.partials)[axis]], one, other)
        for one, other in pairs
        if (kinds := dict(one.partials)).keys() == dict(other.partials).keys()
    )
    assert every_step("scale", steps)


# ── what steps do not do ──────────────────────────────────────────────────────────────────────────────────────────────


class Watched(Simulated):
    """A simulated world that notes what steps do to local tensors, and how much each place sends to itself and to others."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.kept: list[int] = []
        self.sent: list[int] = []

    def each(self, function: Any, mesh: Mesh, *args: Any) -> Any:
        self.kernels.append(function.__name__)
        return super().each(function, mesh, *args)

    def all_to_all(self, x: Any, send: Any, receive: Any, mesh: Mesh, axes: Any) -> Any:
        for place in range(mesh.size()):
            own = send.at(place)[mesh.peers(place, axes).index(place)]
            self.kept.append(own)
            self.sent.append(sum(send.at(place)) - own)
        return super().all_to_all(x, send, receive, mesh, axes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr("shardwise.redistribution.run.transport", lambda mesh, operator: watched)
    return watched


def test_dim_0_in_the_order_of_the_group_needs_no_kernel(world: Watched) -> None:
    mesh = sw.init_mesh(a=2, b=2)
    before, turned = (sw.layout((8, 3), mesh, {axis: Shard(0) for axis in order}) for order in ("ab", "ba"))
    stepped("all_gather", ("a", "b"), before, before.replicated())
    stepped("reduce_scatter", ("a", "b"), pending(before.replicated(), "ab", ["sum", "sum"]), before)
    assert world.kernels == []
    stepped("all_gather", ("a", "b"), turned, turned.replicated())
    assert world.kernels == ["join"]


def test_what_a_rank_holds_already_does_not_travel(world: Watched) -> None:
    mesh = sw.init_mesh(a=2, b=2)
    cut, turned = sw.layout((6, 6), mesh, [Shard(0), Shard(1)]), sw.layout((6, 6), mesh, [Shard(1), Shard(0)])
    for kind in ("permute", "exchange"):
        world.kept.clear(), world.sent.clear()
        stepped(kind, ("a", "b"), cut, turned)
        assert world.kept == [0] * 4 and world.sent == [0, 9, 9, 0]


def test_copies_share_the_work_of_a_permute(world: Watched) -> None:
    mesh = sw.init_mesh(a=3, b=3)
    have, want = sw.layout((6,), mesh, {"a": Shard(0)}), sw.layout((6,), mesh, {"b": Shard(0)})
    check(stepped("permute", ("a", "b"), have, want), want, "from one axis to another")
    assert world.sent == [0, 2, 2, 2, 0, 2, 2, 2, 0]
