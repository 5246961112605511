"""Random programs, compiled and captured as one graph each, mean what they mean operator by operator, forward and backward.

SHARDWISE_COMPILED=1000 tries more of them. Compiling one to machine code takes some seconds: of these there are fewer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from torch import Tensor

import shardwise as sw
from tests.conftest import SEED
from tests.helpers.one_device import distributed
from tests.helpers.random_programs import MESHES_OF, describe, programs, run, same_everywhere

COUNT = int(os.environ.get("SHARDWISE_COMPILED", "8"))


def results(function: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
    """The values of a program and the gradients of its inputs, as plain tensors."""
    spread = [x.detach().clone().requires_grad_() for x in inputs]
    values = function(*spread)
    scale = 1.0 + sum(float(v.detach().full_tensor().abs().max()) if v.numel() else 0.0 for v in values)
    sum(v.square().sum() / scale for v in values).backward()
    grads = [x.grad.full_tensor() for x in spread if x.grad is not None]
    return [v.detach().full_tensor() for v in values] + grads


def check(program: Any, place: Callable[..., Any], backend: str) -> None:
    axes, inputs, layouts, steps = program
    mesh = sw.init_mesh(**axes)
    spread = [place(x, mesh, p) for x, p in zip(inputs, layouts, strict=True)]

    def function(*values: Any) -> list[Any]:
        return run(steps, list(values))[len(values) :]

    if not steps:
        return
    want = results(function, spread)
    torch._dynamo.reset()
    for how in (torch.compile(function, backend=backend, fullgraph=True), sw.capture(function)):
        got = results(how, spread)
        assert len(got) == len(want)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-3, equal_nan=True, msg=lambda m, i=i: f"value {i}: {m}")


def many(count: int, meshes: list[dict[str, int]] | None, place: Callable[..., Any], backend: str = "aot_eager") -> int:
    """Run `count` programs; gives how many ran."""
    ran = []

    @seed(SEED)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs() if meshes is None else programs(meshes))
    def one(program: Any) -> None:
        note(describe(*program))
        if meshes is not None:
            same_everywhere(program)
        check(program, place, backend)
        ran.append(program)

    one()
    return len(ran)


def on_this_rank(ranks: int, count: int) -> int:
    return many(count, MESHES_OF[ranks], sw.distribute_tensor)


def test_programs_in_a_simulated_world() -> None:
    assert many(COUNT, None, distributed) >= COUNT


@pytest.mark.parametrize("count", [2, pytest.param(2 * COUNT, marks=pytest.mark.slow)])
def test_programs_compiled_to_machine_code(count: int) -> None:
    assert many(count, None, distributed, "inductor") >= count


@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_on_processes(ranks: int, pool: Any) -> None:
    count = COUNT // 4
    assert pool(ranks).run(on_this_rank, ranks, count, timeout=60.0 * count) == [count] * ranks
