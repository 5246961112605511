"""Flex attention over DTensors: the user's functions see global indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import shardwise as sw
from shardwise import Shard
from tests.helpers.one_device import MESHES, equal

# torch runs it unfused outside torch.compile, and says so.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("mesh", "placements"), [("2", [Shard(0)]), ("2", [Shard(1)]), ("2x2", [Shard(1), Shard(0)]), ("2", [Shard(2)])]
)
def test_flex_attention_of_batch_heads_or_queries_sharded(mesh: str, placements: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 8, 4, generator=generator) for _ in range(3))
    slopes = torch.randn(4, generator=generator)
    mask = create_block_mask(lambda b, h, i, j: i + h >= j + b, 2, 4, 8, 8, device="cpu", BLOCK_SIZE=4)

    def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        out: Any = flex_attention(q, k, v, lambda score, b, h, i, j: score + s[h] * (i - j) + b, mask)
        return out

    spread = [sw.distribute_tensor(t, MESHES[mesh], placements) for t in (query, key, value)]
    spread.append(sw.distribute_tensor(slopes, MESHES[mesh]))
    with sw.trace_comm() as log:
        out = attend(*spread)
    equal(out, attend(query, key, value, slopes), "flex attention")
    assert placements == [Shard(2)] or not log.records
