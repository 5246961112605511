"""`Halo`: the borders of other ranks' shards that windows along a sharded dim reach into. They are received before an operator
runs; their gradients are sent back.

A rank's *stretch* is every row that its windows look at, padding included: its own rows, those that others send it, and rows
outside of the tensor, which are zeros until they are filled. Reads local values and shardings; knows nothing of operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.caches import memo
from ..comm import transport
from ..comm.messages import Batch
from ..layouts.factor import Factor, Run, default_sizes
from ..layouts.layout import Layout, PerRank
from ..layouts.mesh import Mesh
from ..p2p.batch import exchange, wait
from .shard_position import by_shard, zero_rows

# ── windows of a dim, and what a shard needs for its own ──────────────────────────────────────────────────────────────


class Windows(NamedTuple):
    """Windows along a dim: how far apart they begin, how many rows before the first row the first begins, how many rows each
    spans from its first to its last, and how many there are."""

    stride: int
    pad: int
    span: int
    total: int


class Rows(NamedTuple):
    """Rows of a shard or of a stretch: the first, and how many."""

    first: int
    rows: int


class Transfer(NamedTuple):
    """What each shard sends to the one `shift` further: which rows of its shard; and where in the other's stretch they go."""

    shift: int
    given: tuple[Rows, ...]
    taken: tuple[Rows, ...]


class Stretch(NamedTuple):
    """One shard's stretch: its length, and which own rows lie where in it. Where it begins in the tensor is no part of it: that
    differs between equal shards, which are to run one program."""

    rows: int
    own: Rows
    at: int


class Halo(NamedTuple):
    """What shards of a dim need of one another. `firsts` are the first rows of stretches, counted in the tensor, `received` is
    the most rows that come to a shard, `outside` whether any stretch leaves the tensor, `unchanged` whether all are shards as
    they are."""

    dim: int
    held: Factor
    stretches: tuple[Stretch, ...]
    firsts: tuple[int, ...]
    messages: tuple[Transfer, ...]
    received: int
    outside: bool
    unchanged: bool


def share(held: Factor, windows: Windows) -> tuple[int, ...]:
    """How many windows each shard takes: equal chunks, or those whose middle it holds, whichever lets it lack fewer rows.

    >>> share(Factor(9, ("tp",), (5, 1, 3)), Windows(1, 1, 3, 9))
    (5, 1, 3)
    """
    stride, pad, span, total = windows
    middles = [-(-(2 * (stop + pad) - span + 1) // (2 * stride)) for stop in held.starts[1:]]
    stops = [*(min(max(stop, 0), total) for stop in middles[:-1]), total]
    near = tuple(b - a for a, b in zip([0, *stops], stops, strict=False))
    equal = default_sizes(total, [len(held.sizes)])
    return min(equal, near, key=lambda sizes: _lacking(held, sizes, windows))


def _lacking(held: Factor, sizes: tuple[int, ...], windows: Windows) -> tuple[int, int]:
    """The most rows that a shard lacks, and all together."""
    needs = zip(_needs(held, sizes, windows), pairwise(held.starts), strict=True)
    lacking = [_length(need) - _length(_common(need, own)) for need, own in needs]
    return max(lacking), sum(lacking)


def _needs(held: Factor, sizes: Sequence[int], windows: Windows) -> list[Run]:
    """The rows of the tensor that each shard's windows look at."""
    stride, pad, span, _ = windows
    runs = pairwise(accumulate(sizes, initial=0))
    tensor = (0, held.size)
    return [_common((a * stride - pad, (b - 1) * stride - pad + span), tensor) if a < b else (0, 0) for a, b in runs]


def _common(one: Run, other: Run) -> Run:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low < high else (low, low)


def _length(run: Run) -> int:
    return run[1] - run[0]


def _counted_from(first: int, run: Run) -> Rows:
    return Rows(run[0] - first, _length(run)) if _length(run) else Rows(0, 0)


@memo("halos", limit=1024)
def halo(dim: int, held: Factor, sizes: tuple[int, ...], windows: Windows) -> Halo:
    """What shards that hold `held` and take `sizes` windows of a dim need of one another.

    A shard without windows has one of rows outside, since operators take no empty planes.

    >>> halo(0, Factor(8, ("tp",), (4, 4)), (4, 4), Windows(1, 1, 3, 8)).messages[1].given
    (Rows(first=3, rows=1), Rows(first=3, rows=1))
    """
    shards, needs = list(pairwise(held.starts)), _needs(held, sizes, windows)
    stretches, firsts = [], [start * windows.stride - windows.pad for start in accumulate(sizes[:-1], initial=0)]
    for first, count, shard, need in zip(firsts, sizes, shards, needs, strict=True):
        rows = (max(count, 1) - 1) * windows.stride + windows.span
        both = _common(shard, need)
        stretches.append(Stretch(rows, _counted_from(shard[0], both), _counted_from(first, both).first))
    shifts = [*range(1 - len(shards), 0), *range(1, len(shards))]
    runs = [(first, first + stretch.rows) for first, stretch in zip(firsts, stretches, strict=True)]
    messages = [message for shift in shifts if (message := _message(shift, shards, needs, runs))]
    lacking = _lacking(held, sizes, windows)[0]
    return Halo(dim, held, tuple(stretches), tuple(firsts), tuple(messages), lacking, runs != needs, runs == shards)


def _message(shift: int, shards: Sequence[Run], needs: Sequence[Run], stretches: Sequence[Run]) -> Transfer | None:
    """What goes `shift` shards further; None where nothing does.

    A shard at the end of the axis, which has no such neighbour, sends what the others do to nobody, and takes zeros for rows
    outside, wherever this makes all shards do the same: then one traced program serves them all.
    """
    count = len(shards)
    runs = {t: _common(shards[t], needs[t + shift]) for t in range(count) if 0 <= t + shift < count}
    if not any(map(_length, runs.values())):
        return None
    given = {t: _counted_from(shards[t][0], run) for t, run in runs.items()}
    taken = {t + shift: _counted_from(stretches[t + shift][0], run) for t, run in runs.items()}
    rooms = [[(0, _length(shard))] for shard in shards], [_outside(*both) for both in zip(stretches, needs, strict=True)]
    return Transfer(shift, _completed(given, rooms[0]), _completed(taken, rooms[1]))


def _completed(parts: dict[int, Rows], rooms: Sequence[Sequence[Run]]) -> tuple[Rows, ...]:
    """The rows of every shard: of one that has none, those that all others have, where there is room for them."""
    same = next(iter(parts.values())) if len(set(parts.values())) == 1 else Rows(0, 0)
    fits = [any(first <= same.first and same.first + same.rows <= stop for first, stop in runs) for runs in rooms]
    return tuple(parts.get(i, same if fit else Rows(0, 0)) for i, fit in enumerate(fits))


def _outside(stretch: Run, need: Run) -> list[Run]:
    """The rows of a stretch that lie outside of the tensor."""
    if not _length(need):
        return [(0, _length(stretch))]
    return [(0, need[0] - stretch[0]), (need[1] - stretch[0], _length(stretch))]


# ── rows on their way ─────────────────────────────────────────────────────────────────────────────────────────────────


def with_halos(x: Tensor, halos: tuple[Halo, ...], layout: Layout, fill: Any = 0) -> Tensor:
    """Every rank's stretch, from its shard: dim after dim, so that corners come too. Rows outside hold `fill`."""
    mesh = layout.mesh
    for number, one in enumerate(halos):
        given, taken, stretch, _ = _facts(halos[: number + 1], layout)
        came = _exchanged(x, one.dim, mesh, given, taken)
        x = transport(mesh).each(_laid_out, mesh, x, came, taken.rows, one.dim, stretch)
        if fill and one.outside:
            first = transport(mesh).number(by_shard(layout, one.held, one.firsts), mesh)
            x = transport(mesh).each(_filled, mesh, x, one.dim, one.held.size, first, fill)
    return x


def give_back(x: Tensor, halos: tuple[Halo, ...], layout: Layout) -> Tensor:
    """The way back: what each rank has for the rows of its stretch goes to the ranks that hold these, and is added there."""
    mesh = layout.mesh
    for number, one in reversed(list(enumerate(halos))):
        given, taken, stretch, shape = _facts(halos[: number + 1], layout)
        came = _exchanged(x, one.dim, mesh, taken, given)
        x = transport(mesh).each(_added, mesh, x, came, given.rows, one.dim, shape, stretch)
    return x


class _Side(NamedTuple):
    """One side of the messages, for each place: their rows and shapes, and the routes to where they are on the other side."""

    rows: list[PerRank]
    shapes: tuple[PerRank, ...]
    routes: tuple[str, ...]


@memo("halos of layouts", limit=1024)
def _facts(halos: tuple[Halo, ...], layout: Layout) -> tuple[_Side, _Side, PerRank, PerRank]:
    """Of the last of some halos: what is given and what is taken, the stretch, and the shape of what that is made from."""
    *earlier, one = halos
    shape, sides = stretched(earlier, layout), []
    for name, sign in (("given", 1), ("taken", -1)):
        rows = [by_shard(layout, one.held, getattr(message, name)) for message in one.messages]
        routes = tuple(shard_route(layout, one.held, sign * message.shift) for message in one.messages)
        sides.append(_Side(rows, tuple(_with_rows(shape, one.dim, part) for part in rows), routes))
    return sides[0], sides[1], by_shard(layout, one.held, one.stretches), shape


def stretched(halos: Sequence[Halo], layout: Layout) -> PerRank:
    """The shape of each rank's stretch."""
    shape = PerRank(layout.local_shape)
    for one in halos:
        shape = _with_rows(shape, one.dim, by_shard(layout, one.held, one.stretches))
    return shape


def _with_rows(shape: PerRank, dim: int, part: PerRank) -> PerRank:
    """A shape with as many rows along a dim as a part or a stretch has."""
    return PerRank(lambda place: (*shape.at(place)[:dim], part.at(place).rows, *shape.at(place)[dim + 1 :]))


def _exchanged(x: Tensor, dim: int, mesh: Mesh, going: _Side, coming: _Side) -> list[Tensor]:
    if not going.rows:
        return []
    each = transport(mesh).each
    sent = [each(lambda x, part: x.narrow(dim, part.first, part.rows).contiguous(), mesh, x, part) for part in going.rows]
    batch = Batch(mesh.root, going.routes, coming.routes, coming.shapes, (x.dtype,) * len(sent))
    return [wait(y) for y in exchange(sent, batch)]


def shard_route(layout: Layout, factor: Factor, shift: int, wrap: bool = False) -> str:
    """The route from each shard of a factor to the one `shift` further; from the last to the first if it wraps around."""
    axes, root = factor.axes, layout.mesh.root
    if len(axes) == 1:
        return f"shift {shift:+d} {'wrap' if wrap else 'end'} {axes[0]}"
    pairs = []
    for place, rank in enumerate(root.ranks):
        peers = {layout.shard(factor, peer): root.ranks[peer] for peer in root.peers(place, root.sorted_axes(axes))}
        goal = layout.shard(factor, place) + shift
        goal = goal % len(factor.sizes) if wrap else goal
        pairs += [f"{rank}>{peers[goal]}"] if goal in peers else []
    return f"ranks {','.join(pairs)}"


def _laid_out(x: Tensor, came: Sequence[Tensor], taken: Sequence[Rows], dim: int, stretch: Stretch) -> Tensor:
    """A stretch from a shard and what came; zeros where nothing did."""
    if stretch.own.rows == stretch.rows == x.shape[dim]:
        return x
    parts = [(part.first, y) for part, y in zip(taken, came, strict=True) if part.rows]
    if stretch.own.rows:
        parts.append((stretch.at, x.narrow(dim, stretch.own.first, stretch.own.rows)))
    laid, end = [], 0
    for first, y in sorted(parts, key=lambda item: item[0]):
        laid += [zero_rows(x, dim, first - end), y] if first > end else [y]
        end = first + y.shape[dim]
    if end < stretch.rows or not laid:
        laid.append(zero_rows(x, dim, stretch.rows - end))
    return torch.cat(laid, dim)


def _filled(x: Tensor, dim: int, size: int, first: Tensor, fill: Any) -> Tensor:
    row = torch.arange(x.shape[dim], device=x.device) + first
    outside = ((row < 0) | (row >= size)).view([-1 if d == dim else 1 for d in range(x.ndim)])
    return x.masked_fill(outside, fill)


def _added(
    x: Tensor, came: Sequence[Tensor], given: Sequence[Rows], dim: int, shape: tuple[int, ...], stretch: Stretch
) -> Tensor:
    """A shard from a stretch and what came for it."""
    if not came and stretch.own.rows == shape[dim] == x.shape[dim]:
        return x
    own = x.narrow(dim, stretch.at, stretch.own.rows)
    before, after = stretch.own.first, shape[dim] - stretch.own.first - stretch.own.rows
    out = torch.cat([zero_rows(x, dim, before), own, zero_rows(x, dim, after)], dim)
    for part, y in zip(given, came, strict=True):
        if part.rows:
            out.narrow(dim, part.first, part.rows).add_(y)
    return out
