"""Caches are bounded and do not grow with a training run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

MESH = sw.init_mesh(dp=2, tp=2)


def parameters() -> list[nn.Parameter]:
    placements: list[Any] = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    return [nn.Parameter(sw.distribute_tensor(torch.randn(3, 2), MESH, p)) for p in placements]


@pytest.mark.parametrize("words", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_an_optimizers_scalars_are_no_part_of_a_key(words: dict[str, bool]) -> None:
    weights = parameters()
    optimizer = torch.optim.AdamW(weights, lr=1e-3, **words)
    steps = 2000 if words.get("foreach") else 50
    for step in range(steps):
        if step < 5 or step % 500 == 0:
            optimizer.zero_grad()
            sum((w * w).sum() for w in weights).backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (step + 1)
        optimizer.step()
        if step == 5:
            warm = {name: info.size for name, info in sw.cache_info().items()}
    assert {name: info.size for name, info in sw.cache_info().items()} == warm


def test_scalars_enter_by_type_only() -> None:
    x = sw.ones(4, mesh=MESH, placements=[Shard(0), Replicate()])
    for _ in range(2):  # the quickest call of an operator is looked for the second time
        torch.clamp(x * 1.5, min=0.5)
    before = sw.cache_info().size
    for i in range(50):
        torch.clamp(x * (i + 0.5), min=i + 0.25)
    assert sw.cache_info().size == before
    assert (x * 2).dtype == torch.float32 and (x.long() * 2.5).dtype == torch.float32


def test_every_cache_is_bounded_and_visible() -> None:
    report = sw.cache_info()
    assert {"decisions", "plans"} <= report.keys()
    assert report.size <= report.limit
    x = sw.ones(3000, mesh=MESH)
    limit = report["decisions"].limit
    for i in range(limit + 50):
        x[i % 3000 : i % 3000 + 1 + i // 3000]
    assert sw.cache_info()["decisions"].size <= limit
    sw.cache_clear()
    assert sw.cache_info().size == 0


def test_a_change_of_the_default_dtype_is_seen() -> None:
    x = sw.ones(4, mesh=MESH, dtype=torch.int64)
    assert (x / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype == torch.float64 == (x / 2).to_local().dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype == torch.float32
