"""Windows of planes that are sharded, on Gloo ranks: a small network, and planes sharded along both dims, empty shards among
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard
from tests.helpers.windows_net import close, small_net


def network(ranks: int) -> None:
    for rows in (16, 13, 5):
        small_net(sw.init_mesh(a=ranks), rows)


def planes(axes: dict[str, int], placements: list[Any]) -> None:
    mesh = sw.init_mesh(**axes)
    x, weight = torch.linspace(-1, 1, 2 * 3 * 128 * 12).mul(40).sin().view(2, 3, 128, 12), torch.ones(3, 3, 5, 3)
    dense, spread = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh, placements).requires_grad_()
    with sw.trace_comm() as log:
        outs = [F.conv2d(spread, weight, padding=(2, 1)), *F.max_pool2d(spread, 3, 1, 1, return_indices=True)]
    assert "p2p" in log.counts(), log
    wants = [F.conv2d(dense, weight, padding=(2, 1)), *F.max_pool2d(dense, 3, 1, 1, return_indices=True)]
    for got, want in zip(outs, wants, strict=True):
        close(got.full_tensor(), want, 1e-4)
    (outs[0].square().mean() + outs[1].sum()).backward()
    (wants[0].square().mean() + wants[1].sum()).backward()
    close(spread.grad.full_tensor(), dense.grad, 1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_small_network(ranks: int, pool: Any) -> None:
    pool(ranks).run(network, ranks)


def test_planes(pool: Any) -> None:
    pool(2).run(planes, {"a": 2}, [Shard(2, (127, 1))])
    pool(4).run(planes, {"a": 4}, [Shard(2, (1, 126, 0, 1))])
    pool(4).run(planes, {"a": 2, "b": 2}, [Shard(2), Shard(2)])
