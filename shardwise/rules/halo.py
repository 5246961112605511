"""`Halo`: the rows that windows along a sharded dim need of other ranks' shards; received before an operator runs, and their
gradients given back after it.

A rank's *stretch* is every row that its windows look at, padding included: its own rows, those that others send it, and rows
outside of the tensor, which are zeros until they are filled. Reads local values and shardings; knows nothing of operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.caches import memo
from ..comm import transport
from ..comm.messages import Batch
from ..layouts.layout import Factor, Layout, Number, PerRank, Run, default_sizes
from ..layouts.mesh import Mesh
from ..p2p.batch import exchange, wait

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

    def per_rank(self, layout: Layout, values: Sequence[Any]) -> PerRank:
        """One of `values`, which are by shard, for each place."""
        return PerRank(lambda place: values[layout.shard(self.held, place)])

    def first(self, layout: Layout) -> Number:
        """The first row of each rank's stretch, counted in the tensor."""
        return Number(lambda place: self.firsts[layout.shard(self.held, place)])


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
    lacking = [
        stop - start - _length(_common((start, stop), own))
        for (start, stop), own in zip(_needs(held, sizes, windows), pairwise(held.starts), strict=True)
    ]
    return max(lacking), sum(lacking)


def _needs(held: Factor, sizes: Sequence[int], windows: Windows) -> list[Run]:
    """The rows of the tensor that each shard's windows look at."""
    needs = []
    for start, stop in pairwise(accumulate(sizes, initial=0)):
        first = start * windows.stride - windows.pad
        last = (stop - 1) * windows.stride - windows.pad + windows.span
        need = _common((first, last), (0, held.size))
        needs.append(need if start < stop else (0, 0))
    return needs


def _common(one: Run, other: Run) -> Run:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low < high else (low, low)


def _length(run: Run) -> int:
    return run[1] - run[0]


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
        own = Rows(both[0] - shard[0], _length(both)) if _length(both) else Rows(0, 0)
        stretches.append(Stretch(rows, own, both[0] - first if own.rows else 0))
    shifts = [*range(1 - len(shards), 0), *range(1, len(shards))]
    runs = [(first, first + stretch.rows) for first, stretch in zip(firsts, stretches, strict=True)]
    messages = [found for shift in shifts if (found := _message(shift, shards, needs, runs))]
    lacking = _lacking(held, sizes, windows)[0]
    return Halo(dim, held, tuple(stretches), tuple(firsts), tuple(messages), lacking, runs != needs, runs == shards)


def _message(shift: int, shards: Sequence[Run], needs: Sequence[Run], stretches: Sequence[Run]) -> Transfer | None:
    """What goes `shift` shards further; None where nothing does.

    A shard at the end of the axis, which has no such neighbour, sends what the others do to nobody, and
    takes zeros for rows outside, wherever this makes all shards do the same: then one traced program serves them all.
    """
    count = len(shards)
    runs = {t: _common(shards[t], needs[t + shift]) for t in range(count) if 0 <= t + shift < count}
    if not any(map(_length, runs.values())):
        return None
    given = {t: Rows(run[0] - shards[t][0], _length(run)) if _length(run) else Rows(0, 0) for t, run in runs.items()}
    taken = {t + shift: Rows(run[0] - stretches[t + shift][0], _length(run)) for t, run in runs.items() if _length(run)}
    taken = {t + shift: taken.get(t + shift, Rows(0, 0)) for t in runs}
    same_given, same_taken = _same(given.values()), _same(taken.values())
    return Transfer(
        shift,
        tuple(given.get(t) or _if_within(same_given, [(0, _length(shards[t]))]) for t in range(count)),
        tuple(taken.get(s) or _if_within(same_taken, _outside(stretches[s], needs[s])) for s in range(count)),
    )


def _same(parts: Iterable[Rows]) -> Rows:
    """What all shards have in common."""
    several = set(parts)
    return several.pop() if len(several) == 1 else Rows(0, 0)


def _if_within(part: Rows, runs: Iterable[Run]) -> Rows:
    fits = any(first <= part.first and part.first + part.rows <= stop for first, stop in runs)
    return part if fits else Rows(0, 0)


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
        given, taken, stretch, _, shapes, goals, sources = _facts(halos[: number + 1], layout)
        sent = [transport(mesh).each(_taken_out, mesh, x, one.dim, part) for part in given]
        came = _sent(sent, goals, sources, shapes, mesh)
        x = transport(mesh).each(_laid_out, mesh, x, came, taken, one.dim, stretch)
        if fill and one.outside:
            first = transport(mesh).number(one.first(layout), mesh)
            x = transport(mesh).each(_filled, mesh, x, one.dim, one.held.size, first, fill)
    return x


def give_back(x: Tensor, halos: tuple[Halo, ...], layout: Layout) -> Tensor:
    """The way back: what each rank has for the rows of its stretch goes to the ranks that hold these, and is added there."""
    mesh = layout.mesh
    for number, one in reversed(list(enumerate(halos))):
        given, taken, stretch, shape, _, goals, sources = _facts(halos[: number + 1], layout)
        sent = [transport(mesh).each(_taken_out, mesh, x, one.dim, part) for part in taken]
        came = _sent(sent, sources, goals, [_with_rows(shape, one.dim, part) for part in given], mesh)
        x = transport(mesh).each(_added, mesh, x, came, given, one.dim, shape, stretch)
    return x


class RankFacts(NamedTuple):
    """What is known of the last of some halos, for each place: the rows to send and to take, its stretch, the shape of what it
    is made from and of what comes; and the routes."""

    given: list[PerRank]
    taken: list[PerRank]
    stretch: PerRank
    shape: PerRank
    shapes: list[PerRank]
    goals: list[str]
    sources: list[str]


@memo("halos of layouts", limit=1024)
def _facts(halos: tuple[Halo, ...], layout: Layout) -> RankFacts:
    *earlier, one = halos
    shape = PerRank(layout.local_shape)
    for before in earlier:
        shape = _with_rows(shape, before.dim, before.per_rank(layout, before.stretches))
    given = [one.per_rank(layout, message.given) for message in one.messages]
    taken = [one.per_rank(layout, message.taken) for message in one.messages]
    goals, sources = ([_route(one, layout, sign * message.shift) for message in one.messages] for sign in (1, -1))
    shapes = [_with_rows(shape, one.dim, part) for part in taken]
    return RankFacts(given, taken, one.per_rank(layout, one.stretches), shape, shapes, goals, sources)


def _with_rows(shape: PerRank, dim: int, part: PerRank) -> PerRank:
    """A shape with as many rows along a dim as a part or a stretch has."""
    return PerRank(lambda place: (*shape.at(place)[:dim], part.at(place).rows, *shape.at(place)[dim + 1 :]))


def _sent(x: list[Tensor], goals: list[str], sources: list[str], shapes: Sequence[PerRank], mesh: Mesh) -> list[Tensor]:
    if not x:
        return []
    batch = Batch(mesh.root, tuple(goals), tuple(sources), tuple(shapes), (x[0].dtype,) * len(x))
    return [wait(y) for y in exchange(x, batch)]


def _route(one: Halo, layout: Layout, shift: int) -> str:
    """The route to the shard `shift` further."""
    axes, root = one.held.axes, layout.mesh.root
    if len(axes) == 1:
        return f"shift {shift:+d} end {axes[0]}"
    pairs = []
    for place, rank in enumerate(root.ranks):
        peers = {layout.shard(one.held, peer): root.ranks[peer] for peer in root.peers(place, root.sorted_axes(axes))}
        goal = peers.get(layout.shard(one.held, place) + shift)
        pairs += [] if goal is None else [f"{rank}>{goal}"]
    return f"ranks {','.join(pairs)}"


def _taken_out(x: Tensor, dim: int, part: Rows) -> Tensor:
    return x.narrow(dim, part.first, part.rows).contiguous()


def _zeros(x: Tensor, dim: int, rows: int) -> Tensor:
    return x.new_zeros([rows if d == dim else n for d, n in enumerate(x.shape)])


def _laid_out(x: Tensor, came: Sequence[Tensor], taken: Sequence[Rows], dim: int, stretch: Stretch) -> Tensor:
    """A stretch from a shard and what came; zeros where nothing did."""
    if stretch.own.rows == stretch.rows == x.shape[dim]:
        return x
    parts = [(part.first, y) for part, y in zip(taken, came, strict=True) if part.rows]
    if stretch.own.rows:
        parts.append((stretch.at, x.narrow(dim, stretch.own.first, stretch.own.rows)))
    laid, end = [], 0
    for first, y in sorted(parts, key=lambda item: item[0]):
        laid += [_zeros(x, dim, first - end), y] if first > end else [y]
        end = first + y.shape[dim]
    if end < stretch.rows or not laid:
        laid.append(_zeros(x, dim, stretch.rows - end))
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
    out = torch.cat([_zeros(x, dim, before), own, _zeros(x, dim, after)], dim)
    for part, y in zip(given, came, strict=True):
        if part.rows:
            out.narrow(dim, part.first, part.rows).add_(y)
    return out
