"""Laws of shards: copies between any two index sets move what both hold, and nothing else; turns go there and back."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.layouts.layout import Factor, Layout, contiguous_stride, sharded, whole
from shardwise.layouts.mesh import Mesh
from shardwise.redistribution.shards import (
    chunks_of,
    common,
    copy,
    index_of,
    join,
    overlaps,
    pack,
    padded,
    parts_of,
    put_together,
    shape_of,
    split,
    stretches,
    take,
    turns,
    unpack,
    unpadded,
)

MESH = Mesh(("a", "b"), (2, 3), range(6), "cpu", "simulated")
SHAPE = (12, 7)


@st.composite
def runs(draw: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Ascending intervals with gaps between them, often at regular distances."""
    if draw(st.booleans()):
        length, gap = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return tuple((i, min(i + length, size)) for i in range(draw(st.integers(0, 2)), size, length + gap))
    points = sorted(draw(st.sets(st.integers(0, size))))
    return tuple(zip(points[::2], points[1::2], strict=False))


indices = st.tuples(*(runs(size) for size in SHAPE))


def chosen(index: Any) -> torch.Tensor:
    """The part of a tensor of different numbers that an index names."""
    x = torch.arange(1, 1 + SHAPE[0] * SHAPE[1]).view(SHAPE)
    for dim, intervals in enumerate(index):
        x = x.index_select(dim, torch.tensor([i for low, high in intervals for i in range(low, high)], dtype=torch.long))
    return x


@settings(deadline=None)
@given(indices, indices)
def test_a_copy_moves_what_both_hold(source: Any, target: Any) -> None:
    want = chosen(target)
    want[~torch.isin(want, chosen(source))] = 0
    shared = overlaps(source, target)
    assert torch.equal(copy(chosen(source), torch.zeros(shape_of(target), dtype=torch.long), shared), want)
    turned = chosen(source).t().contiguous().t()  # the same numbers, otherwise in memory
    assert torch.equal(copy(turned, torch.zeros(shape_of(target), dtype=torch.long), shared), want)


@settings(deadline=None)
@given(indices, indices)
def test_what_is_common_is_all_of_both(one: Any, other: Any) -> None:
    both = common(one, other)
    assert both == common(other, one) and common(both, one) == both
    assert set(chosen(both).flatten().tolist()) == set(chosen(one).flatten().tolist()) & set(chosen(other).flatten().tolist())
    found = take(chosen(one), shape_of(both), overlaps(one, both))
    assert torch.equal(found, chosen(both)) and (not found.numel() or found.stride() == contiguous_stride(found.shape))


@settings(deadline=None)
@given(indices, st.lists(indices, max_size=3))
def test_parcels_bring_everything_over(mine: Any, others: Any) -> None:
    """What goes into a buffer from one tensor comes out of it into another."""
    overlaps = [common(mine, other) for other in others]
    width = max((len(chosen(box).flatten()) for box in overlaps), default=0)
    starts = [(i * width, box) for i, box in enumerate(overlaps)]
    buffer = pack(chosen(mine), width * len(overlaps), chunks_of(mine, starts))
    out = unpack(buffer, torch.zeros(shape_of(mine), dtype=torch.long), chunks_of(mine, starts, coming=True))
    want = chosen(mine)
    want[~torch.isin(want, torch.cat([chosen(box).flatten() for box in overlaps] or [torch.zeros(0)]))] = 0
    assert torch.equal(out, want)


def test_regular_stretches_are_copied_at_once() -> None:
    """A rank that holds one of two columns of each of 64 rows, as a part of one dim, is copied at once."""
    every, mine = [(0, 64 * 4)], [(4 * i + 2, 4 * i + 4) for i in range(64)]
    assert len(stretches(every, mine)) == len(stretches(mine, every)) == len(stretches(mine, mine)) == 1
    assert stretches(mine, mine)[0].times == 1
    assert len(stretches([(0, 2), (5, 7), (9, 11)], [(0, 12)])) == 2


@pytest.mark.parametrize("along", [None, 1])
def test_what_is_put_together_is_contiguous(along: int | None) -> None:
    x = torch.arange(10.0).view(2, 5)
    whole_index = (((0, 2),), ((0, 5),))
    halves = [(0, (((0, 2),), ((0, 3),))), (6, (((0, 2),), ((3, 5),)))]
    buffer = torch.cat([x[:, :3].flatten(), x[:, 3:].flatten()])
    found = put_together(buffer, (2, 5), chunks_of(whole_index, halves, coming=True), along)
    assert torch.equal(found, x) and found.is_contiguous()
    assert put_together(buffer[:0], (0, 5), [], along).shape == (0, 5)


def test_padding_goes_on_and_comes_off() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(unpadded(padded(x, 9), (3, 2)), x) and padded(x, 9).shape == (9,)
    full = x.contiguous()
    assert padded(full, 6).data_ptr() == full.data_ptr() == unpadded(full.view(-1), (3, 2)).data_ptr()
    assert unpadded(padded(x, 9), (3, 2)).untyped_storage().nbytes() == 6 * 4


# ── equal shards ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("coarse", "fine", "axes", "parts"),
    [
        ([whole(6)], [sharded(6, "a", MESH)], "a", ["a", 3]),
        ([whole(6)], [sharded(6, "ba", MESH)], "ab", ["b", "a", 1]),
        ([sharded(6, "b", MESH)], [sharded(6, "ba", MESH)], "a", ["a", 1]),
        ([whole(24)], [sharded(4, "a", MESH), sharded(6, "b", MESH)], "ab", ["a", 2, "b", 2]),
        ([Factor(24, ("a",), (12, 12))], [sharded(4, "a", MESH), sharded(6, "b", MESH)], "b", [2, "b", 2]),
        ([Factor(9, ("a",), (6, 3))], [Factor(9, ("a", "b"), (2, 2, 2, 1, 1, 1))], "b", ["b", 2]),
        ([sharded(6, "a", MESH)], [sharded(6, "ba", MESH)], "b", None),  # not at the minor end
        ([whole(5)], [sharded(5, "a", MESH)], "a", None),  # not equal
        ([sharded(6, "b", MESH)], [sharded(6, "a", MESH)], "a", None),  # not a part
        ([Factor(6, ("b",), (1, 2, 3))], [sharded(6, "ba", MESH)], "a", None),
    ],
)
def test_the_parts_of_a_dim(coarse: Any, fine: Any, axes: str, parts: Any) -> None:
    layout = Layout.of(MESH, [fine])
    found = parts_of(Layout.of(MESH, [coarse]).dims[0], layout.dims[0], tuple(axes), MESH)
    sizes = found and [part if isinstance(part, str) else part.sizes[layout.shard(part, 0)] for part in found]
    assert sizes == parts


@pytest.mark.parametrize("shape", [(6, 4), (6, 1), (1, 12), (12, 1, 2)], ids=str)
def test_turns_go_there_and_back(shape: tuple[int, ...]) -> None:
    """The shards of a group, stacked in its order, make the whole: for every dim, order and stride."""
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim, axes in product(range(len(shape)), (("a",), ("b",), ("a", "b"), ("b", "a"))):
        layout = Layout.of(MESH, [[sharded(n, axes, MESH)] if i == dim else [whole(n)] for i, n in enumerate(shape)])
        names = MESH.sorted_axes(axes)
        parts = parts_of((whole(shape[dim]),), layout.dims[dim], names, MESH)
        if parts is None:
            continue
        every = [part for i, d in enumerate(layout.dims) for part in (parts if i == dim else d)]
        places = MESH.peers(0, names)
        stacked = torch.stack([copy(x, torch.empty(layout.local_shape(p), dtype=x.dtype), _held(layout, p)) for p in places])
        whole_again = join(stacked.flatten(), turns(every, names, layout, lambda place: shape, back=True)[1].at(0))
        assert torch.equal(whole_again, x) and whole_again.stride() == contiguous_stride(shape)
        turn = turns(every, names, layout, lambda place, stacked=stacked: tuple(stacked.shape))[1].at(0)
        for y in (x, x.mT.contiguous().mT):
            assert torch.equal(split(y, turn), stacked)


def _held(layout: Layout, place: int) -> Any:
    return overlaps(tuple(((0, n),) for n in layout.shape), index_of(layout, place))
