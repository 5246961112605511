"""Windows of planes that are sharded, compiled: equal shards make one program for all ranks, in which every row arrives
once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import shardwise as sw
from tests.helpers.windows_net import loss, small_net


def programs(rows: int) -> tuple[list[str], list[int]]:
    """What every rank compiled, if all compiled the same; and how many batches of messages each part has."""
    found: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        return make_boxed_func(module.forward)

    torch.compiler.reset()
    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    small_net(sw.init_mesh(a=dist.get_world_size()), rows, compiled)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [module.code for module in found])
    same = [code for code in texts[0] if all(code in other for other in texts)]
    return same, [sum("shardwise.messages" in str(n.target) for n in module.graph.nodes) for module in found]


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_pieces_make_one_program(ranks: int, pool: Any) -> None:
    for same, batches in pool(ranks).run(programs, 16):
        assert len(same) == 2, "ranks compiled different programs"
        assert batches == [3, 5]  # rows of each operator; again for two weights, and gradients of three planes


def test_pieces_of_any_sizes(pool: Any) -> None:
    for _, batches in pool(2).run(programs, 13):
        assert batches == [3, 5]


def captured(rows: int) -> None:
    small_net(sw.init_mesh(a=2), rows, sw.capture(loss))


def test_captured(pool: Any) -> None:
    pool(2).run(captured, 16)
