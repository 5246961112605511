"""What debug mode costs: the time of a collective with it and without, on Gloo processes, and of opening a transport without
it.

    python benchmarks/debug_mode.py [--ranks 4] [--against FOLDER]

Rounds alternate between the two, and the best one counts; the time of a round is that of the slowest rank. With the folder of a
checkout from before debug mode, transports without it are compared; exits with 1 when one costs more now than noise.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from shardwise.comm import transport

ROUNDS, CALLS = 10, 20
#: The most that a transport may cost without debug mode, over one that knows nothing of it.
DOOR_TARGET = 1.1
Call = Callable[[], object]


def seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def slowest(call: Call) -> float:
    """Seconds per call, on the slowest rank."""
    dist.barrier()
    found = torch.tensor([seconds(call, CALLS)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def measure(rank: int, ranks: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = sw.init_mesh(tp=ranks)
    small, large = torch.ones(256), torch.ones(1 << 18)
    calls: dict[str, Call] = {
        "all_reduce, 1 KiB": lambda: transport(mesh).all_reduce(small, "sum", mesh, ("tp",)),
        "all_reduce, 1 MiB": lambda: transport(mesh).all_reduce(large, "sum", mesh, ("tp",)),
        "all_gather, 1 KiB": lambda: transport(mesh).all_gather(small, mesh, ("tp",)),
        "all_gather, 1 MiB": lambda: transport(mesh).all_gather(large, mesh, ("tp",)),
    }
    if rank == 0:
        print(f"{'µs, ' + str(ranks) + ' Gloo ranks':24}{'off':>10}{'on':>10}{'more':>10}")
    for name, call in calls.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for on, found in times.items():
                with sw.debug_mode() if on else nullcontext():
                    found.append(slowest(call))
        off, on = (min(found) * 1e6 for found in times.values())
        if rank == 0:
            print(f"{name:24}{off:10.0f}{on:10.0f}{on - off:10.0f}", flush=True)
    dist.destroy_process_group()


DOOR = """
import time, shardwise as sw
from shardwise.comm import transport
mesh = sw.init_mesh(tp=2)
def look():
    start = time.perf_counter()
    for _ in range(300):
        transport(mesh)
    return (time.perf_counter() - start) / 300
print(min(look() for _ in range(3000)))
"""


def door_seconds(folder: str) -> float:
    """What `transport(mesh)` costs without debug mode in the checkout in a folder; many short rounds, as the machine is
    shared."""
    environment = {**os.environ, "PYTHONPATH": folder}
    return float(subprocess.run([sys.executable, "-c", DOOR], env=environment, check=True, capture_output=True).stdout)


def door_ratio(before: str) -> float:
    """What a transport costs, over what it costs in another checkout; in turns, the best of three."""
    pairs = [(door_seconds(here), door_seconds(before)) for here in [str(Path(__file__).parents[1])] * 3]
    now, then = (min(times) * 1e9 for times in zip(*pairs, strict=True))
    print(f"\ndoor(mesh) without debug mode: {now:.0f} ns, in {before}: {then:.0f} ns")
    return now / then


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--against", help="a checkout from before debug mode, to compare transports without it")
    told = options.parse_args()
    ranks = told.ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(measure, (ranks, port), ranks)
    if told.against:
        ratio = door_ratio(told.against)
        print(f"ratio {ratio:.2f}  {'OK' if ratio <= DOOR_TARGET else f'MISS {DOOR_TARGET}'}")
        sys.exit(ratio > DOOR_TARGET)


if __name__ == "__main__":
    main()
