"""Random programs: expressions of 5 to 15 operators on random layouts mean, forward and backward, what they mean on one device.

A program is a list of steps over a growing pool of values; hypothesis draws it, so a failure shrinks to a small program. The
number of programs and the seed can be set: SHARDWISE_PROGRAMS=2000 SHARDWISE_SEED=7.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, note, seed, settings

import shardwise as sw
from shardwise import DTensor
from tests.conftest import PROGRAMS, SEED
from tests.helpers.one_device import distributed, equal
from tests.helpers.random_programs import describe, programs, run


def check(program: Any) -> None:
    axes, inputs, layouts, steps = program
    note(describe(axes, inputs, layouts, steps))
    mesh = sw.init_mesh(**axes)
    dense = [x.clone().requires_grad_() for x in inputs]
    spread = [distributed(x, mesh, p).requires_grad_() for x, p in zip(inputs, layouts, strict=True)]
    want, got = run(steps, dense), run(steps, spread)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert isinstance(one, DTensor)
        equal(one, other.detach(), f"v{i}")
    scale = 1.0 + sum(float(v.detach().abs().max()) if v.numel() else 0.0 for v in want)
    sum(v.square().sum() / scale for v in want[len(inputs) :] or want).backward()
    sum(v.square().sum() / scale for v in got[len(inputs) :] or got).backward()
    for i, (x, y) in enumerate(zip(spread, dense, strict=True)):
        if y.grad is None:
            assert x.grad is None
            continue
        assert x.grad.layout.placements == x.layout.reduced().placements
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, atol=2e-4, rtol=2e-3, msg=lambda m, i=i: f"v{i}.grad: {m}")


@seed(SEED)
@settings(
    max_examples=PROGRAMS, deadline=None, database=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)
@given(programs())
def test_random_programs_mean_what_one_device_means(program: Any) -> None:
    check(program)
