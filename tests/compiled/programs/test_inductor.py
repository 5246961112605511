"""What Inductor makes of moves between layouts, and of programs that need them, gives what they give operator by operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from shardwise import Bundle, Mesh, Shard
from shardwise.layouts.layout import Layout
from shardwise.redistribution.run import move
from tests.helpers.layout_moves import layouts, most, pairs, spread

MESHES = [Mesh(("a",), (3,), range(3), "cpu", "simulated"), Mesh(("a", "b"), (2, 2), range(4), "cpu", "simulated")]


def moved(shards: list[Tensor], have: Layout, want: Layout) -> list[Tensor]:
    """What every rank holds after a move, from what it holds before it."""
    found: Any = move(Bundle(shards), have, want)
    return [shard * 2 for shard in found.shards]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_moves_take_parts_of_tensors_by_no_offset_into_memory(mesh: Mesh) -> None:
    """Where Inductor elides a copy of a slice, it takes an offset into the copy (of `as_strided`) for one into the whole."""
    for have, want in pairs(layouts((6, 4), mesh), most(30)):
        graph = make_fx(lambda *shards, pair=(have, want): moved(list(shards), *pair))(*spread(have).shards).graph
        names = {str(node.target) for node in graph.nodes}
        assert not [name for name in names if "as_strided" in name or "unfold" in name], f"{have} → {want}: {names}"


def compare(chosen: list[tuple[Layout, Layout]]) -> None:
    """Compile all these moves as one program, each of a computed value, and compare what they give."""
    ranks = len(chosen[0][0].mesh.ranks)

    def every(*flat: Tensor) -> list[Tensor]:
        before = [[shard + 1 for shard in flat[i : i + ranks]] for i in range(0, len(flat), ranks)]
        return [shard for shards, pair in zip(before, chosen, strict=True) for shard in moved(shards, *pair)]

    flat = [shard for have, _ in chosen for shard in spread(have).shards]
    got = torch.compile(make_fx(every)(*flat))(*flat)
    for i, (one, other) in enumerate(zip(got, every(*flat), strict=True)):
        assert torch.equal(one, other), f"{chosen[i // ranks]}, place {i % ranks}: {one}, not {other}"


def test_moves_compiled_to_machine_code() -> None:
    compare(pairs(layouts((6, 4), MESHES[0]), 8))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_many_moves_compiled_to_machine_code(mesh: Mesh) -> None:
    chosen = pairs(layouts((6, 4), mesh, ("sum", "max")), most(240))
    for i in range(0, len(chosen), 30):
        compare(chosen[i : i + 30])


class Attention(nn.Module):
    """torch's own attention behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


def test_attention_of_torch_with_its_heads_on_two_ranks() -> None:
    """The one matrix for queries, keys and values is sharded across them: their gradients are exchanged."""
    torch.manual_seed(0)
    mesh, dense, x = sw.init_mesh(tp=2), Attention(), torch.randn(2, 6, 8)
    model = copy.deepcopy(dense)
    cuts = {"in_proj_weight": Shard(0), "in_proj_bias": Shard(0), "out_proj.weight": Shard(1)}
    for name, p in list(model.attention.named_parameters()):
        owner, _, last = name.rpartition(".")
        cut = {"tp": cuts[name]} if name in cuts else {}
        setattr(model.attention.get_submodule(owner), last, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, cut)))
    dense(x).square().sum().backward()
    torch.compile(model)(sw.distribute_tensor(x, mesh)).square().sum().backward()
    for (name, p), want in zip(model.named_parameters(), dense.parameters(), strict=True):
        got = p.grad.full_tensor() if isinstance(p.grad, sw.DTensor) else p.grad
        torch.testing.assert_close(got, want.grad, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
