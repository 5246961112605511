"""Stages that compile, each as one graph: the numbers of one device, and no graph but the first of each."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import shardwise as sw
from tests.helpers.pipelines import demo, perceptrons, same_gradients


def train_compiled(schedule: str) -> tuple[list[str], dict[str, int]]:
    """Two steps of the demo's GPT in compiled stages; its losses, and how many graphs there were."""
    torch._dynamo.reset()
    counters.clear()
    example, mesh = demo(), sw.init_mesh(pp=2, tp=2)
    model = example.untied()
    model.blocks = model.blocks[:2]
    dense = example.cut(model, 2)
    stages = copy.deepcopy(dense)
    for index, stage in enumerate(stages):
        example.distribute(stage, mesh["pp"].at(index))
    pipe = sw.pipeline(stages, mesh["pp"], schedule, 2, compile="aot_eager")
    losses = []
    for _, batch in zip(range(2), example.batches(), strict=False):
        tokens, targets = batch[:, :16], batch[:, 1:17]
        nn.ModuleList(dense).zero_grad()
        exact = example.loss(nn.Sequential(*dense)(tokens), targets)
        exact.backward()
        pipe.zero_grad()
        losses.append(pipe.step(tokens, target=targets, loss=example.loss).item())
        assert abs(losses[-1] - exact.item()) < 1e-5
        same_gradients(pipe, dense, schedule)
    assert not counters["graph_break"] and not any("_orig_mod" in name for name, _ in pipe.named_parameters())
    return [f"{loss:.5f}" for loss in losses], dict(counters["stats"])


def test_each_stage_is_one_graph() -> None:
    losses, stats = train_compiled("1f1b")
    assert stats["unique_graphs"] == 2 and len(losses) == 2


def test_each_rank_compiles_its_stage_alone(pool: Any) -> None:
    told = pool(4).run(train_compiled, "gpipe")
    assert [losses for losses, _ in told] == [told[0][0]] * 4
    assert [stats["unique_graphs"] for _, stats in told] == [1] * 4


def test_stages_that_are_compiled_already() -> None:
    torch._dynamo.reset()
    dense, mesh = perceptrons(2), sw.init_mesh(pp=2)
    stages = [torch.compile(stage, backend="aot_eager", fullgraph=True) for stage in copy.deepcopy(dense)]
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    F.mse_loss(nn.Sequential(*dense)(x), y).backward()
    pipe = sw.pipeline(stages, mesh["pp"], microbatches=4)
    pipe.step(x, target=y, loss=F.mse_loss)
    same_gradients(pipe, dense)
