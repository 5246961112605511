"""docs/porting.md says what the signatures say, and what torch's own tests use works with the import changed, simulated."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise.debug import CommDebugMode, visualize_sharding
from tests.helpers.porting import PAGE, SECTIONS, VERSION, page, public


@pytest.mark.skipif(not torch.__version__.startswith(VERSION), reason=f"the page lists the names of torch {VERSION}")
def test_the_page_is_as_the_signatures_say() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.helpers.porting"
    assert all(f"`{prefix}{name}" in page() for _, owner, _, prefix, names in SECTIONS for name in public(owner, names))


def test_factories_take_torchs_keywords() -> None:
    mesh = init_device_mesh("cpu", (4,))
    assert mesh.mesh_dim_names == ("dim0",) and mesh.shape == (4,)
    for make in (sw.zeros, sw.ones, sw.empty, sw.rand, sw.randn):
        x = make(8, 2, dtype=torch.float64, layout=torch.strided, requires_grad=True, device_mesh=mesh, placements=[Shard(0)])
        assert x.requires_grad and x.dtype == torch.float64 and x.placements == (Shard(0),) and x.mesh is mesh
    assert sw.full((8,), 3.0, requires_grad=True, device_mesh=mesh, placements=[Shard(0)]).requires_grad
    with mesh:
        assert sw.zeros(4).placements == (Replicate(),)
        with init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) as inner:
            assert sw.ones((2, 2)).mesh is inner
        assert sw.ones((2, 2)).mesh is mesh
    with pytest.raises(sw.MeshError, match="none is current"):
        sw.zeros(4)
    with pytest.raises(sw.ShardwiseError, match=r"layout is torch\.strided"):
        sw.zeros(4, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(sw.MeshError, match="one of mesh= and device_mesh="):
        sw.zeros(4, mesh=mesh, device_mesh=mesh)


def test_partial_and_local_tensor_by_torchs_names() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partials = DTensor.from_local(torch.ones(2), device_mesh=mesh, placements=[Partial(reduce_op="sum")])
    assert partials.placements[0].reduce_op == "sum" and partials.placements[0].is_partial(reduce_op="sum")
    assert partials.full_tensor().tolist() == [2.0, 2.0] and partials._local_tensor.shards[0].tolist() == [1.0, 1.0]


def test_modules_are_distributed() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def shard(name: str, module: nn.Module, on: sw.Mesh) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), on, [Shard(0)]))

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    want = model(x).detach()
    model[1].reset_running_stats()
    spread = distribute_module(
        model,
        mesh,
        shard,
        input_fn=lambda module, inputs, on: distribute_tensor(inputs[0], on),
        output_fn=lambda module, outputs, on: outputs.full_tensor(),
    )
    assert spread is model and model[0].weight.placements == (Shard(0),)
    assert all(isinstance(held, DTensor) for held in (*model.parameters(), *model.buffers()))
    got = model(x)
    assert not isinstance(got, DTensor)
    torch.testing.assert_close(got, want)


def test_counting_collectives() -> None:
    mesh, c10d = init_device_mesh("cpu", (2,)), torch.ops.c10d_functional
    x, mode = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)]), CommDebugMode()
    with mode:
        (x @ distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)).full_tensor()
    counts = mode.get_comm_counts()
    assert mode.get_total_counts() == 1 and counts[c10d.all_reduce] == 1 and counts[c10d.all_gather_into_tensor] == 0
    with mode:
        x.redistribute(placements=[Shard(0)])
    assert mode.get_comm_counts() == {c10d.all_to_all_single: 1} and "all_to_all" in mode.generate_comm_debug_tracing_table()


def test_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    visualize_sharding(sw.ones(5, device_mesh=mesh, placements=[Shard(0)]), header="weights")
    assert capsys.readouterr().out == "weights\n         Col 0\nRow 0-2  cpu:0\nRow 3-4  cpu:1\n"
    visualize_sharding(sw.ones(2, 2, device_mesh=mesh, placements=[Shard(1)]).flatten())
    assert capsys.readouterr().out == "         Col 0\nRow 0+2  cpu:0\nRow 1+3  cpu:1\n"
    visualize_sharding(sw.ones(0, device_mesh=mesh))
    assert capsys.readouterr().out == ""
    with pytest.raises(sw.OperatorError, match="one or two dims"):
        visualize_sharding(sw.ones(2, 2, 2, device_mesh=mesh))


def test_no_one_rank_asks_in_a_simulated_world() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for ask in (mesh.get_rank, mesh.get_local_rank, mesh.get_coordinate, mesh.get_group, mesh.to_torch):
        with pytest.raises(sw.MeshError, match="simulated"):
            ask()


def test_optimizers_batch_them() -> None:
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        assert DTensor in importlib.import_module(module)._foreach_supported_types
