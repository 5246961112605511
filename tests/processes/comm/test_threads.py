"""Threads of a rank that communicate while others enter and leave blocks that listen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group

import shardwise as sw
from shardwise import Shard
from shardwise._torch.tensors import collectives
from shardwise.comm import Processes
from shardwise.comm.aliases import Listener
from tests.helpers.process_pool import Pool


def communicates_under_listeners(turns: int) -> None:
    """One thread runs collectives by an alias, as compiled programs do, while another enters and leaves `trace_comm`. The first
    block is entered before."""
    mesh = sw.init_mesh(tp=dist.get_world_size())
    alias, ended, entered = Processes().prepare(mesh, ("tp",)).alias, threading.Event(), []

    def listens() -> None:
        while not ended.is_set():
            with sw.trace_comm() as log:
                entered.append(log)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=listens)]
    try:
        with sw.trace_comm():
            for thread in threads:
                thread.start()
        for turn in range(turns):
            assert isinstance(resolve_group(alias), Listener), (
                "stays while there are other threads, for them not to see it change"
            )
            x = torch.full((3,), float(turn))
            got = collectives.wait_tensor(collectives.all_reduce(x, "sum", alias))
            assert got.tolist() == [turn * dist.get_world_size()] * 3
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert len(entered) > 2 and not any(log.records for log in entered), "not what another thread communicates"
    with sw.trace_comm() as log:
        collectives.wait_tensor(collectives.all_reduce(torch.ones(3), "sum", alias))
    assert log.counts() == {"all_reduce": 1}
    assert isinstance(resolve_group(alias), Listener) == (threading.active_count() > 1), "costs nothing afterwards"


def test_an_alias_always_leads_to_a_group(pool: Callable[[int], Pool]) -> None:
    pool(2).run(communicates_under_listeners, 30)


def trains_in_two_threads() -> None:
    """Two threads of each rank, each with a mesh, and so with groups, of its own."""
    size = dist.get_world_size()
    meshes = [sw.init_mesh(a=size), sw.init_mesh(b=size, ranks=[*range(1, size), 0])]
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        mesh, total = meshes[number], []
        for turn in range(20):
            x = sw.distribute_tensor(torch.arange(6.0) + number, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
            (x.redistribute(placements=[sw.Replicate()]).cumsum(0) * turn).sum().backward()
            total.append(x.grad.full_tensor().sum().item())
        found[number] = total

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [21.0 * turn for turn in range(20)] for number in range(2)}


def test_two_threads_of_a_rank_with_meshes_of_their_own(pool: Callable[[int], Pool]) -> None:
    pool(2).run(trains_in_two_threads)
