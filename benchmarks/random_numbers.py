"""What random numbers cost beside those of torch's own generator, and whether a GPU draws the same as a host.

    python benchmarks/random_numbers.py                  on the host, 10^8 numbers a time
    python benchmarks/random_numbers.py --device cuda    on a GPU, after a comparison with the host, bit by bit
    python benchmarks/random_numbers.py --count 1000000  fewer

Rounds alternate between torch and Shardwise (a mesh of one rank, a process group of its own), and the best round counts. On a
GPU a row has the time of one call that is waited for, and the time of a call among many that follow each other, in which the
host is ahead: what the GPU takes. The target is for the second. The last table has what a call costs the host: of ten numbers,
also in a simulated world. Exits with 1 if a number differs, or on a GPU if a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard
from shardwise.random.bits import Draw, Spans, fill
from shardwise.random.keys import fill_shard

TARGET = 1.3
Call = Callable[[], Any]


# ── the same everywhere ───────────────────────────────────────────────────────────────────────────────────────────────

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DRAWS = {
    Draw("uniform", (0.0, 1.0)): DTYPES,
    Draw("uniform", (-0.3, 0.3)): DTYPES,
    Draw("uniform", (1.0, 1.7)): DTYPES,
    Draw("normal", (0.0, 1.0)): DTYPES,
    Draw("normal", (1.0, 0.3)): DTYPES,
    Draw("exponential", (1.7,)): DTYPES,
    Draw("bernoulli", (0.3,)): (torch.float32, torch.bool),
    Draw("integer", (-5, 1000)): (torch.int64, torch.float32),
    Draw("geometric", (0.2,)): (torch.float32,),
    Draw("cauchy", (0.0, 2.0)): (torch.float32,),
    Draw("log_normal", (0.0, 1.0)): (torch.float32,),
}
BOXES = (
    Spans((5,), (1_000_003,), (1,)),
    Spans((3, 7), (40, 3000), (100_000, 1)),
    Spans((1, 2, 2**33), (3, 70, 1100), (2**40, 5000, 1)),
    Spans((2, 1, 3, 0), (3, 4, 5, 70), (10**6, 10**4, 100, 1)),
    Spans((3, 0), (7000, 5), (16, 2)),
)


def differences(device: str) -> list[str]:
    """Which numbers a device draws otherwise than the host, by its kernels and by operators of torch."""
    found = []
    for draw, dtypes in DRAWS.items():
        for dtype in dtypes:
            for number, box in enumerate(BOXES):
                out = torch.empty(box.lengths, dtype=dtype)
                want = fill(out, draw, box, (-1234567890123456789, 987654321))
                for how in (fill_shard, fill):
                    got = how(torch.empty_like(out, device=device), draw, box, (-1234567890123456789, 987654321))
                    if not torch.equal(got.cpu(), want):
                        count = int((got.cpu() != want).sum())
                        found.append(f"{draw} {dtype} box {number} by {how.__name__}: {count} of {want.numel()} differ")
    return found


def program(mesh: sw.Mesh, x: Any) -> list[Any]:
    weights = x.abs() + 0.5
    drawn = [F.dropout(x, 0.3), torch.rand_like(x), torch.randn_like(x), x.clone().normal_(1, 2), x.clone().uniform_(-1, 1)]
    drawn += [x.clone().uniform_(1, 3), x.clone().exponential_(), x.clone().bernoulli_(0.4), torch.bernoulli(weights / 2)]
    drawn += [torch.randint_like(x, 0, 100), torch.multinomial(weights, 3), torch.multinomial(weights, 9, replacement=True)]
    return [*drawn, sw.randn(33, 7, mesh=mesh, placements=[Shard(0), Shard(1)]), sw.randperm(1000, mesh=mesh)]


def programs(device: str) -> list[str]:
    """Which numbers a whole function draws otherwise on a device than on the host: on 2×2 ranks, eager, captured, compiled."""
    found, want = [], []
    for where, how in (("cpu", "eager"), (device, "eager"), (device, "captured"), (device, "compiled")):
        with sw.simulate(4):
            mesh = sw.init_mesh(a=2, b=2, device=where)
            x = sw.ones(64, 48, mesh=mesh, placements=[Shard(0), Shard(1)])

            def function(x: Any, mesh: sw.Mesh = mesh) -> list[Any]:
                return program(mesh, x)

            call = {"eager": function, "captured": sw.capture(function)}.get(how) or torch.compile(function, fullgraph=True)
            torch.manual_seed(7)
            got = [y.full_tensor().cpu() for _ in range(2) for y in call(x)]
        want = want or got
        found += [
            f"result {i} {how} on {where}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)
        ]
    return found


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def best(calls: dict[str, Call], device: str, rounds: int) -> dict[str, float]:
    """The shortest time of each call, in milliseconds; calls take turns."""
    times = dict.fromkeys(calls, float("inf"))
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            result = call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first compiles
                times[name] = min(times[name], (time.perf_counter() - start) * 1e3)
            del result
    return times


def best_enqueued(calls: dict[str, Call], device: str, rounds: int, times: int = 20) -> dict[str, float]:
    """The shortest time of each call on the GPU, in milliseconds, of several that follow each other."""
    took = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
            took[name] = min(took[name], start.elapsed_time(end) / times)
    return took


def on_the_host(call: Call, device: str, rounds: int = 100, times: int = 40) -> float:
    """The shortest time in which a call comes back, in microseconds, of several that follow each other."""
    took = float("inf")
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        took = min(took, (time.perf_counter() - start) / times * 1e6)
    return took


def rows(device: str, count: int) -> dict[str, tuple[Call, Call]]:
    """What is drawn: by torch, and by Shardwise."""
    mesh = sw.init_mesh(a=1, device=device)
    ones, x = torch.ones(count, device=device), sw.ones(count, mesh=mesh)
    small, spread = ones.bfloat16(), x.bfloat16()
    return {
        "rand": (lambda: torch.rand(count, device=device), lambda: sw.rand(count, mesh=mesh)),
        "uniform_": (lambda: ones.uniform_(-1, 1), lambda: x.uniform_(-1, 1)),
        "randn": (lambda: torch.randn(count, device=device), lambda: sw.randn(count, mesh=mesh)),
        "normal_": (lambda: ones.normal_(), lambda: x.normal_()),
        "bernoulli_": (lambda: ones.bernoulli_(0.3), lambda: x.bernoulli_(0.3)),
        "exponential_": (lambda: ones.exponential_(), lambda: x.exponential_()),
        "dropout": (lambda: F.dropout(ones, 0.1), lambda: F.dropout(x, 0.1)),
        "dropout, bf16": (lambda: F.dropout(small, 0.1), lambda: F.dropout(spread, 0.1)),
        "randperm / 10": (lambda: torch.randperm(count // 10, device=device), lambda: sw.randperm(count // 10, mesh=mesh)),
    }


def table(device: str, count: int, rounds: int) -> bool:
    """Print the times of many numbers, and say whether each is within its target."""
    gpu, met = device != "cpu", True
    measures = {"one call": best, **({"GPU": best_enqueued} if gpu else {})}
    print(f"{count} numbers, ms  " + "".join(f" {name:>9}: torch     ours    ratio" for name in measures))
    for name, (theirs, ours) in rows(device, count).items():
        row, ratio = f"{name:<24}", 0.0
        for measure in measures.values():
            times = measure({"torch": theirs, "ours": ours}, device, rounds)
            ratio = times["ours"] / times["torch"]
            row += f" {times['torch']:15.3f} {times['ours']:8.3f} {ratio:8.2f}"
        aimed = gpu and not name.startswith("randperm")
        met &= not aimed or ratio <= TARGET
        print(row + (f"  {'OK' if ratio <= TARGET else 'MISS'} ({TARGET})" if aimed else ""), flush=True)
    return met


def host_table(device: str) -> None:
    """Print what a call costs the host."""
    print(f"\n{'10 numbers, host, µs':<24} {'torch':>15} {'ours':>8} {'simulated':>10}")
    here = rows(device, 10)
    with sw.simulate(1):
        simulated = rows(device, 10)
    for name, (theirs, ours) in here.items():
        times = [on_the_host(call, device) for call in (theirs, ours, simulated[name][1])]
        print(f"{name:<24} {times[0]:15.1f} {times[1]:8.1f} {times[2]:10.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=10**8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    wrong = [] if given.device == "cpu" else [*differences(given.device), *programs(given.device)]
    print("\n".join(wrong) if wrong else "" if given.device == "cpu" else "every number is the same as on the host\n")
    dist.init_process_group("gloo" if given.device == "cpu" else "nccl", rank=0, world_size=1, store=dist.HashStore())
    met = table(given.device, given.count, given.rounds)
    host_table(given.device)
    dist.destroy_process_group()
    return int(bool(wrong) or not met)


if __name__ == "__main__":
    sys.exit(main())
