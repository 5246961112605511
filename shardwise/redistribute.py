"""Runs plans: takes a local value and a Plan, gives the local value of the plan's target.

One function per kind of step, all through the door. Kernels (`_pick`, `_pad`, …) work on one rank's own tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from .comm import Door, PerRank, door
from .comm.policy import check
from .layout import Layout, Run
from .memo import memo
from .plan import Plan, Step, plan

IDENTITY = {"sum": 0, "product": 1, "bxor": 0}


def move(local: Tensor, have: Layout, want: Layout, operator: str = "") -> Tensor:
    """The local value of `want`, from that of `have`; `local` itself where nothing has to change.

    `operator` is on whose account this is; communication that the user asked for has none, and is not refused.
    """
    if have is want:
        return local
    steps = plan(have, want)
    if operator and steps.collectives:
        check(operator, steps.bytes, lambda: f"{have} → {want}")
    return run(local, steps, operator or "redistribute")


def check_moves(moves: Iterable[tuple[int, Layout, Layout]], inputs: Sequence[Layout], operator: str) -> None:
    """Warn or raise, before any of an operator's moves, as `communication` was told."""
    plans = [steps for _, have, want in moves if (steps := plan(have, want)).collectives]

    def describe() -> str:
        needed = ", ".join(f"{steps.have} → {steps.want}" for steps in plans)
        return f"it takes {', '.join(map(repr, inputs))} and needs {needed}"

    if plans:
        check(operator, sum(steps.bytes for steps in plans), describe)


def run(local: Tensor, steps: Plan, operator: str) -> Tensor:
    """Run a plan's steps through the door."""
    world = door(steps.have.mesh, operator)
    for step in steps.steps:
        local = _RUN[step.kind](local, step, world)
    return local


def _all_reduce(x: Tensor, step: Step, world: Door) -> Tensor:
    pending = dict(step.before.partials)
    kinds = {pending[axis] for axis in step.axes}
    kind = "sum" if kinds <= {"sum", "avg"} else kinds.pop()
    return _scaled(world.all_reduce(x, kind, step.before.mesh, step.axes), step)


def _reduce_scatter(x: Tensor, step: Step, world: Door) -> Tensor:
    mesh, kind = step.before.mesh, dict(step.before.partials)[step.axes[0]]
    front = world.each(_to_front, mesh, x, step.dim)
    part = world.reduce_scatter(front, "sum" if kind == "avg" else kind, mesh, step.axes)
    return _scaled(world.each(_from_front, mesh, part, step.dim), step)


def _to_front(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).contiguous()


def _from_front(x: Tensor, dim: int) -> Tensor:
    return x.movedim(0, dim).contiguous()


def _scaled(x: Tensor, step: Step) -> Tensor:
    pending, shape = dict(step.before.partials), step.before.mesh.shape
    count = math.prod(shape[axis] for axis in step.axes if pending[axis] == "avg")
    if count == 1:
        return x
    return x / count if x.is_floating_point() or x.is_complex() else x // count


def _all_gather(x: Tensor, step: Step, world: Door) -> Tensor:
    mesh, dim, order = step.before.mesh, step.dim, _group_order(step)
    sizes = step.before.dims[dim][0].sizes
    widest = max(sizes)
    padded = world.each(_pad, mesh, x, dim, widest)
    gathered = world.all_gather(padded, mesh, mesh.sorted_axes(step.axes))
    if widest == min(sizes):
        return world.each(_merge, mesh, gathered, step.ranks, dim, order)
    return world.each(_join, mesh, gathered, dim, _piece_sizes(step), order)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _stack(gathered: Tensor, ranks: int, order: tuple[int, ...] | None) -> Tensor:
    stacked = gathered.view(ranks, gathered.shape[0] // ranks, *gathered.shape[1:])
    return stacked if order is None else stacked[list(order)]


def _merge(gathered: Tensor, ranks: int, dim: int, order: tuple[int, ...] | None) -> Tensor:
    if dim == 0 and order is None:
        return gathered
    # A dim of size 1 lets `flatten` give a view with swapped strides, which kernels that expect contiguous memory misread.
    return _stack(gathered, ranks, order).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _join(gathered: Tensor, dim: int, sizes: tuple[int, ...], order: tuple[int, ...] | None) -> Tensor:
    pieces = zip(_stack(gathered, len(sizes), order), sizes, strict=True)
    return torch.cat([piece.narrow(dim, 0, size) for piece, size in pieces], dim)


def _group_order(step: Step) -> tuple[int, ...] | None:
    """For each piece, major to minor along the dim, its position in the group; None where they agree."""
    mesh = step.before.mesh
    axes = mesh.sorted_axes(step.axes)
    if axes == step.axes:
        return None
    order = []
    for point in product(*(range(mesh.shape[axis]) for axis in step.axes)):
        index, at = 0, dict(zip(step.axes, point, strict=True))
        for axis in axes:
            index = index * mesh.shape[axis] + at[axis]
        order.append(index)
    return tuple(order)


def _piece_sizes(step: Step) -> PerRank:
    factor, mesh = step.before.dims[step.dim][0], step.before.mesh
    kept = factor.axes[: len(factor.axes) - len(step.axes)]

    def sizes(place: int) -> tuple[int, ...]:
        index = 0
        for axis in kept:
            index = index * mesh.shape[axis] + mesh.coordinates[place][mesh.axes.index(axis)]
        return factor.sizes[index * step.ranks : (index + 1) * step.ranks]

    return PerRank(sizes)


def _all_to_all(x: Tensor, step: Step, world: Door) -> Tensor:
    mesh, ranks = step.before.mesh, step.ranks
    sent = world.each(_to_parts, mesh, x, ranks, step.target)
    counts = PerRank(lambda place: (math.prod(step.before.local_shape(place)) // ranks,) * ranks)
    received = world.all_to_all(sent, counts, counts, mesh, step.axes)
    shape = PerRank(step.after.local_shape)
    return world.each(_from_parts, mesh, received, shape, ranks, step.dim)


def _to_parts(x: Tensor, ranks: int, dim: int) -> Tensor:
    return x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).reshape(-1)


def _from_parts(flat: Tensor, shape: tuple[int, ...], ranks: int, dim: int) -> Tensor:
    part = [*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]]
    return flat.view(ranks, *part).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _take(x: Tensor, step: Step, world: Door) -> Tensor:
    return world.each(_pick, step.before.mesh, x, _taken(step))


@memo("takes", limit=4096)
def _taken(step: Step) -> PerRank:
    """For each changed dim, the local positions that a rank keeps."""
    before, after = step.before, step.after
    changed = [i for i in range(before.ndim) if before.dims[i] != after.dims[i]]
    return PerRank(lambda place: [(i, _positions(before.runs(i, place), after.runs(i, place))) for i in changed])


def _pick(x: Tensor, spans: list[tuple[int, list[Run]]]) -> Tensor:
    for dim, runs in spans:
        x = _narrow(x, dim, runs)
    return x.clone(memory_format=torch.contiguous_format)


def _narrow(x: Tensor, dim: int, runs: list[Run]) -> Tensor:
    if len(runs) > 1:
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)
    start, stop = runs[0] if runs else (0, 0)
    return x.narrow(dim, start, stop - start)


def _positions(held: list[Run], wanted: list[Run]) -> list[Run]:
    """Where `wanted` lies inside a tensor that holds the indices `held`, as intervals of local positions.

    >>> _positions([(0, 4), (8, 12)], [(2, 4), (8, 9)])
    [(2, 5)]
    """
    found: list[Run] = []
    base = 0
    for start, stop in held:
        for low, high in wanted:
            first, last = max(start, low), min(stop, high)
            if first < last:
                span = (base + first - start, base + last - start)
                if found and found[-1][1] == span[0]:
                    span = (found.pop()[0], span[1])
                found.append(span)
        base += stop - start
    return found


def _split(x: Tensor, step: Step, world: Door) -> Tensor:
    mesh, pending = step.before.mesh, dict(step.after.partials)
    axes = [mesh.axes.index(axis) for axis in step.axes if pending[axis] in IDENTITY]
    if not axes:
        return x
    fill = IDENTITY[pending[mesh.axes[axes[0]]]]
    first = PerRank(lambda place: not any(mesh.coordinates[place][i] for i in axes))
    return world.each(_keep, mesh, x, first, fill)


def _keep(x: Tensor, mine: bool, fill: int) -> Tensor:
    return x.clone() if mine else torch.full_like(x, fill)


def _exchange(x: Tensor, step: Step, world: Door) -> Tensor:
    """Every rank sends to every other exactly the intersection of what it holds with what the other wants."""
    mesh = step.before.mesh
    to_peer, send, from_peer, receive, shape = _exchanged(step)
    outgoing = world.each(_pack, mesh, x, to_peer)
    incoming = world.all_to_all(outgoing, send, receive, mesh, step.axes)
    return world.each(_unpack, mesh, incoming, shape, from_peer)


@memo("exchanges", limit=1024)
def _exchanged(step: Step) -> tuple[PerRank, ...]:
    """For each peer what goes to it and how much, what comes from it and how much; and the shape of the result."""
    to_peer, from_peer = PerRank(lambda place: _sent(step, place)), PerRank(lambda place: _received(step, place))
    send = PerRank(lambda place: tuple(_count(box) for box in to_peer.at(place)))
    receive = PerRank(lambda place: tuple(_count(box) for box in from_peer.at(place)))
    return to_peer, send, from_peer, receive, PerRank(step.after.local_shape)


Box = list[list[Run]]


def _sent(step: Step, place: int) -> list[Box]:
    """For each peer, the local positions of what it gets from the rank at `place`."""
    return [_overlap(step.before, place, step.after, peer)[0] for peer in step.before.mesh.peers(place, step.axes)]


def _received(step: Step, place: int) -> list[Box]:
    """For each peer, the positions in the target's local tensor of what comes from it."""
    return [_overlap(step.before, peer, step.after, place)[1] for peer in step.before.mesh.peers(place, step.axes)]


def _overlap(before: Layout, source: int, after: Layout, goal: int) -> tuple[Box, Box]:
    there, here = [], []
    for dim in range(before.ndim):
        held, wanted = before.runs(dim, source), after.runs(dim, goal)
        there.append(_positions(held, wanted))
        here.append(_positions(wanted, held))
    return there, here


def _count(box: Box) -> int:
    return math.prod(sum(stop - start for start, stop in runs) for runs in box)


def _pack(x: Tensor, boxes: list[Box]) -> Tensor:
    parts = []
    for box in boxes:
        part = x
        for dim, runs in enumerate(box):
            part = _narrow(part, dim, runs)
        parts.append(part.reshape(-1))
    return torch.cat(parts)


def _unpack(flat: Tensor, shape: tuple[int, ...], boxes: list[Box]) -> Tensor:
    out = flat.new_empty(shape)
    start = 0
    for box in boxes:
        sizes = [sum(stop - first for first, stop in runs) for runs in box]
        piece = flat.narrow(0, start, math.prod(sizes)).view(sizes)
        start += piece.numel()
        for slices, sub in _blocks(box, piece):
            out[slices] = sub
    return out


def _blocks(box: Box, piece: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """The contiguous blocks of a box in the target, with their parts of the piece."""
    local = []
    for runs in box:
        base, spans = 0, []
        for start, stop in runs:
            spans.append((slice(start, stop), slice(base, base + stop - start)))
            base += stop - start
        local.append(spans)
    for choice in product(*local):
        yield tuple(goal for goal, _ in choice), piece[tuple(part for _, part in choice)]


_RUN: dict[str, Callable[[Tensor, Step, Door], Tensor]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "take": _take,
    "split": _split,
    "exchange": _exchange,
}
