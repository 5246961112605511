"""Ring attention beside what attention does by itself on sequences that are sharded, on Gloo ranks.

    python benchmarks/ring_attention.py                                4 ranks, sequences of 1,024 and 4,096
    python benchmarks/ring_attention.py --lengths 8192 --ranks 2

By itself F.scaled_dot_product_attention shardings heads in place of the sequence if there are enough of them and that pays.
Else it gathers keys and values; where it is causal queries as well, and computes everything on every rank.

A step is a forward and a backward, float32. Bytes are those that a rank receives. Memory is the highest sum of what a rank
allocates in a step and has not freed yet, as torch's profiler sees its allocator, on the rank with most of it, without the
inputs. Time is that of the slowest rank, every rank on one thread, the best of the rounds; the processor's time of the first
and of the last rank shows how even the work is. Values and gradients are compared first. Exits with 1 where they differ.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from step import be_quiet

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

#: Whether attention is causal, and the number of heads.
CASES = [(False, 8), (True, 8), (True, 2)]
WIDTH, BATCH, CLOSE = 64, 1, 1e-4


def gathered(query: DTensor, key: DTensor, value: DTensor, is_causal: bool) -> Any:
    """Every rank attends from its own queries to all keys; that is what attention does by itself where heads are few."""
    key, value = (x.redistribute(placements=[Replicate()]) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


WAYS: dict[str, Callable[..., Any]] = {
    "ring": sw.ring_attention,
    "by itself": F.scaled_dot_product_attention,
    "gathered": gathered,
}


class Row(NamedTuple):
    """What one rank measured."""

    received: int
    peak: int
    seconds: float
    busy: float


def step(attention: Callable[..., Any], given: list[DTensor], is_causal: bool) -> list[DTensor]:
    """A forward and a backward: the value and the gradients."""
    out = attention(*given, is_causal=is_causal)
    return [out.detach(), *torch.autograd.grad(out.sum(), given)]


def peak(function: Callable[[], Any]) -> int:
    """The most bytes that a function has allocated at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measured(function: Callable[[], Any], rounds: int) -> Row:
    """The best round."""
    with sw.trace_comm() as log:
        function()
    best, busy = float("inf"), float("inf")
    for _ in range(rounds):
        dist.barrier()
        start, work = time.perf_counter(), time.process_time()
        function()
        best, busy = min(best, time.perf_counter() - start), min(busy, time.process_time() - work)
    return Row(log.bytes, peak(function), best, busy)


def compared(length: int, case: tuple[bool, int], rounds: int) -> dict[str, list[Row]]:
    """Every way on this rank, and what all ranks measured."""
    is_causal, heads = case
    ways = {name: way for name, way in WAYS.items() if way is not gathered or not is_causal}
    mesh = sw.init_mesh(sp=dist.get_world_size())
    torch.manual_seed(0)
    given = [sw.randn(BATCH, heads, length, WIDTH, mesh=mesh, placements=[Shard(2)]).requires_grad_() for _ in range(3)]
    values = [[x.full_tensor() for x in step(attention, given, is_causal)] for attention in ways.values()]
    worst = max((one - other).abs().max().item() for one, *others in zip(*values, strict=True) for other in others)
    if not worst < CLOSE:
        raise SystemExit(f"length {length}, {case}: values differ by {worst}")
    found = {}
    for name, attention in ways.items():
        rows: list[Any] = [None] * mesh.size()
        dist.all_gather_object(rows, measured(partial(step, attention, given, is_causal), rounds))
        found[name] = rows
    return found


def serve(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    be_quiet()
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    titles = f"{'MiB received':>13}{'MiB at most':>13}{'ms':>9}{'busy, first and last':>24}"
    if not rank:
        print(f"{'attention':22}{'length':>8}  {'':10}{titles}")
    for case in CASES:
        for length in options.lengths:
            for name, rows in compared(length, case, options.rounds).items():
                if not rank:
                    print(line(case, length, name, rows), flush=True)
    dist.destroy_process_group()


def line(case: tuple[bool, int], length: int, name: str, rows: list[Row]) -> str:
    """One line of the table."""
    kind = f"{'causal' if case[0] else 'full'}, {case[1]} heads"
    sizes = "".join(f"{max(values) / 2**20:13.1f}" for values in ([r.received for r in rows], [r.peak for r in rows]))
    times = f"{max(r.seconds for r in rows) * 1e3:9.0f}{rows[0].busy * 1e3:16.0f}{rows[-1].busy * 1e3:8.0f}"
    return f"{kind:22}{length:8}  {name:10}{sizes}{times}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ring attention beside what attention does by itself.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    sys.exit(main())
