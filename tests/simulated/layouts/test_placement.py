"""Placements say all of a layout: what `x.placements` has, given back, makes the same tensor. Torch's are taken as ours are."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed.tensor as peer
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.layouts.placement import StridedShard

MESHES = [{"tp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 3, "tp": 2}]
SHAPES = [(4, 6), (5, 7), (2, 3, 4), (1, 8), (0, 4), (3, 2, 5), (12,)]


def views(x: DTensor, rng: random.Random) -> DTensor:
    """A view that a program may make of a tensor."""
    dim = rng.randrange(x.ndim)
    made = {
        "flatten": lambda: x.flatten(),
        "pair": lambda: x.flatten(max(dim - 1, 0), dim),
        "slice": lambda: x.narrow(dim, min(1, x.shape[dim]), max(x.shape[dim] - 2, 0)),
        "stretch": lambda: x.unsqueeze(0).expand(3, *x.shape),
        "permute": lambda: x.permute(*rng.sample(range(x.ndim), x.ndim)),
        "unflatten": lambda: x.unflatten(dim, (-1, 2)) if x.shape[dim] and x.shape[dim] % 2 == 0 else x,
        "cat": lambda: torch.cat([x, x], dim),
    }
    return made[rng.choice(list(made))]()


def sample(seed: int) -> tuple[torch.Tensor, DTensor]:
    """A tensor and the same one distributed, after some views."""
    rng = random.Random(seed)
    mesh, shape = sw.init_mesh(**rng.choice(MESHES)), rng.choice(SHAPES)
    axes = rng.sample(mesh.axes, rng.randint(1, mesh.ndim))
    placed = {axis: Shard(rng.randrange(len(shape))) for axis in axes}
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = sw.distribute_tensor(full, mesh, placed)
    for _ in range(rng.randint(1, 3)):
        state = rng.getstate()
        x = views(x, rng)
        rng.setstate(state)
        full = views(full, rng)
    return full, x


def check_round_trip(full: torch.Tensor, x: DTensor) -> None:
    assert torch.equal(x.full_tensor(), full)
    assert sw.layout(x.shape, x.mesh, x.placements, x.dtype, x.stride()) is x.layout, (x.layout, x.placements)
    back = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
    assert back.layout is x.layout and torch.equal(back.full_tensor(), full)
    again = sw.distribute_tensor(full, x.device_mesh, x.placements)
    assert again.layout.dims == x.layout.dims and torch.equal(again.full_tensor(), full)
    assert torch.equal(again.redistribute(placements=[Replicate()] * x.mesh.ndim).redistribute(x.mesh, x.placements), again)
    try:
        bare = DTensor.from_local(x.to_local(), x.device_mesh, x.placements)
    except sw.LayoutError as refused:
        assert not x.layout.even and "run_check=True" in str(refused)
    else:
        assert torch.equal(bare.full_tensor(), full), (x.layout, bare.layout)


@pytest.mark.parametrize("seed", range(60))
def test_placements_say_all(seed: int) -> None:
    check_round_trip(*sample(seed))


def test_every_order_and_every_uneven_sharding_of_one_dim() -> None:
    for sizes in MESHES:
        mesh = sw.init_mesh(**sizes)
        for count, size in itertools.product(range(1, mesh.ndim + 1), (0, 1, 5, 12)):
            for axes in itertools.permutations(mesh.axes, count):
                full = torch.arange(float(2 * size)).view(size, 2)
                check_round_trip(full, sw.distribute_tensor(full, mesh, {axis: Shard(0) for axis in axes}))


def test_a_flattened_tensor_says_so() -> None:
    mesh = sw.init_mesh(tp=2)
    full = torch.arange(12.0).view(3, 4)
    y = sw.distribute_tensor(full, mesh, [Shard(1)]).flatten()
    assert y.placements == (StridedShard(0, "_*4@tp"),) and y.placements != (Shard(0),)
    assert y.placements[0].is_shard(0) and isinstance(y.placements[0], Shard)
    back = DTensor.from_local(y.to_local(), y.device_mesh, y.placements)
    assert torch.equal(back.full_tensor(), full.flatten())


@pytest.mark.parametrize(
    ("placements", "shape", "text"),
    [
        ({"tp": StridedShard(0, "_*4@tp")}, (10,), "another size than 10"),
        ({"tp": StridedShard(0, "_*4@tp"), "dp": Shard(0)}, (8,), "stands on each of them"),
        ({"tp": StridedShard(0, "3@tp:1:2*2@dp:1:1")}, (6,), "stands on each of them"),
        ({"tp": StridedShard(0, "3@tp:1:2*2")}, (8,), "another size than 8"),
        ({"tp": StridedShard(0, split_factor=3)}, (8,), "3 equal stretches"),
    ],
)
def test_strided_shards_that_do_not_fit(placements, shape, text) -> None:
    with pytest.raises(sw.LayoutError, match=text):
        sw.layout(shape, sw.init_mesh(dp=2, tp=2), placements)


# ── torch's placements ──

PAIRS = [
    (Shard(0), peer.Shard(0)),
    (Shard(1), peer.Shard(1)),
    (Replicate(), peer.Replicate()),
    (Partial(), peer.Partial()),
    (Partial("max"), peer.Partial("max")),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=str)
def test_torchs_placements_are_equal_to_ours(ours, theirs) -> None:
    assert ours == theirs and theirs == ours and hash(ours) == hash(theirs)
    assert {ours: 1}[theirs] == {theirs: 1}[ours] == 1 and (ours,) == (theirs,)
    assert all((ours == other) == (theirs == one) for one, other in PAIRS)


def test_torchs_placements_are_taken() -> None:
    mesh, full = sw.init_mesh(dp=2, tp=2), torch.arange(32.0).view(8, 4)
    x = sw.distribute_tensor(full, mesh, [peer.Shard(0), peer.Replicate()])
    assert x.placements == (peer.Shard(0), peer.Replicate()) and torch.equal(x.full_tensor(), full)
    assert x.redistribute(mesh, [peer.Replicate(), peer.Shard(1)]).placements == (Replicate(), Shard(1))
    assert DTensor.from_local(x.to_local(), mesh, [peer.Shard(0), peer.Replicate()]).layout is x.layout
    assert sw.ones(4, mesh=mesh, placements=[peer.Shard(0), peer.Replicate()]).placements == (Shard(0), Replicate())
    assert sw.layout((8,), mesh, {"tp": peer.Shard(0)}) is sw.layout((8,), mesh, {"tp": Shard(0)})


def test_torchs_strided_shards_mean_what_they_mean_there() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    later_first = sw.layout((8, 8), mesh, [_StridedShard(0, split_factor=2), peer.Shard(0)])
    assert later_first is sw.layout((8, 8), mesh, {"tp": Shard(0), "dp": Shard(0)})
    flat = sw.layout((12,), mesh, [peer.Replicate(), _StridedShard(0, split_factor=3)])
    assert flat is sw.ones(3, 4, mesh=mesh, placements={"tp": Shard(1)}).flatten().layout
    assert sw.layout((9,), mesh, [peer.Replicate(), _StridedShard(0, split_factor=3)]).local_shape(1) == (3,)


def test_what_is_no_placement_is_refused() -> None:
    with pytest.raises(sw.LayoutError, match="takes Shard, Replicate or Partial, got 'Shard"):
        sw.layout((8,), sw.init_mesh(tp=2), ["Shard(0)"])
