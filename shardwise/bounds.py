"""What a move must bring to a rank at the least: bytes, from index sets alone. Pure.

What a rank holds is a product of one set of indices per dim, so what it lacks of its target is the product of the target's sets
less the product of what they share with the source's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from .layout import Factor, Layout, shard_runs, whole
from .memo import memo

Point = tuple[int, ...]


@memo("missing", limit=8192)
def missing(have: Layout, want: Layout) -> int:
    """Bytes of `want` that the worst rank does not hold in `have`; what is pending is not looked at.

    >>> from shardwise import Mesh, Shard, Replicate, layout
    >>> mesh = Mesh(("a",), (4,), range(4), "cpu", "simulated")
    >>> missing(layout((8,), mesh, [Shard(0)]), layout((8,), mesh, [Replicate()]))
    24
    """
    shared = [_Shared(have, want, dim) for dim in range(want.ndim)]
    worst = 0
    for before, after in _points(have, want):
        held = math.prod([s.wanted(after) for s in shared])
        both = 0 if before is None else math.prod([s.both(before, after) for s in shared])
        worst = max(worst, held - both)
    return worst * want.dtype.itemsize


def _points(have: Layout, want: Layout) -> Iterator[tuple[Point | None, Point]]:
    """Where a rank stands in the mesh of `have` (None: nowhere) and of `want`; on one mesh only coordinates that cut differ."""
    if have.mesh is want.mesh:
        cuts = {axis for layout in (have, want) for axis, state in layout.states.items() if isinstance(state, int)}
        for point in product(*(range(n) if axis in cuts else (0,) for axis, n in have.mesh.shape.items())):
            yield point, point
        return
    for place, rank in enumerate(want.mesh.ranks):
        there = have.mesh.place(rank)
        yield None if there is None else have.mesh.coordinates[there], want.mesh.coordinates[place]


class _Shared:
    """How many indices of one dim a rank wants, and how many of those it holds."""

    def __init__(self, have: Layout, want: Layout, dim: int) -> None:
        self._have, self._want = have, want
        self._before, self._after = have.dims[dim], want.dims[dim]
        self._known: dict[tuple[Point, Point], int] = {}

    def wanted(self, after: Point) -> int:
        return math.prod(
            [f.sizes[index] for f, index in zip(self._after, _shards(self._want, self._after, after), strict=True)]
        )

    def both(self, before: Point, after: Point) -> int:
        shards = _shards(self._have, self._before, before), _shards(self._want, self._after, after)
        if shards not in self._known:
            one, other = shard_runs(self._before, shards[0]), shard_runs(self._after, shards[1])
            self._known[shards] = sum(max(0, min(b, d) - max(a, c)) for a, b in one for c, d in other)
        return self._known[shards]


def _shards(layout: Layout, dim: tuple[Factor, ...], point: Point) -> Point:
    return tuple([layout.shard_at(factor, point) for factor in dim])


def lower_bound(have: Layout, want: Layout) -> int:
    """The least bytes that the worst rank must receive, whatever the algorithm, if elements travel as they are.

    A rank receives what it lacks. Where pending values are reduced, each element travels at least once from all but one of
    those that hold a summand, and once more to all but one of those that want the result; some rank receives at least the
    average of that.
    A value that is to be left pending may lie with any rank of its group.

    >>> from shardwise import Mesh, Partial, Replicate, layout
    >>> mesh = Mesh(("a",), (4,), range(4), "cpu", "simulated")
    >>> lower_bound(layout((8,), mesh, [Partial()]), layout((8,), mesh, [Replicate()]))  # twice three quarters
    48
    """
    if have.mesh is not want.mesh:
        return _across(have, want)
    mesh = have.mesh
    changed = [axis for axis in mesh.axes if have.states.get(axis) != want.states.get(axis) and not _rescales(axis, have, want)]
    reduced = [axis for axis in changed if isinstance(have.states.get(axis), str)]
    fresh = [axis for axis in changed if isinstance(want.states.get(axis), str)]
    group = math.prod(mesh.shape[axis] for axis in fresh)
    if not reduced:
        return -(-missing(_together(have, fresh), want) // group)
    summands = math.prod(mesh.shape[axis] for axis in reduced)
    inside = math.prod(mesh.shape[axis] for axis in reduced if axis in fresh)
    if inside == summands:
        return 0
    copies = math.prod(n for axis, n in mesh.shape.items() if axis not in want.states)
    apart = math.prod(n for axis, n in mesh.shape.items() if isinstance(want.states.get(axis), str) and axis not in fresh)
    return max(-(-want.nbytes // group), _average(want, summands - inside + copies - 1, mesh.size // apart))


def _rescales(axis: str, have: Layout, want: Layout) -> bool:
    """Whether a pending sum becomes a pending average or the reverse, which is arithmetic on each rank alone."""
    return {have.states.get(axis), want.states.get(axis)} == {"sum", "avg"} and have.dtype.is_floating_point


def _together(have: Layout, axes: list[str]) -> Layout:
    """At least what the ranks of a group over `axes` hold together."""
    dims = list(have.dims)
    for i in range(have.ndim):
        cuts = have.axes_of(i)
        gone = [axis for axis in cuts if axis in axes]
        if gone and cuts[-len(gone) :] != tuple(gone):
            dims[i] = (whole(have.shape[i]),)
    return have.replace(dims=dims).without(axes)


def _average(want: Layout, transfers: int, ranks: int) -> int:
    return -(-want.shape.numel() * want.dtype.itemsize * transfers // ranks)


def _across(have: Layout, want: Layout) -> int:
    group = math.prod(want.mesh.shape[axis] for axis, _ in want.partials)
    if not have.partials:
        return missing(have, want) if group == 1 else max(0, -(-(want.nbytes - group * have.nbytes) // group))
    summands = math.prod(have.mesh.shape[axis] for axis, _ in have.partials)
    copies = math.prod(n for axis, n in want.mesh.shape.items() if axis not in want.states)
    if summands == 1 or group > 1:
        return 0
    return max(want.nbytes, _average(want, summands + copies - 2, len({*have.mesh.ranks, *want.mesh.ranks})))
