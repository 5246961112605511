"""Threads share interned values and caches: each trains as it would alone."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Mesh, Replicate, Shard
from shardwise.base.caches import cache_clear, memo
from shardwise.layouts.from_placements import make_layout
from shardwise.layouts.text import form_of

THREADS = 8


@contextmanager
def hurried() -> Iterator[None]:
    """Python changes between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(function: Callable[[int], Any]) -> list[Any]:
    """What a function gives for each number in a thread of its own, all begun at once."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> Any:
        start.wait()
        return function(number)

    with hurried(), ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


# ── training ──


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(number: int) -> list[Tensor]:
    """The weights after three steps of tensor and data parallel training, on a mesh of this thread's own."""
    width, make = 8 + 4 * (number % 3), torch.Generator().manual_seed(number)
    mesh = sw.init_mesh(dp=2, tp=2, ranks=[(rank + number) % 4 for rank in range(4)])
    model = Block(width)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=make) / 4
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        cut: Any = {"up": Shard(0), "down": Shard(1) if leaf == "weight" else Replicate()}.get(owner, Replicate())
        setattr(model.get_submodule(owner), leaf, nn.Parameter(sw.distribute_tensor(parameter.data, mesh, {"tp": cut})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        x = sw.distribute_tensor(torch.randn(4 + number, width, generator=make), mesh, {"dp": Shard(0)})
        optimizer.zero_grad()
        F.mse_loss(model(x), x.detach().flip(0)).backward()
        optimizer.step()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


def check_training(runs: int) -> None:
    alone = [trained(number) for number in range(THREADS)]
    for _ in range(runs):
        cache_clear()
        for got, want in zip(together(trained), alone, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_eight_threads_train_as_one() -> None:
    check_training(2)


@pytest.mark.slow
def test_eight_threads_train_as_one_again_and_again() -> None:
    check_training(20)


# ── interned values and caches ──


def test_equal_values_made_at_once_are_one_object() -> None:
    for turn in range(60):
        ranks = [(rank + turn) % 12 for rank in range(12)]

        def made(_: int, turn: int = turn, ranks: list[int] = ranks) -> tuple[Any, ...]:
            mesh = Mesh((f"a{turn}", "b"), (4, 3), ranks, "cpu", "simulated")
            layout = make_layout((turn + 1, 7), mesh, [Shard(0), Shard(1)])
            return mesh, mesh["b"], layout, form_of(layout), pickle.loads(pickle.dumps(layout)), Mesh.read(mesh.text)

        found = together(made)
        for values in zip(*found, strict=True):
            assert len(set(map(id, values))) == 1, values[0]
        assert found[0][2] is found[0][4] and found[0][0] is found[0][5]


def test_a_full_cache_takes_what_threads_bring() -> None:
    @memo("of threads", limit=5)
    def square(n: int) -> int:
        return n * n

    def asked(number: int) -> bool:
        return all(square(n % 17 + number) == (n % 17 + number) ** 2 for n in range(3000))

    assert all(together(asked))
    assert sw.cache_info()["of threads"].size <= 5


def test_caches_are_emptied_under_threads_that_use_them() -> None:
    def used(number: int) -> Tensor:
        mesh, total = sw.init_mesh(tp=2), torch.zeros(())
        for size in range(2, 30):
            total += (
                sw.ones(size, 3 + number, mesh=mesh, placements=[Shard(0)]).redistribute(placements=[Shard(1)]).sum().item()
            )
            if number == 0:
                cache_clear()
        return total

    for number, total in enumerate(together(used)):
        assert total == sum(range(2, 30)) * (3 + number)
