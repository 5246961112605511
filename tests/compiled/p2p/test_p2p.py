"""Batches of messages inside compiled functions: right, whole, and one graph for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise import p2p
from tests.helpers import exchanges
from tests.helpers.process_pool import Pool
from tests.helpers.torchrun import run

Pools = Callable[[int], Pool]


def run_all(size: int, backend: str) -> list[str]:
    """The functions that are not right compiled."""
    torch._dynamo.reset()
    counters.clear()
    mesh = sw.init_mesh(pp=size)
    wrong = [name for name, function in exchanges.functions(mesh).items() if not exchanges.is_right(function, backend)]
    assert not counters["graph_break"]
    return wrong


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_compiled_whole(pool: Pools, size: int, backend: str) -> None:
    assert pool(size).run(run_all, size, backend) == [[]] * size


def run_graphs(size: int) -> list[str]:
    """The texts of all graphs, forward and backward."""
    torch._dynamo.reset()
    mesh, texts = sw.init_mesh(pp=size), []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        texts.append(graph.code)
        return make_boxed_func(graph.forward)

    for function in exchanges.functions(mesh).values():
        exchanges.both(
            torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True), exchanges.shard()
        )
    return texts


def test_one_graph_for_all_ranks(pool: Pools) -> None:
    graphs = pool(4).run(run_graphs, 4)
    assert len(graphs[0]) == 2 * len(exchanges.functions(sw.init_mesh(pp=4)))
    assert all(texts == graphs[0] for texts in graphs)
    ring = graphs[0][0]
    assert ring.count("torch.ops.shardwise.messages.default") == 3 and "shift +1 wrap pp" in ring
    assert ring.count("_c10d_functional.wait_tensor") == 3


def run_alone() -> tuple[str, bool]:
    """Ranks by number: each rank has a program of its own."""
    torch._dynamo.reset()
    rank, texts = dist.get_rank(), []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        texts.append(graph.code)
        return make_boxed_func(graph.forward)

    def function(x: Tensor) -> Tensor:
        ops = [p2p.P2POp(dist.isend, x * 2, 1 - rank), p2p.P2POp(dist.irecv, torch.empty_like(x), 1 - rank)]
        sent, got = p2p.batch_isend_irecv(ops if rank == 0 else ops[::-1])[:: 1 if rank == 0 else -1]
        return sent + got * 3

    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    pairs = list(zip(exchanges.both(compiled, exchanges.shard()), exchanges.both(function, exchanges.shard()), strict=True))
    return texts[0], all(torch.allclose(*pair) for pair in pairs)


def test_ranks_by_number_are_part_of_the_program(pool: Pools) -> None:
    (zero, right), (one, also) = pool(2).run(run_alone)
    assert right and also
    assert "rank 1" in zero and "rank 0" in one and zero != one


def run_counted(backend: str) -> bool:
    """How many rows go where is data."""
    torch._dynamo.reset()
    mesh, rank = sw.init_mesh(ep=2), dist.get_rank()

    def function(x: Tensor, counts: Tensor) -> Tensor:
        return p2p.all_to_all_v(x.sin(), counts, mesh=mesh).cos() * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for counts in (torch.tensor([1 + rank, 2]), torch.tensor([0, 3 - rank])):
            x = torch.randn(int(counts.sum()), 3, requires_grad=True)
            (one,), (other,) = ([torch.autograd.grad(f(x, counts).square().sum(), x)[0]] for f in (compiled, function))
            if not torch.allclose(one, other):
                return False
    return True


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rows_by_data(pool: Pools, backend: str) -> None:
    assert pool(2).run(run_counted, backend) == [True, True]


def run_captured() -> bool:
    mesh = sw.init_mesh(pp=2)
    return all(
        torch.allclose(sw.capture(function)(exchanges.shard().detach()), function(exchanges.shard().detach()))
        for function in exchanges.functions(mesh).values()
    )


def test_captured(pool: Pools) -> None:
    assert pool(2).run(run_captured) == [True, True]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch asks tensors for no key, and nothing is kept")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_warm_cache_serves_every_rank(ranks: int, tmp_path: Path) -> None:
    program = Path(exchanges.__file__)
    cold, warm = (run(ranks, ranks, tmp_path, seed, program) for seed in ("1", "2"))
    assert all(report["right"] for report in (*cold, *warm)) and len(cold) == len(warm) == ranks
    for report in warm:
        assert report["autograd_cache_hit"] == 3 and "autograd_cache_miss" not in report, report
