"""The example's mixture of experts is the layer on one device: shard evenly and not, with experts without tokens."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from examples.moe import MoE
from shardwise import Mesh, Shard
from tests.helpers.one_device import equal

CASES = [({"ep": 2}, 8, 16), ({"ep": 4}, 8, 16), ({"dp": 2, "ep": 2}, 8, 16), ({"ep": 4}, 7, 13), ({"dp": 2, "ep": 2}, 5, 6)]
CASES += [({"ep": 4}, 3, 10), ({"ep": 4}, 2, 3)]  # ranks without experts, and without tokens


def layers(mesh: Mesh, experts: int, favourite: bool) -> tuple[MoE, MoE]:
    """The layer on one device and on a mesh; where there is a favourite, most experts have no tokens."""
    found = []
    for on in (None, mesh):
        torch.manual_seed(0)
        layer = MoE(16, 32, experts, k=2, mesh=on)
        if favourite:
            with torch.no_grad():
                layer.gate[:, 1:-1] = -10.0
        found.append(layer)
    return found[0], found[1]


@pytest.mark.parametrize("favourite", [False, True])
@pytest.mark.parametrize(("axes", "experts", "rows"), CASES)
def test_as_on_one_device(axes: dict[str, int], experts: int, rows: int, favourite: bool) -> None:
    mesh = sw.init_mesh(**axes)
    dense, spread = layers(mesh, experts, favourite)
    x = torch.randn(rows, 16).abs().requires_grad_()
    dx = sw.distribute_tensor(x.detach(), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
    y, want = spread(dx), dense(x)
    equal(y, want.detach(), "output")
    y.square().sum().backward()
    want.square().sum().backward()
    equal(dx.grad, x.grad, "gradient of the tokens")
    for (name, one), (_, other) in zip(spread.named_parameters(), dense.named_parameters(), strict=True):
        equal(one.grad, other.grad, name)


def test_only_tokens_that_move_are_sent() -> None:
    """A rank sends as many rows as it has choices of other ranks' experts, there and back."""
    mesh = sw.init_mesh(ep=2)
    dense, spread = layers(mesh, 4, favourite=False)
    x = torch.randn(8, 16)
    with torch.no_grad():
        chosen = (x @ dense.gate).topk(2).indices.view(2, -1) // 2
        with sw.trace_comm() as log:
            spread(sw.distribute_tensor(x, mesh, [Shard(0)]))
    moved = max((chosen[0] == 1).sum().item(), (chosen[1] == 0).sum().item())
    rows = [record.bytes for record in log.records if record.kind == "all_to_all" and record.bytes >= 64]
    assert rows == [moved * 16 * 4] * 2
