"""Where the shards of one tensor lie inside others: layouts and places in, views and copies of one rank's tensors out.

A group's equal shards tile a local tensor: a `Turn` brings them into order with one permute. Shards of any sizes meet in a few
overlaps (`Overlap`), each copied at once. Knows nothing of transports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import Dim, Factor, Layout, PerRank, Run, canonical
from ..layouts.mesh import Mesh

# ── equal shards ──────────────────────────────────────────────────────────────────────────────────────────────────────

#: What a local tensor is made of, major to minor: the axes over which its shards lie, and the factors of those shards.
Parts = list[str | Factor]


def parts_of(coarse: Dim, fine: Dim, axes: Sequence[str], mesh: Mesh) -> Parts | None:
    """`coarse` as a product of those of `axes` that shard it further into equal shards of `fine`, and of these; or None.

    >>> mesh = Mesh(("a",), (2,), range(2), "cpu", "simulated")
    >>> parts_of((Factor(8, (), (8,)),), (Factor(8, ("a",), (4, 4)),), ["a"], mesh)
    ['a', Factor(size=8, axes=('a',), sizes=(4, 4))]
    """
    parts: Parts = []
    joined: list[Factor] = []
    for factor in fine:
        more = [axis for axis in factor.axes if axis in axes]
        kept = factor.axes[: len(factor.axes) - len(more)]
        step = math.prod([mesh.axis_sizes[axis] for axis in more])
        runs = [factor.sizes[i : i + step] for i in range(0, len(factor.sizes), step)]
        if (*kept, *more) != factor.axes or any(min(run) != max(run) for run in runs):
            return None
        parts += [*more, factor]
        joined.append(Factor(factor.size, kept, tuple(map(sum, runs))))
    return parts if canonical(joined) == coarse else None


class Turn(NamedTuple):
    """A tensor seen with other sizes, its dims then brought into an order, and the shape of the result."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


def turns(
    parts: Parts, axes: Sequence[str], layout: Layout, shape: Callable[[int], tuple[int, ...]], back: bool = False
) -> tuple[bool, PerRank]:
    """Bring a local tensor made of `parts` to one shard after another, in the order of the group over `axes`, or `back`:
    whether all elements stay in their order, and the turn of every rank."""
    order = (*(parts.index(axis) for axis in axes), *(i for i, part in enumerate(parts) if not isinstance(part, str)))
    straight, lengths = order == tuple(range(len(order))), layout.mesh.axis_sizes
    if back:
        parts, order = [parts[i] for i in order], tuple(sorted(range(len(order)), key=order.__getitem__))

    def turn(place: int) -> Turn:
        sizes = [lengths[p] if isinstance(p, str) else p.sizes[layout.shard(p, place)] for p in parts]
        return Turn(tuple(sizes), order, shape(place))

    return straight, PerRank(turn)


def split(x: Tensor, turn: Turn) -> Tensor:
    """A local tensor as its shards."""
    return x.reshape(turn.sizes).permute(turn.order).reshape(turn.shape)


def join(shards: Tensor, turn: Turn) -> Tensor:
    """Contiguous shards as a local tensor: contiguous, and a view where the elements are in order already."""
    turned = shards.view(turn.sizes).permute(turn.order)
    # The turned view is no answer even where it passes for contiguous: a dim of size 1 gives it strides that kernels misread.
    return (shards if turned.is_contiguous() else turned.contiguous()).view(turn.shape)


# ── shards of any sizes ───────────────────────────────────────────────────────────────────────────────────────────────

#: The indices that a shard holds, for each dim as ascending intervals.
Index = tuple[tuple[Run, ...], ...]


def index_of(layout: Layout, place: int) -> Index:
    """The indices of the global tensor that the rank at `place` holds."""
    return tuple([tuple(layout.runs(dim, place)) for dim in range(layout.ndim)])


def shape_of(index: Index) -> tuple[int, ...]:
    """The shape of a tensor that holds these indices.

    >>> shape_of((((0, 2), (4, 6)), ((1, 2),)))
    (4, 1)
    """
    return tuple([sum([stop - start for start, stop in runs]) for runs in index])


def common(one: Index, other: Index) -> Index:
    """The indices that both hold.

    >>> common((((0, 4), (8, 12)),), (((2, 9),),))
    (((2, 4), (8, 9)),)
    """
    return tuple([tuple([(low, high) for low, high, _, _ in _meetings(a, b)]) for a, b in zip(one, other, strict=True)])


def _meetings(one: Sequence[Run], other: Sequence[Run]) -> Iterator[tuple[int, int, int, int]]:
    """Each interval that lies in an interval of both, and the positions of its first index in tensors that hold them."""
    i = j = before_one = before_other = 0
    while i < len(one) and j < len(other):
        (start, stop), (first, last) = one[i], other[j]
        low, high = max(start, first), min(stop, last)
        if low < high:
            yield low, high, before_one + low - start, before_other + low - first
        if stop <= last:
            i, before_one = i + 1, before_one + stop - start
        else:
            j, before_other = j + 1, before_other + last - first


class Stretches(NamedTuple):
    """So many stretches of `length` indices along a dim: where the first lies in two tensors, and how far it is to the next."""

    length: int
    times: int
    there: int
    here: int
    there_step: int
    here_step: int


def stretches(source: Sequence[Run], target: Sequence[Run]) -> list[Stretches]:
    """What tensors that hold `source` and `target` along a dim share.

    >>> stretches([(0, 12)], [(0, 2), (4, 6), (8, 10)])
    [Stretches(length=2, times=3, there=0, here=0, there_step=4, here_step=2)]
    """
    found: list[Stretches] = []
    for low, high, there, here in _meetings(source, target):
        new = Stretches(high - low, 1, there, here, high - low, high - low)
        found[-1:] = _joined(found[-1], new) if found else [new]
    return found


def _joined(span: Stretches, new: Stretches) -> list[Stretches]:
    """Two spans as one where they are contiguous, or equal stretches at equal distances; else both."""
    apart = new.there - span.there, new.here - span.here
    if span.times == 1 and apart == (span.length, span.length):
        length = span.length + new.length
        return [Stretches(length, 1, span.there, span.here, length, length)]
    steps = apart if span.times == 1 else (span.there_step, span.here_step)
    if new.length != span.length or apart != (span.times * steps[0], span.times * steps[1]):
        return [span, new]
    return [Stretches(span.length, span.times + 1, span.there, span.here, *steps)]


class Slice(NamedTuple):
    """What an overlap takes of a dim: an interval, or one of `length` at `offset` of each of `times` such intervals."""

    dim: int
    start: int
    size: int
    times: int = 1
    offset: int = 0
    length: int = 0


class Overlap(NamedTuple):
    """A part of a global tensor that two tensors hold: its sizes, and where it lies in each, by dims from the last one on."""

    sizes: tuple[int, ...]
    there: tuple[Slice, ...]
    here: tuple[Slice, ...]


def overlaps(source: Index, target: Index) -> tuple[Overlap, ...]:
    """What tensors that hold `source` and `target` share."""
    sizes = list(zip(shape_of(source), shape_of(target), strict=True))
    every = zip(source, target, sizes, strict=True)
    shared = [[part for span in stretches(one, other) for part in _fitting(span, *size)] for one, other, size in every]
    return tuple([_overlap(chosen, sizes) for chosen in product(*shared)])


def _fitting(span: Stretches, there: int, here: int) -> Iterator[Stretches]:
    """The span itself where its stretches with their gaps lie inside dims of these sizes; else the last stretch apart."""
    if span.times > 1 and (span.times * span.there_step > there or span.times * span.here_step > here):
        last = span.times - 1
        yield span._replace(times=last)
        yield span._replace(times=1, there=span.there + last * span.there_step, here=span.here + last * span.here_step)
    else:
        yield span


def _overlap(chosen: Sequence[Stretches], sizes: Sequence[tuple[int, int]]) -> Overlap:
    shape = [n for span in chosen for n in ((span.times, span.length) if span.times > 1 else (span.length,))]
    every = list(enumerate(zip(chosen, sizes, strict=True)))[::-1]
    there = [_slice(dim, span.there, span.there_step, span, size) for dim, (span, (size, _)) in every]
    here = [_slice(dim, span.here, span.here_step, span, size) for dim, (span, (_, size)) in every]
    return Overlap(tuple(shape), tuple(filter(None, there)), tuple(filter(None, here)))


def _slice(dim: int, first: int, step: int, span: Stretches, size: int) -> Slice | None:
    """The part of a dim of this size that a span takes; None where that is all of it."""
    if span.times == 1:
        return Slice(dim, first, span.length) if span.length < size else None
    offset = max(first + span.times * step - size, 0)  # behind the last stretch the dim may end
    return Slice(dim, first - offset, span.times * step, span.times, offset, span.length)


def part(x: Tensor, slices: tuple[Slice, ...]) -> Tensor:
    """The view of an overlap in a tensor. Not by `as_strided`: where Inductor elides a copy of a slice, it takes an offset into
    the copy for one into what was sliced."""
    for dim, start, size, times, offset, length in slices:
        x = x.narrow(dim, start, size)
        if times > 1:
            x = x.unflatten(dim, (times, size // times)).narrow(dim + 1, offset, length)
    return x


def copy(source: Tensor, target: Tensor, shared: Iterable[Overlap]) -> Tensor:
    """`target`, with what it shares with `source` written into it."""
    for _, there, here in shared:
        part(target, here).copy_(part(source, there))
    return target


def take(x: Tensor, shape: tuple[int, ...], shared: Sequence[Overlap]) -> Tensor:
    """A new contiguous tensor of `shape`, all of it in `x`."""
    if len(shared) != 1:
        return copy(x, x.new_empty(shape), shared)
    sizes, there, _ = shared[0]
    found = part(x, there).clone(memory_format=torch.contiguous_format)
    return found if sizes == shape else found.view(shape)


# ── shards on their way ───────────────────────────────────────────────────────────────────────────────────────────────


class Chunk(NamedTuple):
    """A shard of `shape` that begins at `start` of a flat buffer, and what it shares with a rank's tensor."""

    start: int
    shape: tuple[int, ...]
    shared: tuple[Overlap, ...]


def chunks_of(mine: Index, shards: Iterable[tuple[int, Index]], coming: bool = False) -> list[Chunk]:
    """The shards, each with its start in a buffer, to be filled from a tensor that holds `mine`, or, coming, to fill it."""
    shared = [(start, index, overlaps(index, mine) if coming else overlaps(mine, index)) for start, index in shards]
    return [Chunk(start, shape_of(index), both) for start, index, both in shared if both]


def in_a_row(shards: Sequence[Index | None]) -> tuple[tuple[int, ...], list[tuple[int, Index]]]:
    """How many elements each shard has, and where it begins in a buffer that holds one after another; None has none.

    >>> in_a_row([(((0, 2),),), None, (((5, 9),),)])
    ((2, 0, 4), [(0, (((0, 2),),)), (2, (((5, 9),),))])
    """
    counts = [0 if index is None else math.prod(shape_of(index)) for index in shards]
    starts = accumulate(counts, initial=0)
    return tuple(counts), [(start, index) for start, index in zip(starts, shards, strict=False) if index is not None]


def pack(x: Tensor, size: int, chunks: Sequence[Chunk]) -> Tensor:
    """A flat buffer of `size` elements that holds the chunks, all of them in `x`; the rest of it may be anything."""
    if len(chunks) == 1 and len(chunks[0].shared) == 1 and math.prod(chunks[0].shape) == size:
        return part(x, chunks[0].shared[0].there).reshape(-1).contiguous()
    buffer = x.new_empty(size)
    for chunk in chunks:
        copy(x, _inside(buffer, chunk), chunk.shared)
    return buffer


def unpack(buffer: Tensor, out: Tensor, chunks: Iterable[Chunk]) -> Tensor:
    """`out`, with what the chunks hold of it written into it."""
    for chunk in chunks:
        copy(_inside(buffer, chunk), out, chunk.shared)
    return out


def put_together(buffer: Tensor, shape: tuple[int, ...], chunks: Sequence[Chunk], along: int | None) -> Tensor:
    """The tensor of `shape` that the chunks make up; quicker where each is a part along one dim, in ascending order."""
    if along is None or not chunks:
        return unpack(buffer, buffer.new_empty(shape), chunks)
    size, ends = math.prod(shape), [chunk.start + math.prod(chunk.shape) for chunk in chunks]
    in_order = math.prod(shape[:along]) == 1 and [chunk.start for chunk in chunks] == [0, *ends[:-1]]
    if in_order and 8 * (buffer.numel() - size) <= size:  # only a little padding at the end stays in memory
        return buffer[:size].view(shape)
    return torch.cat([_inside(buffer, chunk) for chunk in chunks], along)


def _inside(buffer: Tensor, chunk: Chunk) -> Tensor:
    return buffer.narrow(0, chunk.start, math.prod(chunk.shape)).view(chunk.shape)


def padded(x: Tensor, size: int) -> Tensor:
    """A tensor as a flat one of `size` elements, of which the last may be anything."""
    if x.numel() == size:
        return x.reshape(-1)
    buffer = x.new_empty(size)
    buffer[: x.numel()].view(x.shape).copy_(x)
    return buffer


def unpadded(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The way back from `padded`; a copy where the padding would stay in memory otherwise."""
    size = math.prod(shape)
    return (buffer if buffer.numel() == size else buffer[:size].clone()).view(shape)
