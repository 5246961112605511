"""On a GPU: captured and compiled programs mean what they mean operator by operator. Skipped where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Mesh, Shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def losses(mesh: Mesh, how: str) -> list[float]:
    """The losses of three steps of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)).cuda()
    for (name, parameter), dim in zip(list(model.named_parameters()), (0, 0, None, None, 1, None), strict=True):
        owner, _, leaf = name.rpartition(".")
        spread = sw.distribute_tensor(parameter.detach(), mesh, {} if dim is None else {"tp": Shard(dim)})
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(spread))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    x = sw.distribute_tensor(torch.randn(8, 16, device="cuda"), mesh, {"dp": Shard(0)})
    target = sw.distribute_tensor(torch.arange(8, device="cuda"), mesh, {"dp": Shard(0)})

    def loss(x: Any, target: Any) -> Any:
        return F.cross_entropy(F.dropout(model(x), 0.1), target)

    step: Any = optimizer.step
    if how == "captured":
        loss, step = sw.capture(loss), sw.capture(step)
    elif how == "compiled":
        loss, step = sw.compile(loss, fullgraph=True), sw.compile(step)
    found = []
    for _ in range(3):
        value = loss(x, target)
        value.backward()
        step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("how", ["captured", "compiled"])
def test_training(mesh: Mesh, how: str) -> None:
    torch._dynamo.reset()
    want = losses(mesh, "eager")
    torch.testing.assert_close(torch.tensor(losses(mesh, how)), torch.tensor(want), atol=1e-3, rtol=1e-3)
