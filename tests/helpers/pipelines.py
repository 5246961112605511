"""Pipelines beside the same modules on one device, in either world."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Mesh, Pipeline, Shard


def demo() -> Any:
    """The example that trains the demo's GPT in stages."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("pipeline_gpt")


def everywhere(x: Any, root: Mesh) -> Tensor:
    """The whole of a tensor that lives on some ranks, on all of them."""
    return x.detach().redistribute(root).full_tensor()


def same_gradients(pipe: Pipeline, dense: Sequence[nn.Module], about: str = "") -> None:
    for stage, twin in zip(pipe.stages, dense, strict=True):
        for (name, p), (_, q) in zip(stage.named_parameters(), twin.named_parameters(), strict=True):
            assert p.grad is not None and p.grad.layout.replace(stride=None) is p.layout.replace(stride=None), f"{about} {name}"
            torch.testing.assert_close(
                everywhere(p.grad, pipe.mesh.root), q.grad, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{about} {n}: {m}"
            )


def train_gpt(axes: dict[str, int], schedule: str, microbatches: int, steps: int) -> list[float]:
    """Steps of AdamW on the demo's GPT in stages and on one device: losses, gradients and clipped norms agree."""
    example, mesh = demo(), sw.init_mesh(**axes)
    model, count = example.untied(), axes["pp"]
    dense, stages = example.cut(model, count), example.cut(copy.deepcopy(model), count)
    placements = {"dp": Shard(0)} if "dp" in axes else None
    for index, stage in enumerate(stages if "tp" in axes else []):
        example.distribute(stage, mesh["pp"].at(index))
    pipe = sw.pipeline(stages, mesh["pp"], schedule, microbatches, placements)
    optimizers = [torch.optim.AdamW(several.parameters(), lr=1e-3) for several in (nn.ModuleList(dense), pipe)]
    losses = []
    for _, batch in zip(range(steps), example.batches(), strict=False):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        for optimizer in optimizers:
            optimizer.zero_grad()
        exact = example.loss(nn.Sequential(*dense)(tokens), targets)
        exact.backward()
        losses.append(pipe.step(tokens, target=targets, loss=example.loss).item())
        assert abs(losses[-1] - exact.item()) < 1e-5
        same_gradients(pipe, dense, f"{axes} {schedule}")
        norms = [nn.utils.clip_grad_norm_(nn.ModuleList(dense).parameters(), 0.5), pipe.clip_grad_norm_(0.5)]
        torch.testing.assert_close(norms[1].item(), norms[0].item(), atol=1e-5, rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    return losses


def perceptrons(count: int, width: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(count)]


def beside_one_device(
    dense: Sequence[nn.Module],
    mesh: Mesh,
    data: tuple[Tensor, Tensor],
    loss: Callable[..., Tensor] = F.mse_loss,
    **options: Any,
) -> Pipeline:
    """A step of a pipeline of copies, whose loss and gradients are those of one device."""
    pipe = sw.pipeline(copy.deepcopy(list(dense)), mesh["pp"], **options)
    x, target = data
    nn.ModuleList(dense).zero_grad()
    value: Any = x
    for stage in dense:
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    exact = loss(value, target)
    exact.backward()
    found = pipe.step(x, target=target, loss=loss)
    torch.testing.assert_close(found.full_tensor(), exact.detach())
    same_gradients(pipe, dense, str(options))
    return pipe
