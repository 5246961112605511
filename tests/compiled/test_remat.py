"""Blocks of `remat` in compiled and captured programs: gradients bit for bit those without it, and what is kept is what the
policy says."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import shardwise as sw
from shardwise import Shard, save
from shardwise.compiled.nodes import is_view
from shardwise.compiled.remat import remat
from tests.compiled.functions import fake_job

Axes = dict[str, int]
AXES: list[Axes] = [{}, {"tp": 2}, {"dp": 2, "tp": 2}]


def gelus(op: Any, args: Any, made: save.Made) -> str:
    return "must_save" if "gelu" in made.operator else "recompute"


POLICIES = {
    "nothing": save.nothing,
    "everything": save.everything,
    "matmuls": save.matmuls,
    "matmuls and collectives": save.matmuls | save.collectives,
    "default": save.default,
    "small matmuls": save.matmuls & save.up_to(1600),
    "a function": save.by(gelus),
}


class Block(nn.Module):
    """Attention, a feed-forward part, dropout after each."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), 0.25)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.25)


CUT = {"query": 0, "key": 0, "value": 0, "up": 0, "out": 1, "down": 1}


class Model:
    """Blocks whose parameters are cut by tp, and a batch that is cut by dp; plain tensors without axes."""

    def __init__(self, axes: Axes, policy: save.Policy | None, layers: int = 1, rows: int = 4, length: int = 6) -> None:
        torch.manual_seed(0)
        self.policy, self.blocks, self.x = policy, nn.ModuleList(Block() for _ in range(layers)), torch.randn(rows, length, 16)
        mesh = sw.init_mesh(**axes) if axes else None
        for name, p in list(self.blocks.named_parameters()) if mesh is not None else ():
            owner, _, leaf = name.rpartition(".")
            dim = CUT.get(owner.rpartition(".")[2])
            placements = {} if dim is None or dim >= p.ndim or "tp" not in axes else {"tp": Shard(dim)}
            spread = nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placements))
            setattr(self.blocks.get_submodule(owner), leaf, spread)
        if mesh is not None:
            self.x = sw.distribute_tensor(self.x, mesh, {"dp": Shard(0)} if "dp" in axes else {})
        self.x.requires_grad_()

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.policy is None else remat(block, x, save=self.policy)
        return x.square().mean()

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        loss.backward()
        return loss

    def values(self, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What a function gives for a loss, and the gradients, from the same seed."""
        torch.manual_seed(1)
        loss = function(self.x)
        if self.x.grad is None:
            loss.backward()
        return [whole(t) for t in (loss.detach(), *(t.grad for t in (self.x, *self.blocks.parameters())))]


def whole(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, sw.DTensor) else t


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def compiled(backend: str, axes: Axes, policy: save.Policy | None) -> list[Tensor]:
    torch._dynamo.reset()
    model = Model(axes, policy)
    return model.values(torch.compile(model.loss, backend=backend, fullgraph=True))


@functools.cache
def expected(how: str, axes: tuple[tuple[str, int], ...]) -> list[Tensor]:
    """The same without remat."""
    if how in ("step", "loss"):
        model = Model(dict(axes), None)
        return model.values(sw.capture(getattr(model, how)))
    return compiled(how, dict(axes), None)


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_compiled_gradients_are_the_same(name: str, axes: Axes) -> None:
    assert same(compiled("aot_eager", axes, POLICIES[name]), expected("aot_eager", tuple(axes.items())))


@pytest.mark.parametrize("axes", AXES[1:], ids=str)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("how", ["loss", "step"])
def test_captured_gradients_are_the_same(how: str, name: str, axes: Axes) -> None:
    """Of a function whose backward is a program of its own, and of one with the backward inside."""
    model = Model(axes, POLICIES[name])
    assert same(model.values(sw.capture(getattr(model, how))), expected(how, tuple(axes.items())))


@pytest.mark.parametrize(("name", "axes"), [("default", {}), ("matmuls and collectives", {"tp": 2})])
def test_gradients_by_machine_code_are_the_same(name: str, axes: Axes) -> None:
    assert same(compiled("inductor", axes, POLICIES[name]), expected("inductor", tuple(axes.items())))
