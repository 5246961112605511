"""Ring attention on Gloo ranks: the values and gradients of dense attention, and as many bytes as stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Shard, remat
from tests.helpers.ring_attention import dense, ring, same, tensors

CASES: list[tuple[dict[str, int], Any, int, tuple[int, int], dict[str, Any]]] = [
    *(({"sp": 4}, [Shard(2)], n, (4, 4), {"is_causal": causal}) for n in (16, 13, 3) for causal in (False, True)),
    ({"sp": 4}, [Shard(2)], 13, (4, 2), {"is_causal": True, "enable_gqa": True}),
    ({"dp": 2, "sp": 2}, [Shard(0), Shard(2)], 13, (4, 4), {"is_causal": True}),
    ({"tp": 2, "sp": 2}, [Shard(1), Shard(2)], 13, (4, 2), {"is_causal": True, "enable_gqa": True}),
    ({"sp": 2, "cp": 2}, [Shard(2), Shard(2)], 13, (4, 4), {"is_causal": True}),
]


def every_case(dtype: torch.dtype) -> int:
    for axes, placements, length, heads, words in CASES:
        given = tensors(length, heads=heads, dtype=dtype)
        same(ring(given, sw.init_mesh(**axes), placements, **words), dense(given, **words))
    return len(CASES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_value_and_gradients(dtype: torch.dtype, pool: Any) -> None:
    assert pool(4).run(every_case, dtype) == [len(CASES)] * 4


def inside_and_outside() -> bool:
    """A mesh of two of the ranks; the others run the same program."""
    mesh = sw.init_mesh(sp=2, ranks=[1, 3])
    given = tensors(5)
    spread = [sw.distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in given]
    out = sw.ring_attention(*spread, is_causal=True)
    (out * out.detach().cos()).sum().backward()
    if dist.get_rank() in (1, 3):
        same([out.detach().full_tensor(), *(x.grad.full_tensor() for x in spread)], dense(given, is_causal=True))
    return True


def test_ranks_outside_the_mesh(pool: Any) -> None:
    assert all(pool(4).run(inside_and_outside))


def bytes_and_remat() -> list[tuple[int, int]]:
    mesh = sw.init_mesh(sp=4)
    x = sw.distribute_tensor(torch.randn(2, 4, 16, 8), mesh, [Shard(2)]).requires_grad_()
    found = []
    for block in (sw.ring_attention, lambda *given: remat(sw.ring_attention, *given)):
        with sw.trace_comm() as forward:
            out = block(x, x, x)
        with sw.trace_comm() as backward:
            out.sum().backward()
        found.append((forward.bytes, backward.bytes))
    return found


def test_bytes_are_as_stated(pool: Any) -> None:
    one_way = 2 * (2 * 4 * 16 * 8) * 4 * 3 // 4  # float32 keys and values, of which three of four blocks come
    assert pool(4).run(bytes_and_remat) == [[(one_way, 2 * one_way)] * 2] * 4
