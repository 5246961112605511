"""What must be the same on every rank, and is not: seeds of random numbers, and plain tensors in debug mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Shard


def attempt(call: Callable[[], Any]) -> str:
    try:
        found = call()
        return "right" if found is None or found is True else str(found)
    except sw.ShardwiseError as error:
        return f"{type(error).__name__}: {error}"


def differs(seed: Callable[[], Any], draw: Callable[[], Any]) -> str:
    seed()
    return attempt(lambda: (draw(), None)[1])


def run_seeds() -> list[str]:
    mesh, part = sw.init_mesh(dp=2, tp=2), sw.init_mesh(tp=2, ranks=[1, 2])
    rank = dist.get_rank()
    x = sw.ones(8, 8, mesh=mesh, placements={"tp": Shard(0)})
    compiled = torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend="aot_eager")
    torch.manual_seed(3)
    want = compiled(x).full_tensor()
    draws: list[Callable[[], Any]] = [
        lambda: sw.rand(4, mesh=mesh),
        lambda: nn.functional.dropout(x, 0.5),
        lambda: nn.init.normal_(x.clone()),
        lambda: torch.poisson(x),
        lambda: compiled(x),
    ]
    found = [differs(lambda: torch.manual_seed(rank), draw) for draw in draws]
    found += [differs(lambda step=step: torch.manual_seed(rank % 2 if step else 7), draws[0]) for step in range(2)]
    found += [differs(lambda: None, lambda: x.clone().normal_(generator=torch.Generator().manual_seed(rank)))]
    torch.manual_seed(rank)
    found += [attempt(lambda: sw.rand(4, mesh=part) is None)] if rank in (1, 2) else [found[0]]
    torch.manual_seed(3)  # after such errors all goes on
    again = compiled(x).full_tensor()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, _ = sw.rand(4, mesh=mesh), sw.rand(4, mesh=mesh)
    torch.set_rng_state(state)
    assert torch.equal(sw.rand(4, mesh=mesh).full_tensor(), first.full_tensor())
    return [*found, attempt(lambda: torch.equal(again, want))]


def test_ranks_that_seed_differently_raise(pool: Any) -> None:
    for texts in pool(4).run(run_seeds):
        *wrong, fine, one_more, generator, other, after = texts
        for text in (*wrong, one_more, generator, other):
            assert text.startswith("WorldError: random numbers on mesh") and "seed alike" in text, texts
        assert fine == after == "right"
        assert "  rank 0: seed 0, random call 0\n  rank 1: seed 1, random call 0\n" in wrong[0]


def run_plain() -> list[str]:
    mesh = sw.init_mesh(dp=2, tp=2)
    x = sw.ones(8, 4, mesh=mesh, placements={"dp": Shard(0)})
    torch.manual_seed(dist.get_rank())
    adapter = nn.Linear(4, 4)
    torch.manual_seed(0)
    same = nn.Linear(4, 4)

    def checked(call: Callable[[], Any]) -> str:
        def inside() -> None:
            with sw.debug_mode(timeout=20):
                call()

        return attempt(inside)

    return [
        checked(lambda: nn.functional.linear(x, adapter.weight)),
        checked(lambda: same(x)),
        checked(lambda: torch.cat([x, adapter.bias[None]])),
        checked(lambda: x.mul_(adapter.bias.detach())),
        checked(lambda: sw.rand(4, mesh=mesh)),
    ]


def test_plain_tensors_that_differ_are_found_in_debug_mode(pool: Any) -> None:
    replies = pool(4).run(run_plain)
    assert all(texts == replies[0] for texts in replies)
    weight, same, cat, inplace, drawn = replies[0]
    assert same == drawn == "right"
    for text, name in ((weight, "aten.mm"), (cat, "aten.cat"), (inplace, "aten.mul_")):
        assert text.startswith("MismatchError"), text
        assert all(word in text for word in (name, "test_agreement.py", "plain tensor")), text
        assert "They differ in values that must be the same on every rank" in text
