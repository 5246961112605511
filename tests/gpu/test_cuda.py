"""On a GPU: simulated ranks on one device, and one NCCL rank, mean what plain tensors mean. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)


def test_the_default_device_is_the_backends(mesh: Mesh) -> None:
    assert mesh.device == "cuda"
    assert sw.zeros(4, mesh=mesh).device.type == "cuda"


def test_redistribution(mesh: Mesh) -> None:
    x = values(5, 3)
    places = [Replicate(), Shard(0), Shard(1), Partial()]
    for have in places:
        for want in places:
            d = sw.distribute_tensor(x, mesh, [have, Replicate()]).redistribute(placements=[Replicate(), want])
            torch.testing.assert_close(d.full_tensor(), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(mesh: Mesh, dtype: torch.dtype, causal: bool) -> None:
    dense = [values(2, 4, 16, 32, dtype=dtype).mul(i + 1).requires_grad_() for i in range(3)]
    spread = [sw.distribute_tensor(t.detach(), mesh, [Shard(0), Shard(1)]).requires_grad_() for t in dense]
    with sw.communication("forbid"):
        got = F.scaled_dot_product_attention(*spread, is_causal=causal)
        got.float().square().sum().backward()
    want = F.scaled_dot_product_attention(*dense, is_causal=causal)
    want.float().square().sum().backward()
    tolerance = {"atol": 1e-4, "rtol": 1e-3} if dtype is torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(got.full_tensor(), want, **tolerance)
    for one, other in zip(spread, dense, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, **tolerance)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.linear(x, self.embed.weight)


def test_autocast(mesh: Mesh) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(16, 8).cuda()
    x = values(4, 16)
    weight = nn.Parameter(sw.distribute_tensor(dense.weight.data, mesh, {"tp": Shard(0)}))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        want = F.gelu(dense(x))
        got = F.gelu(F.linear(sw.distribute_tensor(x, mesh, {"dp": Shard(0)}), weight, dense.bias.detach()))
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), atol=2e-2, rtol=2e-2)
    got.float().sum().backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.layout is weight.layout


CUTS = {"q": 0, "k": 0, "v": 0, "up": 0, "o": 1, "down": 1, "embed": 0}


@pytest.mark.parametrize("words", [{"foreach": True}, {"fused": True}], ids=str)
def test_training(mesh: Mesh, words: dict[str, bool]) -> None:
    torch.manual_seed(0)
    dense, spread = Block().cuda(), Block().cuda()
    spread.load_state_dict(dense.state_dict())
    for name, p in list(spread.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        how = {"tp": Shard(CUTS[owner])} if owner in CUTS and (leaf == "weight" or owner == "up") else {}
        setattr(spread.get_submodule(owner), leaf, nn.Parameter(sw.distribute_tensor(p.data, mesh, how)))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, **words) for m in (dense, spread)]
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(5):
        losses = []
        for model, optimizer in zip((dense, spread), optimizers, strict=True):
            given = tokens if model is dense else sw.distribute_tensor(tokens, mesh, {"dp": Shard(0)})
            loss = F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert isinstance(spread.up.weight, DTensor)
