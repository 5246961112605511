"""Models with batch norm, in channels_last and under autocast, compiled or not, give what they give on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Shard

MESH = sw.init_mesh(dp=2, tp=2)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.AdaptiveAvgPool2d(2)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1))


def spread(model: nn.Module) -> nn.Module:
    """The same model with its weights sharded along dim 0 over tp, and the rest, buffers too, replicated."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            cut = {"tp": Shard(0)} if p is not None and p.ndim > 1 else {}
            module._parameters[name] = None if p is None else nn.Parameter(sw.distribute_tensor(p.detach(), MESH, cut))
        for name, b in list(module._buffers.items()):
            module._buffers[name] = None if b is None else sw.distribute_tensor(b, MESH)
    return model


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def run(model: nn.Module, call: Callable[[Any], Any], x: Any) -> list[Any]:
    """Two steps: the last value, the gradients and the buffers."""
    for _ in range(2):
        y = call(x)
        if model.training:
            y.float().square().mean().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def compiled(backend: str, function: Any) -> Any:
    torch._dynamo.reset()
    return function if backend == "none" else torch.compile(function, backend=backend)


BACKENDS = ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("form", "train"),
    [
        (torch.channels_last, True),
        (torch.contiguous_format, False),
        pytest.param(torch.channels_last, False, marks=pytest.mark.slow),
        pytest.param(torch.contiguous_format, True, marks=pytest.mark.slow),
    ],
    ids=["channels_last-train", "contiguous-eval", "channels_last-eval", "contiguous-train"],
)
def test_batch_norm_and_memory_formats(backend: str, form: torch.memory_format, train: bool) -> None:
    dense = convolutions().to(memory_format=form).train(train)
    x = torch.randn(4, 4, 6, 6).to(memory_format=form)
    model = spread(dense)
    want = run(dense, dense, x)
    got = run(model, compiled(backend, model), sw.distribute_tensor(x, MESH, {"dp": Shard(0)}))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(whole(one), whole(other), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [perceptron, convolutions])
def test_autocast(backend: str, make: Callable[[], nn.Module]) -> None:
    dense = make()
    x = torch.randn(4, 6) if make is perceptron else torch.randn(4, 4, 6, 6)
    model = spread(dense)

    def cast(model: nn.Module) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return function

    want = run(dense, cast(dense), x)
    got = run(model, compiled(backend, cast(model)), sw.distribute_tensor(x, MESH, {"dp": Shard(0)}))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(whole(one).float(), whole(other).float(), atol=2e-2, rtol=5e-2)
