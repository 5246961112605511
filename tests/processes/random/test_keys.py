"""Random numbers on processes: bit by bit those of a simulated world, eager and captured, also on shards of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Shard


def drawn(axes: dict[str, int], captured: bool) -> list[Tensor]:
    """Numbers of two calls, as they come together on a rank."""
    mesh = sw.init_mesh(**axes)
    x = sw.ones(7, 6, mesh=mesh, placements=[Shard(dim) for dim in range(mesh.ndim)])

    def noisy(x: DTensor) -> list[DTensor]:
        few = [F.dropout(x, 0.5), torch.randn_like(x), torch.nn.init.kaiming_uniform_(x.clone()), sw.randperm(9, mesh=mesh)]
        return [*few, torch.multinomial(x, 2)]

    torch.manual_seed(1)
    call: Any = sw.capture(noisy) if captured else noisy
    return [y.full_tensor() for _ in range(2) for y in call(x)]


@pytest.mark.parametrize(("ranks", "axes", "captured"), [(2, {"a": 2}, True), (4, {"a": 2, "b": 2}, False)], ids=str)
def test_processes_draw_what_simulated_ranks_draw(ranks: int, axes: dict[str, int], captured: bool, pool: Any) -> None:
    want = drawn(axes, False)
    for got in pool(ranks).run(drawn, axes, captured):
        assert all(map(torch.equal, got, want))
