"""What the kernels of each step need to know: worked out once for a step, run on one rank's tensors.

A kernel is a function of one rank's tensor and the rest of its arguments, some of which differ from rank to rank (`PerRank`).
Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.caches import memo
from ..layouts.dtypes import NEUTRAL, identity
from ..layouts.layout import Layout, PerRank
from ..planning.step import Step
from .shards import (
    Block,
    Index,
    Parcel,
    Parts,
    Turns,
    blocks,
    common,
    copy,
    cut_out,
    in_a_row,
    index_of,
    join,
    joins,
    pack,
    padded,
    parcels_in,
    parcels_out,
    parts_of,
    put_together,
    shape_of,
    split,
    splits,
    unpack,
    unpadded,
)

#: A function of one rank's tensor and the rest of its arguments; nothing where there is nothing to do.
Kernel = tuple[Any, ...]


# ── reductions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def reduction(step: Step) -> tuple[str, int]:
    """The kind to reduce by, and by what to divide afterwards: sums and averages together are a sum."""
    kinds = {kind for axis, kind in step.before.partials if axis in step.axes}
    return ("sum" if "avg" in kinds else kinds.pop()), ranks("avg", step.before, step.axes)


def ranks(kind: str, layout: Layout, axes: Sequence[str]) -> int:
    """The ranks along those of `axes` over which a reduction of this kind is partial."""
    return math.prod([layout.mesh.axis_sizes[axis] for axis, partials in layout.partials if partials == kind and axis in axes])


def divided(x: Tensor, count: int) -> Tensor:
    """A reduced value, divided where an average was partial."""
    if count == 1:
        return x
    return x / count if x.is_floating_point() or x.is_complex() else x // count


@memo("scatters", limit=4096)
def scattering(step: Step) -> tuple[Kernel, Kernel]:
    """How to lay out each peer's part along dim 0, and what to do with the part received."""
    before, after, axes = step.before, step.after, step.axes
    parts = _parts(before, after, step)
    if parts is not None:
        turns = splits(parts, axes, before, lambda place: _times(step.ranks, after.local_shape(place)))
        return _unless_straight(split, turns), ()
    width = after.nbytes // after.dtype.itemsize

    def laid_out(place: int) -> list[Parcel]:
        wanted = [index_of(after, peer) for peer in before.mesh.peers(place, axes)]
        return parcels_out(index_of(before, place), [(i * width, index) for i, index in enumerate(wanted)])

    return (pack, step.ranks * width, PerRank(laid_out)), (unpadded, PerRank(after.local_shape))


def _times(n: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (n * shape[0], *shape[1:])


def _unless_straight(function: Callable[..., Tensor], turns: Turns) -> Kernel:
    return () if turns.straight else (function, turns.turn)


# ── gathers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@memo("gathers", limit=4096)
def gathering(step: Step) -> tuple[Kernel, Kernel]:
    """What to do with a shard before it is gathered, and with all of them afterwards."""
    before, after, axes = step.before, step.after, step.axes
    parts = _parts(after, before, step)
    if parts is not None:
        return (), _unless_straight(join, joins(parts, axes, before, after.local_shape))
    width, along = before.nbytes // before.dtype.itemsize, _only_dim(step)

    def gathered(place: int) -> list[Parcel]:
        shards = [(i * width, index_of(before, peer)) for i, peer in enumerate(before.mesh.peers(place, axes))]
        if along is not None:
            shards.sort(key=lambda shard: shard[1][along])
        return parcels_in(index_of(after, place), shards)

    return (padded, width), (put_together, PerRank(after.local_shape), PerRank(gathered), along)


def _only_dim(step: Step) -> int | None:
    """The dim that a step changes if it changes one only, and the shards along that are intervals."""
    changed = [dim for dim, (one, other) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if one != other]
    return changed[0] if len(changed) == 1 and len(step.before.dims[changed[0]]) == 1 else None


def _parts(coarse: Layout, fine: Layout, step: Step) -> Parts | None:
    """What a local tensor of `coarse` is made of if the shards of `fine` in a group are equal."""
    every = [parts_of(one, other, step.axes, coarse.mesh) for one, other in zip(coarse.dims, fine.dims, strict=True)]
    return _together([parts or [] for parts in every], step) if None not in every else None


def _together(every: Iterable[Parts], step: Step) -> Parts | None:
    found = [part for parts in every for part in parts]
    return found if sorted(part for part in found if isinstance(part, str)) == sorted(step.axes) else None


# ── exchanges ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@memo("swaps", limit=4096)
def swapping(step: Step) -> tuple[Kernel, PerRank, Kernel] | None:
    """How to lay out equal parts for all peers, how large they are, and how to put together those received."""
    before, after, mesh = step.before, step.after, step.before.mesh
    given: list[Parts] = []
    taken: list[Parts] = []
    for one, other in zip(before.dims, after.dims, strict=True):
        gains, loses = parts_of(one, other, step.axes, mesh), parts_of(other, one, step.axes, mesh)
        if gains is None and loses is None:
            return None
        given.append(list(one) if gains is None else gains)
        taken.append(list(other) if loses is None else loses)
    out, back = _together(given, step), _together(taken, step)
    if out is None or back is None:
        return None
    size = PerRank(lambda place: math.prod(before.local_shape(place)))
    counts = PerRank(lambda place: (size.at(place) // step.ranks,) * step.ranks)
    lay_out = (split, splits(out, step.axes, before, lambda place: (size.at(place),)).turn)
    return lay_out, counts, (join, joins(back, step.axes, before, after.local_shape).turn)


@memo("exchanges", limit=1024)
def exchanging(step: Step) -> tuple[Kernel, PerRank, PerRank, PerRank, PerRank, PerRank]:
    """How to lay out what goes, the elements that go and come, and how to put together what came and what was there."""
    held, wanted = PerRank(partial(index_of, step.before)), PerRank(partial(index_of, step.after))
    brings = _pairing(step, held, wanted) if step.kind == "permute" else _anyone
    nothing: Index = ((),) * step.before.ndim

    def boxes(place: int, going: bool) -> list[Index]:
        pairs = [(place, peer) if going else (peer, place) for peer in step.before.mesh.peers(place, step.axes)]
        return [common(held.at(a), wanted.at(b)) if a != b and brings(a, b) else nothing for a, b in pairs]

    going = PerRank(lambda place: in_a_row(boxes(place, going=True)))
    coming = PerRank(lambda place: in_a_row(boxes(place, going=False)))
    send, receive = PerRank(lambda place: going.at(place)[0]), PerRank(lambda place: coming.at(place)[0])
    size = PerRank(lambda place: sum(send.at(place)))
    out = PerRank(lambda place: parcels_out(held.at(place), going.at(place)[1]))
    back = PerRank(lambda place: parcels_in(wanted.at(place), coming.at(place)[1]))
    own = PerRank(lambda place: blocks(held.at(place), wanted.at(place)) if brings(place, place) else ())
    return (pack, size, out), send, receive, PerRank(step.after.local_shape), back, own


def _anyone(giver: int, taker: int) -> bool:
    return True


def _count(index: Index) -> int:
    return math.prod(shape_of(index))


def filled(x: Tensor, received: Tensor, shape: tuple[int, ...], parcels: Sequence[Parcel], own: tuple[Block, ...]) -> Tensor:
    """A rank's new tensor: what came, and what it had of it already."""
    if own and not parcels:
        return cut_out(x, shape, own)
    if len(parcels) == 1 and parcels[0].shape == shape:
        return received.view(shape)
    return unpack(received, copy(x, x.new_empty(shape), own), parcels)


def _pairing(step: Step, held: PerRank, wanted: PerRank) -> Callable[[int, int], bool]:
    """Whether a rank gives its shard to another, in groups where each wants the whole shard of some rank.

    Who has the shard already keeps it; those who want it get it from those who do not, each from another as far as they go.
    """
    known: dict[tuple[int, ...], dict[int, int]] = {}

    def brings(giver: int, taker: int) -> bool:
        group = step.before.mesh.peers(taker, step.axes)
        if group not in known:
            known[group] = _pairs(group, held, wanted)
        return known[group].get(taker) == giver

    return brings


def _pairs(group: tuple[int, ...], held: PerRank, wanted: PerRank) -> dict[int, int]:
    """For each taker of a group its giver; none for those who want nothing."""
    pairs = {place: place for place in group if held.at(place) == wanted.at(place)}
    givers: dict[Index, list[int]] = {}
    for place in sorted(group, key=pairs.__contains__):
        givers.setdefault(held.at(place), []).append(place)
    for place in group:
        if place not in pairs and _count(wanted.at(place)):
            turn = givers[wanted.at(place)]
            pairs[place] = turn[0]
            turn.append(turn.pop(0))
    return pairs


# ── local steps ───────────────────────────────────────────────────────────────────────────────────────────────────────


@memo("takes", limit=4096)
def taking(step: Step) -> Kernel:
    """How to keep a part."""
    return cut_out, PerRank(step.after.local_shape), _own(step)


def _own(step: Step) -> PerRank:
    """What a rank holds both before and after a step."""
    return PerRank(lambda place: blocks(index_of(step.before, place), index_of(step.after, place)))


@memo("splits", limit=4096)
def splitting(step: Step) -> Kernel:
    """How one rank keeps the value and the others what leaves it as it is; nothing where all may keep it."""
    mesh, partials = step.before.mesh, dict(step.after.partials)
    axes = [mesh.axes.index(axis) for axis in step.axes if partials[axis] in NEUTRAL]
    if not axes:
        return ()
    first = PerRank(lambda place: not any(mesh.coordinates[place][i] for i in axes))
    return _keep, first, NEUTRAL[partials[mesh.axes[axes[0]]]]


def _keep(x: Tensor, mine: bool, fill: int) -> Tensor:
    return x.clone() if mine else torch.full_like(x, fill)


@memo("embeddings", limit=4096)
def embedding(step: Step) -> Kernel:
    """How to put a shard among what changes nothing."""
    kind = dict(step.after.partials)[step.axes[0]]
    fill, scale = identity(kind, step.after.dtype), ranks("avg", step.after, step.axes)
    return _among, PerRank(step.after.local_shape), _own(step), fill, scale


def _among(x: Tensor, shape: tuple[int, ...], own: tuple[Block, ...], fill: Any, scale: int) -> Tensor:
    return copy(x if scale == 1 else x * scale, x.new_full(shape, fill), own)
