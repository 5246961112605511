"""Pipelines on Gloo ranks: the numbers of one device, and nothing of a stage on ranks that are not in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import PipelineError, Shard
from shardwise.comm.absent import Absent
from shardwise.pipeline.schedule import SCHEDULES
from tests.helpers.pipelines import beside_one_device, perceptrons, train_gpt


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_demos_gpt_over_pp_and_tp(pool: Any, schedule: str) -> None:
    losses = pool(4).run(train_gpt, {"pp": 2, "tp": 2}, schedule, 4, 2)
    assert losses == [losses[0]] * 4


def run_cases() -> list[str]:
    told = []
    torch.manual_seed(0)
    x, y = torch.randn(20, 6), torch.randn(20, 6)
    for axes, microbatches, rows in [
        ({"pp": 4}, 4, 20),
        ({"pp": 4}, 5, 20),
        ({"dp": 2, "pp": 2}, 5, 20),
        ({"pp": 2, "dp": 2}, 1, 16),
    ]:
        placements = {"dp": Shard(0)} if "dp" in axes else None
        mesh = sw.init_mesh(**axes)
        for schedule in SCHEDULES:
            options = {"schedule": schedule, "microbatches": microbatches, "placements": placements}
            pipe = beside_one_device(perceptrons(axes["pp"]), mesh, (x[:rows], y[:rows]), **options)
            mine = mesh["pp"].coordinate(dist.get_rank())
            assert pipe.most_held == tuple(n if (i,) == mine else 0 for i, n in enumerate(pipe.schedule.alive))
            assert set(pipe.own_parameters()) == set(pipe.stages[mine[0]].parameters())
            for index, stage in enumerate(pipe.stages):
                held = {type(p.detach().to_local()) for p in stage.parameters()}
                assert held == ({Absent} if (index,) != mine else {torch.Tensor})
            told.append(repr(pipe(x[:rows])))
    return told


def test_stages_and_microbatches(pool: Any) -> None:
    told = pool(4).run(run_cases)
    assert told == [told[0]] * 4
    assert told[0][0] == "DTensor(f32[20, 6], mesh=(pp=1))" and told[0][4] == "DTensor(f32[20@dp, 6], mesh=(dp=2))"


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.linear(x).bfloat16(), x.argsort(-1)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Any, order: Any) -> Any:
        return self.drop(x.float().gather(1, order))


def run_three_of_four() -> Any:
    """Three stages on three of four ranks; the fourth is told that it has no part."""
    try:
        mesh = sw.init_mesh(pp=3, ranks=[3, 0, 1])
        dense = [*perceptrons(1), Several(), Uses()]
        pipe = sw.pipeline(copy.deepcopy(dense), mesh["pp"], microbatches=5)
    except PipelineError as error:
        return str(error)
    torch.manual_seed(1)
    x, y = torch.randn(10, 6), torch.randn(10, 6)
    F.mse_loss(dense[2](*dense[1](dense[0](x))), y).backward()
    for _ in range(2):
        pipe.zero_grad()
        with pipe.record() as run:
            pipe.step(x, target=y, loss=F.mse_loss)
    for stage, twin in zip(pipe.stages, dense, strict=True):
        for p, q in zip(stage.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.redistribute(mesh).full_tensor(), q.grad, atol=1e-2, rtol=1e-1)
    assert run.timeline.rows == ("rank 3, stage 0", "rank 0, stage 1", "rank 1, stage 2")
    order = {(span.row, span.kind, span.microbatch): span.start for span in run.timeline.spans}
    assert len(order) == 3 * 10 and order[0, "F", 0] < order[1, "F", 0] < order[2, "F", 0] < order[1, "B", 0] < order[0, "B", 0]
    return torch.rand(1).item(), sw.rand(1, mesh=mesh).item()


def test_three_stages_with_several_tensors_on_three_of_four_ranks(pool: Any) -> None:
    told = pool(4).run(run_three_of_four)
    assert told[0] == told[1] == told[3], "random numbers go on alike"
    assert "this rank is none of the 3 ranks of mesh (pp=3), and has no stage" in told[2]
