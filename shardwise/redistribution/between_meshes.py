"""Moves a tensor from one mesh to another: to each rank exactly what it lacks, in one all-to-all of the ranks of both.

A rank keeps what it holds without communication. What several ranks hold comes in equal shares from each of them. What one rank
sends and receives is found by looking once at every other rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, dtype

from ..comm import PerRank, Transport
from ..layouts.layout import Layout, Run
from ..layouts.mesh import Mesh
from ..planning.step import Step, per_step
from .shards import (
    Chunk,
    Index,
    Overlap,
    chunks_in,
    chunks_out,
    common,
    copy,
    in_a_row,
    index_of,
    overlaps,
    pack,
    shape_of,
    unpack,
)


def transfer(x: Tensor, step: Step, world: Transport) -> Tensor:
    """The local value of `step.after`, from that of `step.before` on another mesh; nothing is partial on either."""
    ranks, held, sent, send, landing, receive = _route(step)
    x = world.reseat(x, step.before.mesh, ranks, held)
    flat = world.each(_packed, ranks, x, step.before.dtype, sent)
    if step.bytes:
        flat = world.all_to_all(flat, send, receive, ranks, ranks.axes)
    out = world.each(_landed, ranks, x, flat, landing)
    return world.reseat(out, ranks, step.after.mesh, PerRank(step.after.local_shape))


# ── one rank's own tensors ────────────────────────────────────────────────────────────────────────────────────────────


class _Load(NamedTuple):
    """What a rank sends to, or receives from, each of all ranks: how many elements, and where they lie in its own tensor."""

    counts: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Landing(NamedTuple):
    """What a rank ends with: its shape (None: the rank is not in the target's mesh), what it has of that, and what comes."""

    shape: tuple[int, ...] | None
    kept: tuple[Overlap, ...]
    load: _Load


def _packed(x: Tensor, kind: dtype, load: _Load) -> Tensor:
    return pack(x, sum(load.counts), load.chunks).to(kind)


def _landed(x: Tensor, flat: Tensor, landing: _Landing) -> Tensor:
    if landing.shape is None:
        return flat
    return unpack(flat, copy(x, flat.new_empty(landing.shape), landing.kept), landing.load.chunks)


# ── who sends what to whom ────────────────────────────────────────────────────────────────────────────────────────────


class Route(NamedTuple):
    """The ranks of both meshes as one mesh, and by its places what each rank holds (its shape), sends and ends with."""

    ranks: Mesh
    held: PerRank
    sent: PerRank
    send: PerRank
    landing: PerRank
    receive: PerRank


@per_step
def _route(step: Step) -> Route:
    every = sorted({*step.before.mesh.ranks, *step.after.mesh.ranks})
    ranks = Mesh(("ranks",), (len(every),), every, step.before.mesh.device, step.before.mesh.world)
    places = [step.before.mesh.place(rank) for rank in every]
    held = PerRank(lambda place: (0,) if (own := places[place]) is None else step.before.local_shape(own))
    sent = PerRank(lambda place: _sent(step, every, every[place]))
    landing = PerRank(lambda place: _landing(step, every, every[place]))
    send = PerRank(lambda place: sent.at(place).counts)
    receive = PerRank(lambda place: landing.at(place).load.counts)
    return Route(ranks, held, sent, send, landing, receive)


def _sent(step: Step, every: list[int], rank: int) -> _Load:
    place = step.before.mesh.place(rank)
    counts, shares = in_a_row([_share(step, rank, goal) for goal in every])
    return _Load(counts, () if place is None else tuple(chunks_out(index_of(step.before, place), shares)))


def _landing(step: Step, every: list[int], rank: int) -> _Landing:
    place, own = step.after.mesh.place(rank), step.before.mesh.place(rank)
    counts, shares = in_a_row([_share(step, source, rank) for source in every])
    if place is None:
        return _Landing(None, (), _Load(counts, ()))
    wanted = index_of(step.after, place)
    kept = () if own is None else overlaps(index_of(step.before, own), wanted)
    return _Landing(shape_of(wanted), kept, _Load(counts, tuple(chunks_in(wanted, shares))))


def _share(step: Step, source: int, goal: int) -> Index | None:
    """The indices that one rank sends to another; None where there are none."""
    before, after = step.before, step.after
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
