"""Convolution and pooling of a plane that is sharded: what one device gives, forward and backward, and which rows are sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import Mesh, Replicate, Shard
from shardwise.layouts.layout import Factor
from shardwise.planning.cost import Link, set_links
from shardwise.rules.halo import Windows, halo, share
from tests.helpers.windows_net import close, small_net

MESHES = [sw.init_mesh(a=2), sw.init_mesh(a=3), sw.init_mesh(a=4), sw.init_mesh(a=2, b=2)]


def both(function: Callable[..., Any], tensors: list[Tensor], mesh: Mesh, placements: list[Any], tolerance: float) -> Any:
    """Compare forward and backward with one device; gives the result, and what was sent there and back."""
    dense = [x.clone().requires_grad_() for x in tensors]
    spread = [sw.distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(tensors, placements, strict=True)]
    with sw.trace_comm() as there:
        got = function(*spread)
    want = function(*dense)
    for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, want)), strict=True):
        held = [tuple(shard.shape) for shard in one.to_local().shards]
        assert held == [one.layout.local_shape(place) for place in range(len(held))]
        close(one.full_tensor(), other, tolerance)
    first, dense_first = (y[0] if isinstance(y, tuple) else y for y in (got, want))
    grad = torch.linspace(-1, 1, dense_first.numel(), dtype=dense_first.dtype).view_as(dense_first)
    dense_first.backward(grad)
    grad = sw.distribute_tensor(grad, mesh, first.layout)
    with sw.trace_comm() as back:
        first.backward(grad)
    for x, y in zip(spread, dense, strict=True):
        close(x.grad.full_tensor(), y.grad, tolerance)
    return first, there, back


# ── random calls ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes(n: int, parts: int, chance: random.Random) -> tuple[int, ...]:
    stops = [0, *sorted(chance.randint(0, n) for _ in range(parts - 1)), n]
    return tuple(b - a for a, b in pairwise(stops))


def cut(shape: torch.Size, mesh: Mesh, chance: random.Random) -> list[Any]:
    """Dims of the plane mostly, into equal shards or any, empty ones among them."""
    placements: list[Any] = []
    for axis in mesh.axes:
        dim = chance.randrange(0 if chance.random() < 0.2 else 2, len(shape))
        free = all(p.dim != dim for p in placements)
        given = sizes(shape[dim], mesh.axis_sizes[axis], chance) if free and chance.random() < 0.5 else None
        placements.append(Shard(dim, given))
    return placements


def calls(chance: random.Random) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    """A convolution, a maximum with its indices and an average, of planes of one to three dims."""
    count = chance.choice([1, 2, 2, 3])
    kernel, stride = ([chance.choice(some) for _ in range(count)] for some in ([1, 2, 3, 5], [1, 1, 2, 3]))
    dilation = [chance.choice([1, 1, 2]) for _ in range(count)]
    plane = [chance.randint(2 * k, 11) for k in kernel]
    groups, each = chance.choice([(1, 3), (2, 2)])
    x = torch.randn(chance.choice([1, 2]), groups * each, *plane, dtype=torch.float64)
    pad, ceil, inside = [k // 2 for k in kernel], chance.random() < 0.5, chance.random() < 0.5
    weight, bias = torch.randn(2 * groups, each, *kernel, dtype=x.dtype), torch.randn(2 * groups, dtype=x.dtype)
    wide = [chance.choice([0, p, p + 1]) for p in pad]
    yield lambda x, w, b: getattr(F, f"conv{count}d")(x, w, b, stride, wide, dilation, groups), [x, weight, bias]
    largest = getattr(F, f"max_pool{count}d")
    pooled = [1 if d * (k - 1) >= n else d for d, k, n in zip(dilation, kernel, plane, strict=True)]
    yield lambda x: largest(x, kernel, stride, pad, pooled, ceil_mode=ceil, return_indices=True), [x]
    average = getattr(F, f"avg_pool{count}d")
    yield lambda x: average(x, kernel, stride, pad, ceil_mode=ceil, count_include_pad=inside), [x]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_window_of_any_sharding(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.rules.windows._seconds", lambda *_: -1.0)  # whatever it costs
    sw.cache_clear()
    chance, sent = random.Random(mesh.size()), 0
    torch.manual_seed(0)
    for _ in range(12):
        for function, tensors in calls(chance):
            placements = [cut(tensors[0].shape, mesh, chance), *([Replicate()] * mesh.ndim for _ in tensors[1:])]
            _, there, back = both(function, tensors, mesh, placements, 1e-9)
            sent += {"p2p"} <= there.counts().keys() | back.counts().keys()
    sw.cache_clear()
    assert sent > 12


# ── chosen ones ───────────────────────────────────────────────────────────────────────────────────────────────────────

WEIGHT = torch.linspace(-1, 1, 8 * 4 * 9).sin().view(8, 4, 3, 3)
#: A function of [2, 4, 32, 16] shard at dim 2 over 4 ranks, how the result is sharded, and the rows that come to a rank at
#: most.
ROWS: dict[str, tuple[Callable[[Any], Any], str, int]] = {
    "conv2d": (lambda x: F.conv2d(x, WEIGHT, padding=1), "32@a", 2),
    "conv2d, 1x1": (lambda x: F.conv2d(x, WEIGHT[..., :1, :1]), "32@a", 0),
    "conv2d, stride 2": (lambda x: F.conv2d(x, WEIGHT, padding=1, stride=2), "16@a", 1),
    "conv2d, dilated": (lambda x: F.conv2d(x, WEIGHT, padding=3, dilation=3), "32@a", 6),
    "conv2d, of each channel": (lambda x: F.conv2d(x, WEIGHT[:4, :1], padding=1, groups=4), "32@a", 2),
    "conv2d, unpadded": (lambda x: F.conv2d(x, WEIGHT), "30@a", 2),
    "conv2d, same": (lambda x: F.conv2d(x, WEIGHT[..., :2, :1], padding="same"), "32@a", 1),
    "conv1d": (lambda x: F.conv1d(x.mean(3), WEIGHT[..., 0], padding=1), "32@a", 2),
    "conv3d": (lambda x: F.conv3d(x[..., None], WEIGHT[..., None], padding=(1, 1, 0)), "32@a", 2),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), "16@a", 1),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 5, 1, 2, count_include_pad=False), "32@a", 4),
    "max_pool2d, apart": (lambda x: F.max_pool2d(x, 2), "16@a", 0),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", ROWS)
def test_only_rows_at_the_borders_are_sent(name: str) -> None:
    function, shown, rows = ROWS[name]
    x = torch.linspace(-1, 1, 2 * 4 * 32 * 16).mul(50).sin().view(2, 4, 32, 16)
    result, there, back = both(function, [x], sw.init_mesh(a=4), [[Shard(2)]], 1e-4)
    assert f", {shown}" in repr(result.layout), result.layout
    row = 2 * 4 * 16 * 4 // (16 if name == "conv1d" else 1)  # batch, channels, the width, and bytes of a float
    assert there.bytes == rows * row and set(there.counts()) <= {"p2p"}, there
    assert back.bytes == rows * row and set(back.counts()) <= {"p2p"}, back  # weights are not asked for


def test_a_kernel_that_is_longer_than_shards_asks_more_than_the_neighbours() -> None:
    x, weight = torch.randn(1, 2, 12, 3), torch.randn(2, 2, 11, 1)
    placements = [[Shard(2)], [Replicate()]]
    result, there, _ = both(lambda a, w: F.conv2d(a, w, padding=(5, 0)), [x, weight], sw.init_mesh(a=6), placements, 1e-4)
    assert result.placements == (Shard(2),) and there.counts() == {"p2p": 1}
    assert there.bytes == 9 * 2 * 3 * 4  # of the 12 rows a rank in the middle needs 11, and holds 2


def test_corners_come_too() -> None:
    x, weight = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)
    mesh = sw.init_mesh(down=2, across=2)
    set_links(mesh, dict.fromkeys(mesh.axes, Link(1e-8, 1e-9)))  # starting twice costs little beside bytes
    placements = [[Shard(2), Shard(3)], [Replicate(), Replicate()]]
    result, there, back = both(lambda a, w: F.conv2d(a, w, padding=1), [x, weight], mesh, placements, 1e-4)
    assert result.placements == (Shard(2), Shard(3)) and there.counts() == {"p2p": 2}
    assert there.bytes == (4 + 6) * 2 * 4  # a row of the shard, then a column of what is 6 rows high
    assert back.counts() == {"p2p": 4, "all_reduce": 1}  # rows of the plane again, and of its gradient; that of the weight


def test_one_dim_by_two_axes() -> None:
    x, weight = torch.randn(1, 2, 13, 4), torch.randn(3, 2, 3, 3)
    mesh = sw.init_mesh(a=2, b=2)
    for placements in ([Shard(2), Shard(2)], {"b": Shard(2), "a": Shard(2)}):
        result, there, _ = both(lambda a, w: F.conv2d(a, w, padding=1), [x, weight], mesh, [placements, {}], 1e-4)
        assert len(result.layout.axes_of(2)) == 2 and there.counts() == {"p2p": 1}


def test_beside_a_sharding_of_batch_or_channels() -> None:
    mesh, x, weight = sw.init_mesh(a=2, b=2), torch.randn(2, 4, 16, 4), torch.randn(4, 4, 3, 3)
    both_of = lambda a, w: F.conv2d(a, w, padding=1)  # noqa: E731
    batch, there, _ = both(both_of, [x, weight], mesh, [[Shard(0), Shard(2)], {}], 1e-4)
    assert batch.placements == (Shard(0), Shard(2)) and there.counts() == {"p2p": 1}
    wide, there, _ = both(both_of, [x, weight], mesh, [[Replicate(), Shard(2)], [Shard(0), Replicate()]], 1e-4)
    assert wide.placements == (Shard(1), Shard(2)) and there.counts() == {"p2p": 1}


def test_the_first_of_equals_is_the_first_row_inside() -> None:
    x = torch.full((1, 1, 6, 4), -torch.inf)
    both(lambda t: F.max_pool2d(t, 3, 1, 1, return_indices=True), [x], sw.init_mesh(a=3), [[Shard(2)]], 0.0)


def test_halves() -> None:
    x, weight = torch.randn(2, 4, 16, 8).bfloat16(), torch.randn(4, 4, 3, 3).bfloat16()
    result, *_ = both(lambda a, w: F.conv2d(a, w, padding=1), [x, weight], MESHES[0], [[Shard(2)], [Replicate()]], 0.1)
    assert result.dtype is torch.bfloat16 and result.placements == (Shard(2),)


def test_what_costs_less_is_done() -> None:
    mesh = sw.init_mesh(a=2)
    wide, whole = torch.randn(64, 64, 2, 2), torch.randn(1, 1, 4, 4)
    for x, stride in ((wide, 2), (wide, 1)):  # half of all rows would be sent: sharding channels instead costs no more
        both(lambda t, s=stride: F.max_pool2d(t, 2, s, 1), [x], mesh, [[Shard(2)]], 0.0)
    y = F.conv_transpose2d(sw.distribute_tensor(whole, mesh, [Shard(2)]), torch.ones(1, 1, 2, 2))
    close(y.full_tensor(), F.conv_transpose2d(whole, torch.ones(1, 1, 2, 2)), 1e-5)
    with pytest.raises(sw.CommunicationError, match="sends rows between the shards of"), sw.communication("forbid"):
        F.conv2d(sw.distribute_tensor(torch.ones(1, 1, 8, 4), mesh, [Shard(2)]), torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize(("axes", "rows"), [({"a": 2}, 16), ({"a": 4}, 16), ({"a": 4}, 13), ({"a": 4}, 5)])
def test_a_small_network(axes: dict[str, int], rows: int) -> None:
    small_net(sw.init_mesh(**axes), rows)


# ── shares ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_windows_go_where_their_rows_are() -> None:
    held = Factor(12, ("a",), (6, 0, 2, 4))
    assert share(held, Windows(1, 1, 3, 12)) == (6, 0, 2, 4)
    assert share(held, Windows(2, 0, 2, 6)) == (3, 0, 1, 2)
    assert share(Factor(16, ("a",), (4, 4, 4, 4)), Windows(1, 0, 5, 12)) == (3, 3, 3, 3)


def test_ranks_at_the_ends_do_what_the_others_do() -> None:
    found = halo(2, Factor(16, ("a",), (4, 4, 4, 4)), (4, 4, 4, 4), Windows(1, 1, 3, 16))
    for message in found.messages:
        assert len(set(message.given)) == len(set(message.taken)) == 1
    assert {(stretch.rows, stretch.own, stretch.at) for stretch in found.stretches} == {(6, (0, 4), 1)}
