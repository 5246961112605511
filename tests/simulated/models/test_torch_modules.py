"""Modules and optimizers of torch, unmodified, train as on one device: parameters, buffers and losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Shard

MESH = sw.init_mesh(dp=2, tp=2)
Cut = Callable[[str, Tensor], dict[str, Any]]
BATCH: dict[str, Any] = {"dp": Shard(0)}


class Experts(nn.Module):
    """Two of four experts for each row, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) * 0.3), nn.Parameter(torch.randn(4, 16, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).topk(2, -1)
        gate = (F.one_hot(chosen, 4).float() * best.unsqueeze(-1)).sum(-2)
        y = torch.einsum("beh,ehd->bed", torch.einsum("bd,edh->beh", x, self.up).relu(), self.down)
        return (y * gate.unsqueeze(-1)).sum(1)


def whole(name: str, p: Tensor) -> dict[str, Any]:
    return {}


def rows(name: str, p: Tensor) -> dict[str, Any]:
    return {"tp": Shard(0)}


def by_data(name: str, p: Tensor) -> dict[str, Any]:
    return {"dp": Shard(0)}


def feed_forward(name: str, p: Tensor) -> dict[str, Any]:
    return {"tp": Shard(0)} if "linear1" in name else {"tp": Shard(1)} if name == "linear2.weight" else {}


def experts(name: str, p: Tensor) -> dict[str, Any]:
    return {"tp": Shard(0)} if p.ndim == 3 else {}


def image_net() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Cut, dict[str, Any]]] = {
    "convolution and batch norm": (image_net, (6, 3, 8, 8), whole, BATCH),
    "lstm": (lambda: nn.LSTM(5, 6, batch_first=True), (4, 7, 5), whole, BATCH),
    "gru": (lambda: nn.GRU(5, 6, batch_first=True), (4, 7, 5), whole, BATCH),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (5, 6, 8), feed_forward, BATCH),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), (6, 4, 10), whole, BATCH),
    "fully sharded": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (6, 8), by_data, BATCH),
    "sequence sharded": (
        lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        (4, 6, 8),
        whole,
        {"dp": Shard(0), "tp": Shard(1)},
    ),
    "experts": (Experts, (6, 8), experts, BATCH),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=True),
    "nadam foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}


def spread(module: nn.Module, cut: Cut, buffers: bool) -> nn.Module:
    module = copy.deepcopy(module)
    for name, p in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(sw.distribute_tensor(p.data, MESH, cut(name, p))))
    for name, b in list(module.named_buffers()) if buffers else ():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, sw.distribute_tensor(b, MESH))
    return module


def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        y = module(x)
        loss = (y[0] if isinstance(y, tuple) else y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(dense: nn.Module, cut: Cut, x: Tensor, placed: dict[str, Any], optimizer: Any, buffers: bool = True) -> None:
    other = spread(dense, cut, buffers)
    want = train(dense, optimizer(dense.parameters()), x)
    got = train(other, optimizer(other.parameters()), sw.distribute_tensor(x, MESH, placed))
    assert got == pytest.approx(want, rel=1e-4)
    for one, two in zip((*dense.parameters(), *dense.buffers()), (*other.parameters(), *other.buffers()), strict=True):
        value = two.detach().full_tensor() if isinstance(two, DTensor) else two
        torch.testing.assert_close(value, one.detach(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    torch.manual_seed(0)
    make, shape, cut, placed = MODULES[name]
    compare(make(), cut, torch.randn(shape), placed, OPTIMIZERS["sgd"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    torch.manual_seed(0)
    compare(nn.Linear(7, 3), rows, torch.randn(5, 7), BATCH, OPTIMIZERS[name])


def test_plain_buffers_beside_distributed_parameters() -> None:
    torch.manual_seed(0)
    compare(image_net(), whole, torch.randn(6, 3, 8, 8), BATCH, OPTIMIZERS["sgd"], buffers=False)
