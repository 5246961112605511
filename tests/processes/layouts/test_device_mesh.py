"""A torch DeviceMesh, and slices of one, are accepted wherever a mesh is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import DTensor, Replicate, Shard


def program() -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = sw.Mesh.from_torch(device_mesh)
    assert mesh is sw.init_mesh(dp=2, tp=2) and sw.Mesh.from_torch(device_mesh["tp"]) is mesh["tp"]
    x = torch.arange(24.0).view(4, 6)
    d = sw.distribute_tensor(x, device_mesh, [Shard(0), Shard(1)])
    assert d.mesh is mesh and torch.equal(d.full_tensor(), x)
    w = sw.distribute_tensor(torch.ones(6, 2), device_mesh["tp"], [Shard(0)])
    assert torch.equal((d @ w).full_tensor(), x @ torch.ones(6, 2))
    again = DTensor.from_local(d.to_local(), device_mesh, [Shard(0), Shard(1)], run_check=False)
    assert again.layout is d.layout
    assert torch.equal(again.redistribute(device_mesh, [Replicate(), Replicate()]).to_local(), x)
    assert sw.ones(4, mesh=device_mesh, placements=[Shard(0), Replicate()]).to_local().shape == (2,)


def test_a_device_mesh_is_a_mesh(pool: Any) -> None:
    pool(4).run(program)
