"""`relabel`: the ranks of a mesh, chosen and ordered so that what is to be moved there moves least. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..base.argument_checks import integers, refuse
from ..errors import MeshError
from ..layouts.from_placements import Placements, make_layout
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..redistribution.shards import common, index_of, shape_of
from .dtensor import DTensor


def relabel(mesh: Mesh | Any, *moves: tuple[DTensor | Layout, Placements | Layout], among: Iterable[int] | None = None) -> Mesh:
    """A mesh like the given one, over those ranks and in that order to which the moves bring the fewest bytes in all.

    A move is a tensor, or the layout of one, and its placements on the mesh. Ranks are chosen from `among`: as a rule, from
    those of the mesh and of the moves' tensors. The mesh stays as it is where no other brings fewer; else ranks ascend where
    that makes no difference.

    >>> import shardwise as sw
    >>> eight, six = sw.init_mesh(dp=8), sw.init_mesh(dp=6)
    >>> x = sw.ones(24, mesh=eight, placements=[sw.Shard(0)])
    >>> best = relabel(six, (x, [sw.Shard(0)]))
    >>> best.ranks, x.redistribute(best, [sw.Shard(0)])
    ((0, 1, 3, 4, 5, 7), DTensor(f32[24@dp], mesh=(dp=6)))
    """
    on = Mesh.from_torch(mesh)
    if on.root is not on:
        raise MeshError(f"relabel takes a whole mesh, got the part {on} of {on.root}; relabel that and take the part of it")
    pairs = [_pair(on, move) for move in moves]
    held = {*on.ranks, *(rank for have, _ in pairs for rank in have.mesh.ranks)}
    ranks = sorted(held if among is None else set(integers(among, "relabel: among", 0)))
    if len(ranks) < on.size():
        raise MeshError(f"relabel: mesh {on} has {on.size()} ranks, and among={ranks} are only {len(ranks)} to choose from")
    lacks = _lacks(on, ranks, pairs)
    # Among the least bytes ranks are to ascend: squares of shifts add up to the least there, too small to make up for a byte.
    byte = on.size() * len(ranks) ** 2
    chosen = _assigned([[lack * byte + (place - i) ** 2 for i, lack in enumerate(row)] for place, row in enumerate(lacks)])
    if set(on.ranks) <= set(ranks) and _total(lacks, map(ranks.index, on.ranks)) == _total(lacks, chosen):
        return on
    groups = "explicit" if on.explicit else "auto"
    return Mesh(on.axes, on.shape, [ranks[i] for i in chosen], on.device, on.world, None, on.slow, groups)


def _pair(mesh: Mesh, move: Any) -> tuple[Layout, Layout]:
    """What is moved and where to, with nothing partial: a reduction leaves its result where the summands are."""
    if not isinstance(move, tuple | list) or len(move) != 2 or not isinstance(move[0], DTensor | Layout):
        refuse("relabel: a move of *moves", "a pair of a DTensor, or the layout of one, and its placements on the mesh", move)
    tensor, placements = move
    have = tensor if isinstance(tensor, Layout) else tensor._layout
    if isinstance(placements, Layout) and placements.mesh is not mesh:
        raise MeshError(f"relabel of mesh {mesh}: the layout {placements} is on mesh {placements.mesh}; give placements")
    return have.reduced(), make_layout(have.shape, mesh, placements, have.dtype).reduced()


def _lacks(mesh: Mesh, ranks: Sequence[int], pairs: Sequence[tuple[Layout, Layout]]) -> list[list[int]]:
    """For each place of the mesh, the bytes that each rank lacks of what is wanted there."""
    found = [[0] * len(ranks) for _ in range(mesh.size())]
    for have, want in pairs:
        stands = [have.mesh.place(rank) for rank in ranks]
        held = [None if place is None else index_of(have, place) for place in stands]
        for place, row in enumerate(found):
            wanted = index_of(want, place)
            size = math.prod(shape_of(wanted))
            shared = {index: math.prod(shape_of(common(index, wanted))) for index in set(held) if index is not None}
            for i, index in enumerate(held):
                row[i] += (size - (shared[index] if index is not None else 0)) * have.dtype.itemsize
    return found


def _total(lacks: Sequence[Sequence[int]], chosen: Iterable[int]) -> int:
    return sum(row[i] for row, i in zip(lacks, chosen, strict=True))


def _assigned(costs: Sequence[Sequence[int]]) -> list[int]:
    """For each row a column of its own, so that the costs add up to the least; there are as many columns as rows, or more.

    Rows are added one by one, each along the cheapest chain of rows that give way to one another. Prices of rows and columns
    keep every cost at least their sum, and the chosen ones equal to it, so chains are found as shortest paths.

    >>> _assigned([[1, 2, 9], [1, 5, 9]])
    [1, 0]
    """
    columns = len(costs[0])
    row_price, column_price = [0] * len(costs), [0] * (columns + 1)
    owner = [-1] * (columns + 1)  # the row of each column; the last is no column of the table, but where a new row stands
    for new in range(len(costs)):
        owner[columns], at = new, columns
        gap: list[Any] = [math.inf] * columns
        before, reached, others = [columns] * columns, [columns], list(range(columns))
        while owner[at] >= 0:
            row = owner[at]
            for column in others:
                more = costs[row][column] - row_price[row] - column_price[column]
                if more < gap[column]:
                    gap[column], before[column] = more, at
            at = min(others, key=gap.__getitem__)
            rise = gap[at]
            for column in reached:
                row_price[owner[column]] += rise
                column_price[column] -= rise
            reached.append(at)
            others.remove(at)
            for column in others:
                gap[column] -= rise
        while at != columns:
            owner[at] = owner[before[at]]
            at = before[at]
    return [owner.index(row) for row in range(len(costs))]
