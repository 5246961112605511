"""A GPT block with dropout, plain and distributed, and its gradients: what tests of rematerialisation compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Mesh, Shard
from shardwise.remat.policies import Choice

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)

    def attend(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


def products(op: Any, args: Any, made: sw.save.Made) -> Choice | str:
    return Choice.MUST_SAVE if made.operator.startswith("aten.mm") else "recompute"


POLICIES = {
    "nothing": sw.save.nothing,
    "everything": sw.save.everything,
    "matmuls": sw.save.matmuls,
    "attention": sw.save.attention,
    "collectives": sw.save.collectives,
    "random": sw.save.random,
    "custom": sw.save.custom,
    "default": sw.save.default,
    "matmuls and collectives": sw.save.matmuls | sw.save.collectives,
    "small matmuls": sw.save.matmuls & sw.save.up_to(2000),
    "no matmuls": ~sw.save.matmuls,
    "operators": sw.save.operators(torch.ops.aten.gelu, "aten.native_layer_norm"),
    "region": sw.save.regions("Block*"),
    "by a function": sw.save.by(products),
}


def model_and_input(mesh: Mesh | None = None, batch: int = 4, length: int = 5) -> tuple[Block, Any]:
    """A block with heads and hidden units shard over `tp`, and an input with its batch shard over `dp`."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(batch, length, WIDTH)
    if mesh is None:
        return block, x.requires_grad_()
    for name, parameter in list(block.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        cut = {"query": 0, "key": 0, "value": 0, "up": 0, "out": 1, "down": 1}.get(owner)
        whole = cut is None or "tp" not in mesh.axes or (owner == "down" and leaf == "bias")
        placed = sw.distribute_tensor(parameter.detach(), mesh, {} if whole else {"tp": Shard(cut)})
        setattr(block.get_submodule(owner), leaf, nn.Parameter(placed))
    return block, sw.distribute_tensor(x, mesh, {"dp": Shard(0)} if "dp" in mesh.axes else {}).requires_grad_()


def plain(x: Any) -> Tensor:
    """The value of a tensor, distributed or not."""
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def gradients(model: nn.Module, x: Any, function: Callable[[Any], Any]) -> list[Tensor]:
    """What a function gives, and the gradients of its input and of a model's parameters, from the same random numbers."""
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    out = function(x)
    out.square().sum().backward()
    return [plain(out).detach(), *(plain(p.grad).detach().clone() for p in (x, *model.parameters()))]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    """Whether all are equal, bit by bit."""
    return len(got) == len(want) and all(map(torch.equal, got, want))
