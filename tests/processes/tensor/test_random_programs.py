"""Random programs on Gloo: every rank draws the same programs from one seed, runs them, and compares with one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import shardwise as sw
from tests.conftest import SEED
from tests.helpers.random_programs import MESHES_OF, programs, run, same_everywhere


def check(program: Any) -> None:
    same_everywhere(program)
    axes, inputs, layouts, steps = program
    mesh = sw.init_mesh(**axes)
    dense = [x.clone().requires_grad_() for x in inputs]
    spread = [sw.distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(inputs, layouts, strict=True)]
    want, got = run(steps, dense), run(steps, spread)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), atol=1e-4, rtol=1e-4, equal_nan=True)
    scale = 1.0 + sum(float(v.detach().abs().max()) if v.numel() else 0.0 for v in want)
    sum(v.square().sum() / scale for v in want).backward()
    sum(v.square().sum() / scale for v in got).backward()
    for x, y in zip(spread, dense, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, atol=2e-4, rtol=2e-3)


def many(ranks: int, count: int) -> int:
    """Run `count` programs on this rank; gives how many ran."""
    ran = []

    @seed(SEED)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(MESHES_OF[ranks]))
    def one(program: Any) -> None:
        check(program)
        ran.append(program)

    one()
    return len(ran)


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_programs_on_processes(ranks: int, pool: Any) -> None:
    assert pool(ranks).run(many, ranks, 30) == [30] * ranks
