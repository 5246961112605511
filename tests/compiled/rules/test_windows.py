"""Windows of planes that are sharded, compiled: equal shards make one program for all ranks, in which every row arrives
once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import shardwise as sw
from shardwise.comm.tracing import tracing
from tests.helpers.windows_net import close, loss, small_net


def programs(rows: int, alike: bool, net: Any = loss, run: Any = small_net) -> tuple[list[str], list[int]]:
    """What every rank compiled, if all compiled the same; and how many batches of messages each part has. Where ranks are to be
    alike, what is particular to one of them raises."""
    found: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        return make_boxed_func(module.forward)

    torch.compiler.reset()
    compiled = torch.compile(net, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with tracing(only_alike=alike):
        run(sw.init_mesh(a=dist.get_world_size()), rows, compiled)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [module.code for module in found])
    same = [code for code in texts[0] if all(code in other for other in texts)]
    return same, [sum("shardwise.messages" in str(n.target) for n in module.graph.nodes) for module in found]


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_shards_make_one_program(ranks: int, pool: Any) -> None:
    for same, batches in pool(ranks).run(programs, 16, True):
        assert len(same) == 2, "ranks compiled different programs"
        assert batches == [3, 5]  # rows of each operator; again for two weights, and gradients of three planes


def test_shards_of_any_sizes(pool: Any) -> None:
    for _, batches in pool(2).run(programs, 13, False):
        assert batches == [3, 5]


def pooled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Windows that neither overlap nor cross a border."""
    found, index = F.max_pool2d(x, 2, return_indices=True)
    return found, index, F.avg_pool2d(x, 2)


def check_pooled(mesh: sw.Mesh, rows: int, function: Any) -> None:
    """Pooling of a plane whose rows, or whose columns, are sharded gives what one device gives; so do gradients."""
    for dim in (2, 3):
        dense = torch.randn(2, 3, rows, rows, generator=torch.Generator().manual_seed(rows)).requires_grad_()
        spread = sw.distribute_tensor(dense.detach(), mesh, [sw.Shard(dim)]).requires_grad_()
        got, want = function(spread), pooled(dense)
        assert got[1].full_tensor().equal(want[1])
        for one, other in zip(got, want, strict=True):
            close(one.full_tensor(), other, 1e-6)
        (got[0] * got[2]).sum().backward()
        (want[0] * want[2]).sum().backward()
        close(spread.grad.full_tensor(), dense.grad, 1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_pooling_without_messages_is_one_program(ranks: int, pool: Any) -> None:
    for same, batches in pool(ranks).run(programs, 16, True, pooled, check_pooled):
        assert len(same) == 4, "ranks compiled different programs"
        assert batches == [0] * 4


def captured(rows: int) -> None:
    with tracing(only_alike=True):
        small_net(sw.init_mesh(a=2), rows, sw.capture(loss))
        check_pooled(sw.init_mesh(a=2), rows, sw.capture(pooled))


def test_captured(pool: Any) -> None:
    pool(2).run(captured, 16)
