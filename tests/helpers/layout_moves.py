"""Layouts of small tensors, and the law of a move: every rank ends with exactly what the index sets of its layout say.

Values are whole multiples of 36, so that sums, averages over 2, 3 and 6 ranks and products with powers of two are exact.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import permutations, product
from typing import TypeVar

import torch
from torch import Tensor

from shardwise import Bundle, Mesh
from shardwise.layouts.factor import default_sizes
from shardwise.layouts.layout import Dim, Factor, Layout, contiguous_stride, sharded, whole

T = TypeVar("T")

#: How many times as many pairs of layouts are tried as usual (SHARDWISE_SWEEP=20), or all there are (SHARDWISE_SWEEP=all).
SWEEP = float(os.environ.get("SHARDWISE_SWEEP", "1").replace("all", "inf"))

KINDS = ("sum", "avg", "max", "min", "product")
BITS = ("band", "bor", "bxor")

_REDUCE = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


# ── layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def layouts(
    shape: Sequence[int], mesh: Mesh, kinds: Iterable[str] = ("sum",), odd: bool = True, dtype: torch.dtype = torch.float32
) -> list[Layout]:
    """Every layout: each axis shards a dim, is partial or replicates, in every order of the axes on a dim; with `odd`, also
    into explicit sizes and as factors of a dim.

    >>> mesh = Mesh(("a",), (2,), range(2), "cpu", "simulated")
    >>> layouts((4,), mesh)
    [f32[4], f32[4@a], f32[4@a{0,4}], f32[4@a{3,1}], f32[(2*2@a)], f32[4 | sum@a]]
    """
    found: dict[Layout, None] = {}
    for states in product((None, *range(len(shape)), *kinds), repeat=mesh.ndim):
        partials = [(axis, state) for axis, state in zip(mesh.axes, states, strict=True) if isinstance(state, str)]
        mixed = {kind for _, kind in partials}
        if len(mixed) > 1 and not mixed <= {"sum", "avg"}:
            continue
        cuts = [[axis for axis, state in zip(mesh.axes, states, strict=True) if state == dim] for dim in range(len(shape))]
        for dims in product(*(list(_cuts(size, axes, mesh, odd)) for size, axes in zip(shape, cuts, strict=True))):
            found[Layout.of(mesh, dims, partials, dtype)] = None
    return list(found)


def _cuts(size: int, axes: Sequence[str], mesh: Mesh, odd: bool) -> Iterator[Dim]:
    """The ways in which all of `axes` shard a dim."""
    for order in permutations(axes):
        yield (sharded(size, order, mesh),)
        if not odd or not order:
            continue
        parts = [mesh.axis_sizes[axis] for axis in order]
        last = (0,) * (math.prod(parts) - 1) + (size,)
        yield (Factor(size, order, last),)
        yield (Factor(size, order, tuple(n for part in _uneven(size, parts[0]) for n in default_sizes(part, parts[1:]))),)
        if size % 2 == 0 and size:
            yield whole(2), sharded(size // 2, order, mesh)
            for i in range(1, len(order)):
                yield sharded(size // 2, order[:i], mesh), sharded(2, order[i:], mesh)


def _uneven(size: int, parts: int) -> tuple[int, ...]:
    """All but one first, and one last: what no default chunks are.

    >>> _uneven(5, 3)
    (4, 0, 1)
    """
    one = min(1, size)
    return (size - one, *(0,) * (parts - 2), one) if parts > 1 else (size,)


def most(count: int) -> int:
    """So many, times the sweep's factor."""
    return int(min(count * SWEEP, sys.maxsize))


def sampled(items: Sequence[T], count: int) -> list[T]:
    """So many of the items (all if there are fewer), always the same."""
    return list(items) if len(items) <= count else random.Random(len(items)).sample(items, count)


def pairs(every: Sequence[Layout], count: int, goals: Sequence[Layout] | None = None) -> list[tuple[Layout, Layout]]:
    """So many pairs of layouts, from one to another (of `goals` if given), always the same."""
    goals = every if goals is None else goals
    chosen = sampled(range(len(every) * len(goals)), count)
    return [(every[i // len(goals)], goals[i % len(goals)]) for i in chosen]


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of different numbers (as far as its dtype has them), some negative."""
    x = torch.arange(math.prod(shape)).view(shape)
    if dtype is torch.bool:
        return x % 3 == 0
    if not dtype.is_floating_point and not dtype.is_complex:
        return (x * 7 % 61).to(dtype)
    return (x * 36 - 108).to(dtype)


def spread(layout: Layout) -> Bundle:
    """The local value of a layout, with summands that differ from rank to rank where a reduction is partial."""
    mesh = layout.mesh
    shards = []
    for place, shard in enumerate(exact(layout.reduced())):
        point = dict(zip(mesh.axes, mesh.coordinates[place], strict=True))
        for axis, kind in layout.partials:
            shard = _summand(shard, kind, point[axis], mesh.axis_sizes[axis])
        shards.append(shard.clone())
    return Bundle(shards)


@lru_cache(maxsize=4096)
def exact(layout: Layout) -> list[Tensor]:
    """What each place holds if nothing is partial: from index sets alone."""
    found = []
    for place in range(len(layout.mesh.ranks)):
        shard = values(tuple(layout.shape), layout.dtype)
        for dim in range(layout.ndim):
            index = [i for low, high in layout.runs(dim, place) for i in range(low, high)]
            shard = shard.index_select(dim, torch.tensor(index, dtype=torch.long))
        found.append(shard)
    return found


def _summand(shard: Tensor, kind: str, index: int, ranks: int) -> Tensor:
    last, is_bool = index == ranks - 1, shard.dtype is torch.bool
    if kind in ("sum", "avg") and not is_bool:
        times = ranks if kind == "avg" else 1
        return shard * times + 36 * (ranks - 1) if last else torch.full_like(shard, -36)
    if kind == "product" and not is_bool:
        factor = 2 if shard.is_floating_point() else -1
        return shard * factor ** (ranks - 1) if last else torch.full_like(shard, 1 / factor)
    if kind == "bxor":
        ones = torch.ones_like(shard)
        return ones if not last else shard if ranks % 2 else shard ^ ones
    if last:
        return shard
    if is_bool or kind in BITS:
        return shard | torch.ones_like(shard) if kind in ("min", "product", "band") else shard & torch.zeros_like(shard)
    return shard - 36 if kind == "max" else shard + 36


# ── the law ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(local: Bundle, layout: Layout, about: object) -> None:
    """Assert that a local value is that of a layout: exactly, on every rank, in contiguous memory."""
    every = zip(local.shards, reduced(local.shards, layout), exact(layout.reduced()), strict=True)
    for place, (held, shard, want) in enumerate(every):
        check_piece(held, layout, place, about)
        assert torch.equal(shard, want), f"{about}: place {place} holds {shard}, not {want}"


def check_piece(held: Tensor, layout: Layout, place: int, about: object) -> None:
    """Assert that a tensor has the form of what a place holds."""
    assert held.dtype == layout.dtype, f"{about}: place {place} holds {held.dtype}"
    assert tuple(held.shape) == layout.local_shape(place), f"{about}: place {place} holds {tuple(held.shape)}"
    assert not held.numel() or held.stride() == contiguous_stride(held.shape), (
        f"{about}: place {place} has strides {held.stride()}"
    )


def reduced(shards: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """What each place's group makes of its partial shards."""
    if not layout.partials:
        return list(shards)
    axes = layout.mesh.sorted_axes(axis for axis, _ in layout.partials)
    scale = math.prod(layout.mesh.axis_sizes[axis] for axis, kind in layout.partials if kind == "avg")
    groups = [layout.mesh.peers(place, axes) for place in range(len(shards))]
    found = [reduce(_REDUCE[layout.partials[0][1]], [shards[peer] for peer in group]) for group in groups]
    if scale == 1:
        return found
    return [shard / scale if shard.is_floating_point() else shard // scale for shard in found]


def agree(shards: Sequence[Tensor], layout: Layout, about: object) -> None:
    """Assert that places that hold the same indices hold the same bits of float32."""
    seen: dict[object, Tensor] = {}
    for place, shard in enumerate(shards):
        held = tuple(tuple(layout.runs(dim, place)) for dim in range(layout.ndim))
        first = seen.setdefault(held, shard)
        assert torch.equal(first.view(torch.int32), shard.view(torch.int32)), f"{about}: place {place} holds other bits"
