"""A decoder as people write them today (RMSNorm, rotary embedding, grouped queries, SwiGLU, a cache of keys and values) trains
and generates as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

WIDTH, HEADS, GROUPS, SIZE, VOCAB = 16, 4, 2, 4, 23


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotary position embedding on [batch, heads, length, size]."""
    angles = torch.outer(torch.arange(start, start + x.shape[2]).float(), 0.1 ** torch.arange(SIZE // 2).float())
    cos, sin = angles.cos(), angles.sin()
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, HEADS * SIZE, bias=False), nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor, past: list[Any] | None) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        start = past[0].shape[2] if past else 0
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past[:] = [k, v]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Block(), Block()]), nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, past: list[list[Any]] | None = None) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, past[i] if past is not None else None)
        return F.linear(self.norm(x), self.embed.weight)


ROWS, COLUMNS = ("q", "k", "v", "gate", "up", "embed"), ("o", "down")


def distribute(model: nn.Module, mesh: sw.Mesh) -> nn.Module:
    for name, p in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        kind = owner.rpartition(".")[2]
        how = {"tp": Shard(0)} if kind in ROWS else {"tp": Shard(1)} if kind in COLUMNS else {}
        setattr(model.get_submodule(owner), leaf, nn.Parameter(sw.distribute_tensor(p.data, mesh, how)))
    return model


def models(mesh: sw.Mesh) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense, spread = Decoder(), Decoder()
    spread.load_state_dict(dense.state_dict())
    return dense, distribute(spread, mesh)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 1, "tp": 4}], ids=str)
def test_training(axes: dict[str, int]) -> None:
    mesh = sw.init_mesh(**axes)
    pair = models(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True) for m in pair]
    for _ in range(4):
        losses = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            given = tokens() if model is pair[0] else sw.distribute_tensor(tokens(), mesh, {"dp": Shard(0)})
            optimizer.zero_grad()
            for part in given.chunk(2):  # gradients accumulate over two parts
                loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), label_smoothing=0.1)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        torch.testing.assert_close(q.detach().full_tensor(), p.detach(), atol=2e-4, rtol=1e-3)


def generate(model: nn.Module, prompt: Tensor) -> Tensor:
    past: list[list[Any]] = [[], []]
    seen, step = prompt, prompt
    for _ in range(5):
        step = model(step, past)[:, -1].argmax(-1, keepdim=True)
        seen = torch.cat([seen, step], 1)
    return seen


def test_generation() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    dense, spread = models(mesh)
    with torch.inference_mode():
        want = generate(dense, tokens())
        got = generate(spread, sw.distribute_tensor(tokens(), mesh, {"dp": Shard(0)}))
    assert torch.equal(got.full_tensor(), want)
