"""What a rank does with its local tensor before and after the collective of a step: worked out once for each step.

`LocalWork` is a function of one rank's tensor and the rest of its arguments, some of which differ from rank to rank
(`PerRank`). Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.tracing import varies
from ..layouts.dtypes import NEUTRAL, identity
from ..layouts.layout import Layout, PerRank
from ..planning.step import Step, per_step
from .shards import (
    Chunk,
    Index,
    Overlap,
    Parts,
    chunks_of,
    common,
    copy,
    in_a_row,
    index_of,
    join,
    overlaps,
    pack,
    padded,
    parts_of,
    put_together,
    shape_of,
    split,
    take,
    turns,
    unpack,
    unpadded,
)

#: A function of one rank's tensor and the rest of its arguments; nothing where there is nothing to do.
LocalWork = tuple[Any, ...]


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


def _scattering(step: Step) -> dict[str, LocalWork]:
    """How to lay out each peer's part along dim 0, and what to do with the part received."""
    before, after, axes = step.before, step.after, step.axes
    parts = _parts(before, after, step)
    if parts is not None:

        def stacked(place: int) -> tuple[int, ...]:
            first, *rest = after.local_shape(place)
            return (step.ranks * first, *rest)

        straight, turn = turns(parts, axes, before, stacked)
        return {"before": () if straight else (split, turn), "after": ()}
    width = after.nbytes // after.dtype.itemsize

    def laid_out(place: int) -> list[Chunk]:
        wanted = [index_of(after, peer) for peer in before.mesh.peers(place, axes)]
        return chunks_of(index_of(before, place), [(i * width, index) for i, index in enumerate(wanted)])

    return {"before": (pack, step.ranks * width, PerRank(laid_out)), "after": (unpadded, PerRank(after.local_shape))}


# ── gathers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gathering(step: Step) -> dict[str, LocalWork]:
    """What to do with a shard before it is gathered, and with all of them afterwards."""
    before, after, axes = step.before, step.after, step.axes
    parts = _parts(after, before, step)
    if parts is not None:
        straight, turn = turns(parts, axes, before, after.local_shape, back=True)
        return {"before": (), "after": () if straight else (join, turn)}
    width, along = before.nbytes // before.dtype.itemsize, _only_dim(step)

    def gathered(place: int) -> list[Chunk]:
        shards = [(i * width, index_of(before, peer)) for i, peer in enumerate(before.mesh.peers(place, axes))]
        if along is not None:
            shards.sort(key=lambda shard: shard[1][along])
        return chunks_of(index_of(after, place), shards, coming=True)

    return {"before": (padded, width), "after": (put_together, PerRank(after.local_shape), PerRank(gathered), along)}


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


def _swapping(step: Step) -> dict[str, LocalWork]:
    """How to lay out equal parts for all peers, and how to put together those received; nothing where parts are not equal."""
    before, after, mesh = step.before, step.after, step.before.mesh
    given: list[Parts] = []
    taken: list[Parts] = []
    for one, other in zip(before.dims, after.dims, strict=True):
        gains, loses = parts_of(one, other, step.axes, mesh), parts_of(other, one, step.axes, mesh)
        if gains is None and loses is None:
            return {}
        given.append(list(one) if gains is None else gains)
        taken.append(list(other) if loses is None else loses)
    out, back = _together(given, step), _together(taken, step)
    if out is None or back is None:
        return {}
    _, flat = turns(out, step.axes, before, lambda place: (math.prod(before.local_shape(place)),))
    _, whole = turns(back, step.axes, before, after.local_shape, back=True)
    return {"before": (split, flat), "after": (join, whole)}


@per_step
def equal_counts(step: Step) -> PerRank:
    """How many elements go to each peer where all get as many."""
    return PerRank(lambda place: (math.prod(step.before.local_shape(place)) // step.ranks,) * step.ranks)


class Exchange(NamedTuple):
    """An all-to-all of shards of any sizes, by place: the elements that go to and come from each peer, how to pack what goes,
    and the tensor that a rank ends with: its shape (None: it has none), the chunks that come, and what it has already."""

    send: PerRank
    receive: PerRank
    size: PerRank
    going: PerRank
    shape: PerRank
    coming: PerRank
    own: PerRank


def exchange_of(
    peers: Callable[[int], Sequence[int]], share: Callable[[int, int], Index | None], held: PerRank, wanted: PerRank
) -> Exchange:
    """The exchange in which each place sends each of its peers a share of the indices that it held (None: it held nothing)."""
    going = PerRank(lambda place: in_a_row([share(place, peer) for peer in peers(place)]))
    coming = PerRank(lambda place: in_a_row([share(peer, place) for peer in peers(place)]))
    both = PerRank(lambda place: (held.at(place), wanted.at(place)))
    return Exchange(
        send=PerRank(lambda place: going.at(place)[0]),
        receive=PerRank(lambda place: coming.at(place)[0]),
        size=PerRank(lambda place: sum(going.at(place)[0])),
        going=PerRank(lambda place: chunks_of(held.at(place), going.at(place)[1])),
        shape=PerRank(lambda place: None if (index := wanted.at(place)) is None else shape_of(index)),
        coming=PerRank(lambda place: chunks_of(wanted.at(place), coming.at(place)[1], coming=True)),
        own=PerRank(lambda place: () if None in both.at(place) else overlaps(*both.at(place))),
    )


@per_step
def exchanging(step: Step) -> Exchange:
    """What an exchange between the ranks of one mesh sends: to each what it wants of a shard, but to itself."""
    held, wanted = PerRank(partial(index_of, step.before)), PerRank(partial(index_of, step.after))
    brings = _pairing(step, held, wanted) if step.kind == "permute" else lambda giver, taker: True

    def share(giver: int, taker: int) -> Index | None:
        return common(held.at(giver), wanted.at(taker)) if giver != taker and brings(giver, taker) else None

    return exchange_of(lambda place: step.before.mesh.peers(place, step.axes), share, held, wanted)


def filled(x: Tensor, received: Tensor, shape: Any, chunks: Sequence[Chunk], own: tuple[Overlap, ...]) -> Tensor:
    """A rank's new tensor, if it has a shape: what came, and what it had of it already."""
    if shape is None:
        return received
    if own and not chunks:
        return take(x, shape, own)
    if len(chunks) == 1 and chunks[0].shape == shape:
        return received.view(shape)
    return unpack(received, copy(x, received.new_empty(shape), own), chunks)


def _pairing(step: Step, held: PerRank, wanted: PerRank) -> Callable[[int, int], bool]:
    """Whether a rank gives its shard to another, where each of a group wants the whole shard of some rank: who has it keeps it;
    those who want it get it from those who do not, each from another as far as they go."""

    @cache
    def giver_of(group: tuple[int, ...]) -> dict[int, int]:
        pairs = {place: place for place in group if held.at(place) == wanted.at(place)}
        givers: dict[Index, list[int]] = {}
        for place in sorted(group, key=pairs.__contains__):
            givers.setdefault(held.at(place), []).append(place)
        for place in group:
            if place not in pairs and all(shape_of(wanted.at(place))):
                turn = givers[wanted.at(place)]
                pairs[place] = turn[0]
                turn.append(turn.pop(0))
        return pairs

    return lambda giver, taker: giver_of(step.before.mesh.peers(taker, step.axes)).get(taker) == giver


# ── local steps ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _own(step: Step) -> PerRank:
    """What a rank holds both before and after a step."""
    return PerRank(lambda place: overlaps(index_of(step.before, place), index_of(step.after, place)))


def _splitting(step: Step) -> dict[str, LocalWork]:
    """How one rank keeps the value and the others what leaves it as it is; nothing where all may keep it."""
    mesh, partials = step.before.mesh, dict(step.after.partials)
    axes = [mesh.axes.index(axis) for axis in step.axes if partials[axis] in NEUTRAL]
    if not axes:
        return {"alone": ()}
    first = PerRank(lambda place: not any(mesh.coordinates[place][i] for i in axes))
    return {"alone": (_keep, first, NEUTRAL[partials[mesh.axes[axes[0]]]])}


def _keep(x: Tensor, mine: bool, fill: int) -> Tensor:
    return x.clone() if mine else torch.full_like(x, fill)


def _embedding(step: Step) -> dict[str, LocalWork]:
    """How to put a shard among what changes nothing."""
    kind = dict(step.after.partials)[step.axes[0]]
    fill, scale = identity(kind, step.after.dtype), ranks("avg", step.after, step.axes)
    return {"alone": (_among, PerRank(step.after.local_shape), _own(step), fill, scale)}


def _among(x: Tensor, shape: tuple[int, ...], own: tuple[Overlap, ...], fill: Any, scale: int) -> Tensor:
    return copy(x if scale == 1 else x * scale, x.new_full(shape, fill), own)


_LOCAL_WORK: dict[str, Callable[[Step], dict[str, LocalWork]]] = {
    "reduce_scatter": _scattering,
    "all_gather": _gathering,
    "all_to_all": _swapping,
    "take": lambda step: {"alone": (take, PerRank(step.after.local_shape), _own(step))},
    "split": _splitting,
    "embed": _embedding,
}


@per_step
def local_work(step: Step) -> dict[str, LocalWork]:
    """What to do with one rank's tensor "before" and "after" the collective of a step, or "alone" in a local one."""
    return _LOCAL_WORK[step.kind](step)


@per_step
def varying(step: Step) -> frozenset[str]:
    """The parts of a step's local work in which ranks do different things."""
    return frozenset(part for part, work in local_work(step).items() if varies(work, len(step.before.mesh.ranks)))
