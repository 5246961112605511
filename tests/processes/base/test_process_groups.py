"""Meshes end when nothing holds them, and their process groups with them: groups, threads and descriptors stay few."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.base.process_groups import FEW
from tests.helpers.process_pool import Pool

#: Threads and descriptors of two groups, more or less: they are freed several at a time, when others are made.
SLACK = 16
SHAPES = [{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "c": 2}, {"a": 2}]


def counted() -> dict[str, int]:
    """What a rank has of everything that a group takes."""
    return {
        "groups": len(distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "of Python": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def make_and_drop(number: int) -> None:
    """Use a mesh, the same on every rank, in some order of some ranks, and let go of it."""
    choose = random.Random(number)
    shape = choose.choice(SHAPES)
    ranks = choose.sample(range(4), math.prod(shape.values()))
    mesh = sw.init_mesh(ranks=ranks, **shape)
    x = sw.ones(8, mesh=mesh, placements=[Shard(0)] * mesh.ndim)
    if dist.get_rank() in ranks:
        assert x.sum().full_tensor().item() == 8.0


def makes_and_drops(meshes: int) -> None:
    most: dict[str, int] = {}
    first: dict[str, int] = {}
    for number in range(meshes):
        make_and_drop(number)
        most = {name: max(count, most.get(name, 0)) for name, count in counted().items()}
        if number + 1 == meshes // 2:
            first = most
    assert most["groups"] <= 2 * FEW, most
    for name, count in most.items():
        assert count <= first[name] + SLACK, f"{name}: {first[name]} at most in the first half of {meshes} meshes, then {count}"


def test_fifty_meshes_made_and_dropped(pool: Callable[[int], Pool]) -> None:
    pool(4).run(makes_and_drops, 50)


@pytest.mark.slow
def test_a_thousand_meshes_made_and_dropped(pool: Callable[[int], Pool]) -> None:
    pool(4).run(makes_and_drops, 1000, timeout=900)


def keeps_what_is_held() -> None:
    """A tensor that one rank holds keeps the group of its mesh, on all ranks; a mesh that ended is the same when made again."""
    order = [1, 0, 3, 2]
    mesh = sw.init_mesh(a=4, ranks=order)
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    kept = [x] if dist.get_rank() == 2 else []
    alias, total = mesh.alias(("a",)), sw.init_mesh(w=4)
    del mesh, x
    for other in list(permutations(range(4)))[1:20]:
        if list(other) != order:
            sw.init_mesh(a=4, ranks=other)
    again = sw.init_mesh(a=4, ranks=order)
    assert again.alias(("a",)) == alias
    y = sw.distribute_tensor(torch.arange(8.0), again, [Shard(0)])
    assert y.sum().full_tensor().item() == 28.0
    assert not kept or kept[0].layout is y.layout
    assert sw.ones(4, mesh=total, placements=[Shard(0)]).sum().full_tensor().item() == 4.0


def test_a_group_that_one_rank_needs_stays_on_all(pool: Callable[[int], Pool]) -> None:
    pool(4).run(keeps_what_is_held)


def runs_a_program_on_meshes_that_end(compiled: bool) -> None:
    """A captured or compiled program names its group by an alias: it leads to the group of the mesh that is made again."""
    order = [3, 1, 2, 0]

    def doubled(x: DTensor) -> torch.Tensor:
        return (x * 2).sum().redistribute(placements=[Replicate()])

    program = torch.compile(doubled, backend="aot_eager", fullgraph=True) if compiled else sw.capture(doubled)
    for _ in range(2):
        x = sw.distribute_tensor(torch.arange(8.0), sw.init_mesh(a=4, ranks=order), [Shard(0)])
        assert program(x).full_tensor().item() == 56.0
        del x
        for other in list(permutations(range(4)))[1:18]:
            sw.init_mesh(a=4, ranks=other)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_programs_outlive_the_meshes_they_were_made_for(pool: Callable[[int], Pool], compiled: bool) -> None:
    pool(4).run(runs_a_program_on_meshes_that_end, compiled)
