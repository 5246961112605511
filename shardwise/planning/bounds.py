"""What a move must bring to a rank at the least: bytes, from index sets alone. Pure.

What a rank holds is a product of one set of indices per dim, so what it lacks of its target is the product of the target's sets
less the product of what they share with the source's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ..base.caches import memo
from ..layouts.layout import Dim, Layout, shard_runs
from ..layouts.mesh import Mesh

#: Of meshes with more ranks than this, only some are looked at.
MOST_POINTS = 4096

#: For each axis of a mesh, the coordinates along it of some ranks.
Points = dict[str, list[int]]


@memo("missing", limit=8192)
def missing(have: Layout, want: Layout, pooled: tuple[str, ...] = ()) -> int:
    """Bytes of `want` that the worst rank does not hold in `have`, or the worst group over `pooled` axes not together.

    What is partial is not looked at. On one mesh of more than `MOST_POINTS` ranks it is the worst of some, see `points`.

    >>> from shardwise import Mesh, Shard, Replicate, layout
    >>> mesh = Mesh(("a",), (4,), range(4), "cpu", "simulated")
    >>> missing(layout((8,), mesh, [Shard(0)]), layout((8,), mesh, [Replicate()]))
    24
    """
    if have.mesh is want.mesh:
        used = {axis for layout in (have, want) for axis, state in layout.states.items() if isinstance(state, int)}
        at = points(have.mesh, have.mesh.sorted_axes(used))
        return max(_lacks(have, at, want, at, pooled)) * want.dtype.itemsize
    found = [(have.mesh.place(rank), place) for place, rank in enumerate(want.mesh.ranks)]
    both = [(place, other) for place, other in found if place is not None]
    new = [math.prod(want.local_shape(other)) for place, other in found if place is None]
    here, there = _at(have.mesh, [place for place, _ in both]), _at(want.mesh, [other for _, other in both])
    return max([*new, *(_lacks(have, here, want, there) if both else ())]) * want.dtype.itemsize


def _lacks(have: Layout, here: Points, want: Layout, there: Points, pooled: tuple[str, ...] = ()) -> list[int]:
    """At each point, how many of the elements that a rank wants it does not hold, nor does its group over `pooled` axes."""
    goals = [Side(dim, want.mesh, there) for dim in want.dims]
    held = [shares(Side(dim, have.mesh, here), goal, pooled) for dim, goal in zip(have.dims, goals, strict=True)]
    wanted = [shares(goal, goal) for goal in goals]
    return [a - b for a, b in zip(products(wanted), products(held), strict=True)]


def products(vectors: Sequence[list[int]]) -> list[int]:
    """The products of the numbers that stand at the same place.

    >>> products([[1, 2], [3, 4]])
    [3, 8]
    """
    return [math.prod(numbers) for numbers in zip(*vectors, strict=True)] if vectors else [1]


@memo("points", limit=1024)
def points(mesh: Mesh, axes: tuple[str, ...], most: int = MOST_POINTS) -> Points:
    """The coordinates of ranks, for each axis of the mesh: all that differ along `axes`, or some of them if they are too many.

    A bound from some ranks is a bound; the ranks that share least with their target are found at the ends.
    """
    sizes = {axis: mesh.axis_sizes[axis] for axis in axes}
    few = math.prod(sizes.values()) > most
    counts = [sizes.get(axis, 1) for axis in mesh.axes]
    every = list(product(*[sorted({0, 1, n // 2, n - 1}) if few and n > 4 else range(n) for n in counts]))
    return {axis: [point[i] for point in every] for i, axis in enumerate(mesh.axes)}


@memo("indices", limit=4096)
def indices(mesh: Mesh, axes: tuple[str, ...], most: int = MOST_POINTS) -> list[int]:
    """At each point of the mesh, which shard of a dim sharded by these axes a rank holds. Not to be written to."""
    return _indices(mesh, axes, points(mesh, mesh.axes, most))


def _indices(mesh: Mesh, axes: tuple[str, ...], at: Points) -> list[int]:
    found = [0] * len(at[mesh.axes[0]])
    for axis in axes:
        n = mesh.axis_sizes[axis]
        found = [i * n + value for i, value in zip(found, at[axis], strict=True)]
    return found


def _at(mesh: Mesh, places: list[int]) -> Points:
    return {axis: [mesh.coordinates[place][i] for place in places] for i, axis in enumerate(mesh.axes)}


class Side(NamedTuple):
    """A sharding of one dim, and ranks that hold a part of it each, by their coordinates in its mesh."""

    dim: Dim
    mesh: Mesh
    at: Points

    def shards(self) -> list[tuple[int, ...]]:
        """At each point, the shard of each factor that a rank there holds."""
        return list(zip(*[_indices(self.mesh, factor.axes, self.at) for factor in self.dim], strict=True))


def shares(have: Side, want: Side, pooled: Sequence[str] = ()) -> list[int]:
    """At each point, how many of the indices that a rank wants of a dim it holds, or its group over `pooled` axes does."""
    goals = want.shards()
    axes = [axis for factor in have.dim for axis in factor.axes if axis in pooled]
    total = [0] * len(goals)
    for values in product(*[range(have.mesh.axis_sizes[axis]) for axis in axes]):
        moved = {axis: [value] * len(goals) for axis, value in zip(axes, values, strict=True)}
        found = _overlaps(have.dim, have._replace(at=have.at | moved).shards() if moved else have.shards(), want.dim, goals)
        total = [sofar + more for sofar, more in zip(total, found, strict=True)]
    return total


def _overlaps(one: Dim, mine: list[tuple[int, ...]], other: Dim, theirs: list[tuple[int, ...]]) -> list[int]:
    """How many indices of a dim shards of one sharded share with shards of another, pair by pair."""
    if len(one) == len(other) == 1:
        a, b = one[0].starts, other[0].starts
        pairs = zip(mine, theirs, strict=True)
        return [max(0, min(a[i + 1], b[j + 1]) - max(a[i], b[j])) for (i,), (j,) in pairs]
    found = []
    for at, there in zip(mine, theirs, strict=True):
        runs, goals = shard_runs(one, at), shard_runs(other, there)
        found.append(sum([max(0, min(b, d) - max(a, c)) for a, b in runs for c, d in goals]))
    return found


def lower_bound(have: Layout, want: Layout) -> int:
    """The least bytes that the worst rank must receive, whatever the algorithm, if elements travel as they are.

    A rank receives what it lacks. Where partial values are reduced, each element travels at least once from all but one of
    those that hold a summand, and once more to all but one of those that want the result; some rank receives at least the
    average of that. A value that is to be left partial may lie with any rank of its group.

    >>> from shardwise import Mesh, Partial, Replicate, layout
    >>> mesh = Mesh(("a",), (4,), range(4), "cpu", "simulated")
    >>> lower_bound(layout((8,), mesh, [Partial()]), layout((8,), mesh, [Replicate()]))  # twice three quarters
    48
    """
    if have.mesh is not want.mesh:
        return _across(have, want)
    mesh, left = have.mesh, tuple(axis for axis, _ in want.partials)
    group = math.prod([mesh.axis_sizes[axis] for axis in left])
    transfers = reductions(have.partials, want)
    if not transfers:
        return max(-(-missing(have, want, left) // group), _carried(have, want, left) if have.partials else 0)
    return max(-(-want.nbytes // group), _average(want, transfers, mesh.size()))


def reductions(partials: Sequence[tuple[str, str]], want: Layout) -> int:
    """How often each element must travel at the least, if reductions over these axes are partial; 0 if none is due.

    Once from every summand that does not lie in the group where the first result is completed, and once to every other group.
    """
    mesh = want.mesh
    left = {axis for axis, _ in want.partials}
    summands = math.prod([mesh.axis_sizes[axis] for axis, _ in partials])
    inside = math.prod([mesh.axis_sizes[axis] for axis, _ in partials if axis in left])
    copies = math.prod([n for axis, n in mesh.axis_sizes.items() if axis not in want.states])
    return summands - inside + copies - 1 if summands > inside else 0


def carried(partials: Sequence[tuple[str, str]], want: Layout, lacking: int) -> float:
    """The elements that ranks receive on average at the least, if groups over which the target is left partial lack so many in
    total, each counted on every rank of the group, and what they lack is partial elsewhere.

    Every summand of an element travels once, or is added to one that does, and the sum once to each group that lacks it.
    """
    mesh = want.mesh
    group = math.prod([mesh.axis_sizes[axis] for axis, _ in want.partials])
    summands = math.prod([mesh.axis_sizes[axis] for axis, _ in partials])
    copies = math.prod([n for axis, n in mesh.axis_sizes.items() if axis not in want.states])
    return ((summands - 1) / copies + 1) * lacking / group / mesh.size()


def _carried(have: Layout, want: Layout, left: tuple[str, ...]) -> int:
    mesh = have.mesh
    if mesh.size() > MOST_POINTS:
        return 0
    at = points(mesh, mesh.axes)
    return math.ceil(carried(have.partials, want, sum(_lacks(have, at, want, at, left))) * want.dtype.itemsize)


def _average(want: Layout, transfers: int, ranks: int) -> int:
    return -(-want.shape.numel() * want.dtype.itemsize * transfers // ranks)


def _across(have: Layout, want: Layout) -> int:
    group = math.prod(want.mesh.axis_sizes[axis] for axis, _ in want.partials)
    if not have.partials:
        return missing(have, want) if group == 1 else max(0, -(-(want.nbytes - group * have.nbytes) // group))
    summands = math.prod(have.mesh.axis_sizes[axis] for axis, _ in have.partials)
    copies = math.prod(n for axis, n in want.mesh.axis_sizes.items() if axis not in want.states)
    if summands == 1 or group > 1:
        return 0
    return max(want.nbytes, _average(want, summands + copies - 2, len({*have.mesh.ranks, *want.mesh.ranks})))
