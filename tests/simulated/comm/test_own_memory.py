"""No two simulated ranks hold the same memory: a write on one of them changes nothing on another, as on processes."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.errors import WorldError

MESH = sw.init_mesh(dp=2, tp=2)
TURNED = sw.init_mesh(dp=2, tp=2, ranks=[3, 2, 1, 0])
LAYOUTS = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Partial(), Shard(0)],
    [Partial("max"), Replicate()],
]


def values() -> Tensor:
    return torch.arange(1.0, 17).view(4, 4)


def check(x: DTensor) -> None:
    """Write to the shard of each rank in turn, and look at those of the others."""
    shards = x.detach()._local.shards
    assert len(shards) == len(x.mesh.ranks)
    for place, shard in enumerate(shards):
        before = [other.clone() for other in shards]
        shard.fill_(77)
        for other, was in zip(shards, before, strict=True):
            assert other is shard or torch.equal(other, was), f"a write at place {place} of {x.layout} reached another"


def trained(x: DTensor) -> Iterator[DTensor]:
    parameter = nn.Parameter(x)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    yield parameter
    yield from (state for state in optimizer.state[parameter].values() if isinstance(state, DTensor))


def gradient(x: DTensor, function: Callable[[DTensor], Any]) -> DTensor:
    x = x.detach().requires_grad_()
    function(x).backward()
    return x.grad


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_ways_in(placements: list[Any]) -> None:
    one = values()
    for local in (values(), one[:1].expand(4, 4), sw.Bundle([one] * 4), values().requires_grad_()):
        for run_check in (True, False):
            check(DTensor.from_local(local, MESH, placements, run_check=run_check))
    for source in (0, None):
        check(sw.distribute_tensor(one, MESH, placements, src_data_rank=source))
    for make in (sw.zeros, sw.ones, sw.empty, sw.rand, sw.randn):
        check(make(4, 4, mesh=MESH, placements=placements))
    check(sw.full((4, 4), 2.0, mesh=MESH, placements=placements))
    check(sw.randint(0, 9, (4, 4), mesh=MESH, placements=placements))


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_what_is_made_of_a_tensor(placements: list[Any]) -> None:
    def x() -> DTensor:
        return sw.distribute_tensor(values(), MESH, placements)

    for wanted in LAYOUTS:
        for mesh in (MESH, TURNED):
            check(x().redistribute(mesh, wanted))
    for made in (copy.deepcopy(x()), pickle.loads(pickle.dumps(x())), torch.zeros_like(x()), x().new_full((4,), 2.0)):
        check(made)
    for made in (x() + values(), torch.where(x() > 3, x(), torch.tensor(1.0)), torch.cat([x(), values()]), *trained(x())):
        check(made)
    if placements[0] != Partial("max"):
        check(gradient(x(), lambda x: x.sum()))
        check(gradient(x(), lambda x: x.full_tensor().sum()))
        check(gradient(x(), lambda x: (x * 2).mean()))


def test_one_tensor_cannot_hold_what_several_ranks_write() -> None:
    one = torch.zeros(2)
    with pytest.raises(WorldError, match=r"aten.add_.Tensor writes a Bundle.* shape \[2\].*give every rank its own"):
        one.add_(sw.Bundle([torch.ones(2), torch.ones(2)]))
    assert one.tolist() == [0.0, 0.0]
    assert one.add_(sw.Bundle([torch.ones(2)])).tolist() == [1.0, 1.0], "one rank alone has no other to share with"


def test_results_that_a_compiler_computes_once_are_every_ranks_own() -> None:
    once = torch.zeros(3)
    made = sw.Bundle.__tensor_unflatten__({"shard_0": once, "shard_1": once}, None, once.shape, once.stride())
    made.shards[0].add_(1)
    assert made.shards[1].tolist() == [0, 0, 0]
