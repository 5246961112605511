"""The small GPT of the training-step benchmark, and its distribution by either library.

`api` is a module with `Shard`, `Replicate` and `distribute_tensor`: `torch.distributed.tensor` or `shardwise`.
Attention is written as softmax(qk)v because the peer has no CPU rule for `F.scaled_dot_product_attention`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, VOCAB, BATCH, LENGTH = 64, 4, 2, 128, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        b, t, _ = y.shape
        q, k, v = (f(y).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw) for _ in range(2))
    return tokens, targets


def placements(api: ModuleType, name: str) -> list[Any]:
    """On (dp, tp): outputs of q, k, v, up and head on tp, inputs of o and down on tp, the rest whole."""
    owner = name.split(".")[-2]
    if owner in ("q", "k", "v", "up", "head"):
        return [api.Replicate(), api.Shard(0)]
    return [api.Replicate(), api.Shard(1)] if owner in ("o", "down") else [api.Replicate(), api.Replicate()]


def distribute(model: nn.Module, api: ModuleType, mesh: Any) -> nn.Module:
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        sharded = api.distribute_tensor(parameter.detach(), mesh, placements(api, name))
        setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded))
    return model


def plain_step() -> Callable[[], None]:
    return _step(GPT(), *data(), lambda logits: logits)


def distributed_step(api: ModuleType, mesh: Any) -> Callable[[], None]:
    """The step of the distributed model: batch on dp, logits gathered over tp before the loss."""
    rows = [api.Shard(0), api.Replicate()]
    tokens, targets = (api.distribute_tensor(t, mesh, rows) for t in data())
    return _step(distribute(GPT(), api, mesh), tokens, targets, lambda logits: logits.redistribute(mesh, rows))


def _step(model: nn.Module, tokens: Any, targets: Any, gather: Callable[[Any], Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(gather(model(tokens)).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()

    return step
