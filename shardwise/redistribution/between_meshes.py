"""Moves a tensor from one mesh to another: to each rank exactly what it lacks, in one all-to-all of the ranks of both.

A rank keeps what it holds without communication. What several ranks hold comes in equal shares from each of them. What one rank
sends and receives is found by looking once at every other rank.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from ..comm import PerRank, Transport
from ..layouts.layout import Layout, Run
from ..layouts.mesh import Mesh
from ..planning.step import Step, per_step
from .shards import Index, common, index_of, pack, shape_of
from .step_kernels import Exchange, exchange_of, filled


def transfer(x: Tensor, step: Step, world: Transport) -> Tensor:
    """The local value of `step.after`, from that of `step.before` on another mesh; nothing is partial on either."""
    ranks, held, how = _route(step)
    x = world.reseat(x, step.before.mesh, ranks, held)
    flat = world.each(lambda x, *going: pack(x, *going).to(step.before.dtype), ranks, x, how.size, how.going)
    if step.bytes:
        flat = world.all_to_all(flat, how.send, how.receive, ranks, ranks.axes)
    out = world.each(filled, ranks, x, flat, how.shape, how.coming, how.own)
    return world.reseat(out, ranks, step.after.mesh, PerRank(step.after.local_shape))


@per_step
def _route(step: Step) -> tuple[Mesh, PerRank, Exchange]:
    """The ranks of both meshes as one mesh, and by its places the shapes that they hold, and what they exchange."""
    every = sorted({*step.before.mesh.ranks, *step.after.mesh.ranks})
    ranks = Mesh(("ranks",), (len(every),), every, step.before.mesh.device, step.before.mesh.world)

    def index_in(layout: Layout) -> PerRank:
        places = [layout.mesh.place(rank) for rank in every]
        return PerRank(lambda place: None if (own := places[place]) is None else index_of(layout, own))

    held, others = index_in(step.before), range(len(every))
    shapes = PerRank(lambda place: (0,) if (index := held.at(place)) is None else shape_of(index))
    share = partial(_share, step, every)
    return ranks, shapes, exchange_of(lambda place: others, share, held, index_in(step.after))


def _share(step: Step, every: list[int], giver: int, taker: int) -> Index | None:
    """The indices that one of all ranks sends to another; None where there are none."""
    before, after, source, goal = step.before, step.after, every[giver], every[taker]
    here, there, own = before.mesh.place(source), after.mesh.place(goal), before.mesh.place(goal)
    if here is None or there is None or (own is not None and _shards(before, own) == _shards(before, here)):
        return None
    number, copies = _copy(before, here)
    return _slice(common(index_of(before, here), index_of(after, there)), (number + _turn(there, copies)) % copies, copies)


def _shards(layout: Layout, place: int) -> list[int]:
    """What tells a rank's shard from the shards of ranks that hold others."""
    return [layout.shard(factor, place) for dim in layout.dims for factor in dim]


def _copy(layout: Layout, place: int) -> tuple[int, int]:
    """Which of the ranks that hold the same shard a rank is, and how many these are."""
    root = layout.mesh.root
    number, copies = 0, 1
    for axis, size, at in zip(root.axes, root.shape, root.coordinates[place], strict=True):
        if axis not in layout.states:
            number, copies = number * size + at, copies * size
    return number, copies


def _turn(place: int, copies: int) -> int:
    """Where the shares of the rank at a place begin: where they are unequal, each copy is to send a larger one in turn. The sum
    of the place's digits, since the ranks that want one shard may stand any number of places apart."""
    return place if copies == 1 or place < copies else place % copies + _turn(place // copies, copies)


def _slice(index: Index, number: int, parts: int) -> Index | None:
    """One of so many equal parts of what an index holds, sharded along its longest dim; None where there is nothing in it.

    >>> _slice((((0, 3), (5, 8)), ((0, 2),)), 1, 2)
    (((5, 8),), ((0, 2),))
    """
    sizes = shape_of(index)
    if not sizes:
        return None if number else index
    dim = sizes.index(max(sizes))
    first, last = (sizes[dim] * i // parts for i in (number, number + 1))
    runs: list[Run] = []
    for start, stop in index[dim]:
        low, high = max(start, start + first), min(stop, start + last)
        if low < high:
            runs.append((low, high))
        first, last = first - (stop - start), last - (stop - start)
    share = (*index[:dim], tuple(runs), *index[dim + 1 :])
    return share if math.prod(shape_of(share)) else None
