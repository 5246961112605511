"""What programs written for torch.distributed.tensor ask of meshes, and of the ways in and out, on Gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor


def refused(call: Any) -> str:
    """Which error of ours a call raises."""
    try:
        call()
    except sw.ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ── meshes ──


def mesh_answers() -> list[Any]:
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, rank = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    assert ours == theirs and ours == sw.Mesh.from_torch(theirs) and ours["tp"] == theirs["tp"] and ours != theirs["tp"]
    for mesh in (theirs, ours):
        assert (mesh.size(), mesh.size(0), mesh.shape, mesh.ndim, mesh.mesh_dim_names) == (4, 2, (2, 2), 2, ("dp", "tp"))
        assert mesh.device_type == "cpu" and mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.get_rank() == rank
        assert tuple(mesh.get_coordinate()) == (rank // 2, rank % 2)
        assert [mesh.get_local_rank("dp"), mesh.get_local_rank(1)] == [rank // 2, rank % 2]
        assert mesh["tp"].get_local_rank() == rank % 2 and mesh["tp"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        groups = [mesh.get_group("dp"), mesh.get_group(1), *mesh.get_all_groups(), mesh["tp"].get_group()]
        assert [dist.get_process_group_ranks(group) for group in groups] == [
            [rank % 2, rank % 2 + 2],
            [rank // 2 * 2, rank // 2 * 2 + 1],
            [rank % 2, rank % 2 + 2],
            [rank // 2 * 2, rank // 2 * 2 + 1],
            [rank // 2 * 2, rank // 2 * 2 + 1],
        ]
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mesh.get_group("tp"))
        assert total.item() == rank // 2 * 4 + 1
        assert mesh._flatten().size() == 4 and mesh._flatten().ndim == 1
    with theirs:
        assert sw.ones(4).mesh == theirs
    with ours:
        placed = distribute_tensor(torch.arange(4.0), placements=[Shard(0), Replicate()])
        local = DTensor.from_local(torch.ones(2))
    assert placed.mesh is ours and local.placements == (Replicate(), Replicate())
    return [refused(sw.ones), refused(lambda: ours.get_group("pp")), refused(lambda: ours.get_group())]


def test_a_mesh_answers_as_a_device_mesh(pool: Any) -> None:
    texts = pool(4).run(mesh_answers)
    assert all(text == texts[0] for text in texts)
    assert "no mesh is given and none is current" in texts[0][0]
    assert "mesh_dim: mesh (dp=2, tp=2) has the axes dp, tp, or 0 to 1; got 'pp'" in texts[0][1] and "got None" in texts[0][2]


def trained(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def torchs_own() -> list[Any]:
    mesh = sw.init_mesh(tp=2)
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))[1]  # noqa: E731
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    texts = [
        refused(lambda: fully_shard(make(), mesh=mesh)),
        refused(lambda: parallelize_module(make(), mesh, plan)),
    ]
    assert mesh == mesh.to_torch() and sw.Mesh.from_torch(mesh.to_torch()) is mesh
    want = trained(make())
    for got in (fully_shard(make(), mesh=mesh.to_torch()), parallelize_module(make(), mesh.to_torch(), plan)):
        torch.testing.assert_close(trained(got), want, rtol=1e-5, atol=1e-6)
    return texts


def test_functions_that_make_torchs_own_tensors_are_told_what_to_take(pool: Any) -> None:
    texts = pool(2).run(torchs_own)
    assert texts[0] == texts[1]
    assert all("give it mesh.to_torch(), or shard the module with Shardwise" in text for text in texts[0]), texts[0]


# ── distribute_tensor ──


def sources() -> list[Any]:
    rank = float(dist.get_rank())
    line, grid = sw.init_mesh(tp=4), sw.init_mesh(dp=2, tp=2)
    for source in (0, 2, 3):
        got = distribute_tensor(torch.full((8,), rank), line, [Shard(0)], src_data_rank=source)
        assert got.full_tensor().tolist() == [source] * 8
        assert distribute_tensor(torch.full((2,), rank), line, src_data_rank=source).to_local().tolist() == [source] * 2
    assert (
        distribute_tensor(torch.full((4,), rank), grid, [Shard(0), Replicate()], src_data_rank=1).full_tensor().tolist()
        == [3.0] * 4
    )
    part = distribute_tensor(torch.full((2,), rank), grid["tp"], [Replicate()], src_data_rank=1)
    assert part.to_local().tolist() == [rank // 2 * 2 + 1] * 2, "each group along the mesh's axes by itself, as torch's"
    own = distribute_tensor(torch.full((2,), rank), line, src_data_rank=None)
    assert own.to_local().tolist() == [rank] * 2
    wrong = (7, -1, "a", 1.0, True, 4)
    return [refused(lambda: distribute_tensor(torch.ones(4), line, [Shard(0)], src_data_rank=bad)) for bad in wrong]  # noqa: B023


def test_the_source_of_the_data(pool: Any) -> None:
    texts = pool(4).run(sources)
    assert all(text == texts[0] for text in texts)
    assert all("src_data_rank" in text and "from 0 to 3" in text for text in texts[0]), texts[0]


def non_leaves() -> None:
    mesh = sw.init_mesh(tp=4)
    w = torch.arange(8.0, requires_grad=True)
    d = distribute_tensor(w * 2, mesh, [Shard(0)])
    assert not d.is_leaf and d.requires_grad
    (d * d).sum().backward()
    torch.testing.assert_close(w.grad, 8 * torch.arange(8.0))
    assert distribute_tensor(w, mesh, [Shard(0)]).is_leaf
    image = torch.arange(2.0 * 4 * 4 * 4).view(2, 4, 4, 4).to(memory_format=torch.channels_last)
    for placed in ([Shard(0)], [Shard(1)], [Replicate()]):
        x = distribute_tensor(image, mesh, placed)
        assert x.stride() == image.stride() and x.is_contiguous(memory_format=torch.channels_last)
        assert x.to_local().is_contiguous(memory_format=torch.channels_last) and torch.equal(x.full_tensor(), image)
    table = torch.arange(12.0).view(3, 4).t()
    assert distribute_tensor(table, mesh, [Shard(0)]).stride() == (1, 4)
    assert torch.equal(distribute_tensor(table, mesh, [Shard(0)]).full_tensor(), table)


def test_graphs_and_strides_are_kept(pool: Any) -> None:
    pool(4).run(non_leaves)


# ── from_local ──


def unchecked() -> list[Any]:
    """Nothing is communicated by from_local; what was assumed is compared with the next communication."""
    mesh, rank = sw.init_mesh(tp=4), dist.get_rank()
    with sw.trace_comm() as log:
        even = DTensor.from_local(local_tensor=torch.full((2,), float(rank)), device_mesh=mesh, placements=[Shard(0)])
        odd = DTensor.from_local(torch.ones(1 + rank % 2), mesh, [Shard(0)])
    assert log.counts() == {} and even.shape == (8,)
    first = refused(lambda: even.full_tensor())
    assert even.full_tensor().tolist() == [0.0, 0, 1, 1, 2, 2, 3, 3]
    for _ in range(2):
        again = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        with sw.trace_comm() as log:
            again.full_tensor()
    assert log.counts() == {"all_gather": 1}, "a line is checked once"
    right = DTensor.from_local(torch.ones(1 + rank % 2), mesh, [Shard(0)], run_check=True)
    assert right.shape == (6,) and right.full_tensor().tolist() == [1.0] * 6
    del odd
    return [first]


def test_nothing_is_communicated_and_wrong_shapes_are_found_by_all(pool: Any) -> None:
    texts = pool(4).run(unchecked)
    assert all(text == texts[0] for text in texts)
    assert "[1] on rank 0, [2] on rank 1, [1] on rank 2, [2] on rank 3; give run_check=True" in texts[0][0]


def checked() -> list[str]:
    mesh, rank = sw.init_mesh(tp=4), dist.get_rank()
    odd = rank == 2
    given = [
        torch.ones(2, dtype=torch.float64 if odd else torch.float32),
        torch.ones(2, requires_grad=odd),
        torch.ones(2, device="meta" if odd else "cpu"),
        torch.ones((2, 1) if odd else (2,)),
    ]
    return [
        *(refused(lambda: DTensor.from_local(x, mesh, [Shard(0)], run_check=True)) for x in given),  # noqa: B023
        refused(lambda: DTensor.from_local(torch.ones(2 + odd), mesh, [Replicate()], run_check=True)),
        refused(lambda: DTensor.from_local(sw.ones(2, mesh=mesh), mesh, [Shard(0)])),
    ]


def test_what_ranks_compare(pool: Any) -> None:
    texts = pool(4).run(checked)
    assert all(text == texts[0] for text in texts)
    for text, word in zip(
        texts[0], ["torch.float64", "requires_grad", "meta", "number of dims", "rank 2 gave [3]", "already"], strict=True
    ):
        assert word in text, text


def gradients() -> None:
    mesh, rank = sw.init_mesh(tp=4), dist.get_rank()
    local = torch.ones(2, requires_grad=True)
    x = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
    (x * distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])).sum().backward()
    torch.testing.assert_close(local.grad, torch.tensor([2.0 * rank, 2.0 * rank + 1]))


def test_gradients_arrive_as_asked(pool: Any) -> None:
    pool(4).run(gradients)


# ── redistribute ──


def later() -> None:
    mesh, rank = sw.init_mesh(tp=4), dist.get_rank()
    whole = torch.arange(32.0).view(8, 4)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    moved = x.redistribute(device_mesh=mesh, placements=[Replicate()], async_op=True)
    assert isinstance(moved.to_local(), AsyncCollectiveTensor) and not moved.to_local().completed
    assert torch.equal(moved + 1, distribute_tensor(whole + 1, mesh)) and torch.equal(moved.to_local().wait(), whole)
    partials = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Partial()])
    for placed, want in (([Replicate()], [6.0] * 4), ([Shard(0)], [6.0])):
        found = partials.redistribute(placements=placed, async_op=True)
        assert isinstance(found.to_local(), AsyncCollectiveTensor)
        assert found.redistribute(placements=[Replicate()]).full_tensor().tolist() == [6.0] * 4
        assert (found.to_local() * 1).tolist() == want
    for placed in ([Shard(1)], [Replicate()]):
        assert torch.equal(x.redistribute(placements=placed, async_op=True).full_tensor(), whole)


def test_redistribute_later(pool: Any) -> None:
    pool(4).run(later)


def dtypes() -> None:
    mesh = sw.init_mesh(tp=4)
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).requires_grad_()
    with sw.trace_comm() as log:
        half = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and log.bytes == 2 * 2 * 3 and half.placements == (Replicate(),)
    (half * half).sum().backward()
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad.full_tensor(), 2 * torch.arange(8.0))
    y = distribute_tensor(torch.ones(8), mesh, [Replicate()]).requires_grad_()
    y.redistribute(placements=[Shard(0)], backward_dtype=torch.bfloat16).sum().backward()
    assert y.grad.dtype == torch.float32 and y.grad.full_tensor().tolist() == [1.0] * 8


def test_dtypes_of_moves(pool: Any) -> None:
    pool(4).run(dtypes)


@pytest.mark.parametrize("bad", [(4, 2), (8, 3)], ids=str)
def test_layouts_of_other_tensors_are_refused(bad: tuple[int, int]) -> None:
    mesh = sw.init_mesh(tp=2)
    with pytest.raises(sw.LayoutError, match="does not fit a tensor of shape"):
        distribute_tensor(torch.ones(8, 2), mesh, sw.layout(bad, mesh, [Shard(0)]))
    with pytest.raises(sw.LayoutError, match="does not fit"):
        distribute_tensor(torch.ones(8, 2), mesh, sw.layout((8, 2), mesh, [Shard(0)], torch.float64))
    with pytest.raises(sw.LayoutError, match="does not fit"):
        distribute_tensor(torch.ones(8, 2), mesh, sw.layout((8, 2), sw.init_mesh(z=2), [Shard(0)]))
