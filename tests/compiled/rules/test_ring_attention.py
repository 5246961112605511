"""Ring attention in traced programs: in one graph, the same on every rank, with the values and gradients of dense attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import shardwise as sw
from shardwise import Shard, remat, save
from shardwise._torch.compiler import local_graphs
from tests.helpers.compiled_functions import fake_job
from tests.helpers.ring_attention import dense, same, tensors

WORDS = {"is_causal": True, "enable_gqa": True}


def attention(*given: Any) -> Any:
    return sw.ring_attention(*(x * 1 for x in given), **WORDS)


def rematted(*given: Any) -> Any:
    return remat(attention, *given, save=save.default)


def run(function: Any, length: int, axes: dict[str, int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    given, mesh = tensors(length, heads=(4, 2), dtype=dtype), sw.init_mesh(**axes)
    cuts = [Shard(1), Shard(2)][-len(axes) :]
    spread = [sw.distribute_tensor(x, mesh, cuts).requires_grad_() for x in given]
    out = function(*spread)
    (out * out.detach().cos()).sum().backward()
    return [out.detach().full_tensor(), *(x.grad.full_tensor() for x in spread)]


def compare(cases: list[tuple[str, int, dict[str, int]]], function: Any = attention) -> int:
    for backend, length, axes in cases:
        torch._dynamo.reset()
        made = sw.capture(function) if backend == "captured" else torch.compile(function, backend=backend, fullgraph=True)
        same(run(made, length, axes), dense(tensors(length, heads=(4, 2)), **WORDS))
    return len(cases)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("inductor", 16, {"sp": 2})]),
        (4, [("aot_eager", 16, {"sp": 4}), ("captured", 13, {"tp": 2, "sp": 2})]),
        pytest.param(4, [("inductor", n, {"sp": 4}) for n in (16, 13)], marks=pytest.mark.slow),
    ],
    ids=["2", "4", "4 with Inductor"],
)
def test_value_and_gradients(ranks: int, cases: Any, pool: Any) -> None:
    assert pool(ranks).run(compare, cases, timeout=600) == [len(cases)] * ranks


def test_in_a_simulated_world() -> None:
    compare([("aot_eager", 13, {"sp": 2})])


def graphs(function: Any, rank: int) -> list[str]:
    """The local graphs of a function on a rank of four, forward and backward, as text without comments, which count blocks."""
    found: list[str] = []

    def keep(part: str, gm: GraphModule) -> Any:
        found.append(re.sub(r"#.*", "", f"{part} {gm.print_readable(print_output=False)}"))
        return lambda given: gm(*given)

    with fake_job(rank, 4):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=lambda gm, given: local_graphs(gm, given, keep), fullgraph=True)
        run(compiled, 16, {"sp": 4})
    return found


@pytest.mark.parametrize("function", [attention, rematted], ids=["itself", "remat"])
def test_graphs_are_the_same_on_every_rank_and_send_as_stated(function: Any) -> None:
    first, last = graphs(function, 0), graphs(function, 3)
    assert first == last
    assert [text.count("shardwise.messages.default") for text in first] == [3, 6]
