"""On a GPU: a package exported without a job gives on one rank what the model gives. Skipped where there is no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.__version__ < "2.12", reason="torch 2.11 crashes on loading its own AOTInductor packages on a GPU"
    ),
]


class Model(nn.Module):
    """A block with an embedding whose table is sharded, and operators that Inductor does not lower."""

    def __init__(self, mesh: sw.Mesh) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(32, 16), nn.Linear(16, 64), nn.LayerNorm(64)
        self.experts = nn.Parameter(torch.randn(4, 64, 16))
        self.register_buffer("table", torch.arange(64.0), persistent=False)
        for name, parameter in list(self.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            cut = {"tp": Shard(0)} if owner != "norm" else {}
            spread = sw.distribute_tensor(parameter.detach().cuda(), mesh, cut)
            setattr(self.get_submodule(owner), leaf, nn.Parameter(spread))
        self.table = self.table.cuda()

    def forward(self, tokens: Any, image: Any, offsets: Any) -> tuple[Any, ...]:
        x = self.norm(F.gelu(self.up(self.embed(tokens)))) + self.table
        rows = x.flatten(0, 1)
        grouped = F.grouped_mm(rows.bfloat16(), self.experts.bfloat16(), offs=offsets)
        return x, grouped, F.max_pool2d(image, 2, return_indices=True), F.dropout(image, 0.5), image.cumsum(0)


def placed(mesh: sw.Mesh) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = Model(mesh)
    tokens, image = torch.randint(32, (4, 8), device="cuda"), torch.randn(2, 4, 8, 8, device="cuda")
    offsets = torch.tensor([8, 8, 24, 32], dtype=torch.int32, device="cuda")
    cuts = ({"dp": Shard(0)}, {"dp": Shard(0)}, {})
    given = zip((tokens, image, offsets), cuts, strict=True)
    return model, tuple(sw.distribute_tensor(x, mesh, cut) for x, cut in given)


def leaves(value: Any) -> list[torch.Tensor]:
    return [x for item in value for x in leaves(item)] if isinstance(value, tuple) else [value.full_tensor()]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    mesh = sw.init_mesh(dp=1, tp=1, device="cuda")
    model, inputs = placed(mesh)
    sw.export(model, inputs, mesh, path)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, inputs = placed(sw.init_mesh(dp=1, tp=1))
        program = sw.load_package(path, model)
        torch.manual_seed(1)
        found = leaves(program(*inputs))
        torch.manual_seed(1)
        with torch.no_grad():
            want = leaves(model(*inputs))
        torch.testing.assert_close(found, want, atol=1e-2, rtol=1e-2)
        moved = torch.empty(2 * 4 * 8 * 8 + 1, device="cuda")[1:].view(2, 4, 8, 8).copy_(inputs[1].to_local())
        odd = sw.distribute_tensor(moved, program.mesh, {"dp": Shard(0)})  # memory that vectors do not start at
        torch.testing.assert_close(leaves(program(inputs[0], odd, inputs[2]))[2], want[2])
        with pytest.raises(sw.OperatorError, match=re.escape("input tokens is a DTensor i64[4@dp, 8] in this package")):
            program(inputs[1], inputs[1], inputs[2])
    finally:
        dist.destroy_process_group()
