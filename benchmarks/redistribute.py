"""What moving a tensor from one layout to another costs: Shardwise and torch.distributed.tensor (the peer), in one run.

    python benchmarks/redistribute.py plan             the plans: bytes, memory, collectives, time to plan
    python benchmarks/redistribute.py run --ranks 4    the time they take, on Gloo processes on this machine
    python benchmarks/redistribute.py run --ranks 8 --flatten    after the peer's user has flattened the mesh for it

Plans are those of all pairs of Replicate and Shard layouts of a tensor of 1 GiB, read as bytes over the least that any
algorithm must bring to the worst rank; pairs that need nothing from other ranks have no such ratio. The time of a move is that
of the slowest rank; rounds alternate between the sides and the best one counts; a move over its target is given as many rounds
again. Both sides' results are compared with the dense tensor first. Exits with 1 when a target is missed.
"""

import argparse
import gc
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer_api
import torch.multiprocessing as mp
from planners import AXES, Pair, Summary, compare, ordered, pairs_of, planners, unordered
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

# ── plans ──

WORLD, SIDE = 64, 16384
MESHES = [(4, 2, 8), (2, 2, 2), (2, 4)]
SAMPLE, PEER_SAMPLE = 300, 30
# The largest allowed figures of a plan, without exchanges (all-to-all of unequal parts) and with them.
MOST_RATIO = {"ours, no exchange": (1.16, 2.5), "ours": (1.005, 1.005)}
MOST_COLLECTIVES, COLD_MS, WARM_US, COLD_MS_OF_FOUR = 4, 5.0, 20.0, 30.0


def verdict(missed: Sequence[str]) -> str:
    return f"MISS {', '.join(missed)}" if missed else "OK"


def missed_by(name: str, found: Summary, cold_ms: float, ratios: bool) -> list[str]:
    """The targets that one of our planners misses; there may be none for `ratios` of bytes, and the time to plan counts for
    the planner as it is used."""
    geomean, worst = MOST_RATIO[name] if ratios else (math.inf, math.inf)
    reached = {
        "geo-mean": found.geomean <= geomean,
        "worst": found.worst <= worst,
        "collectives": found.collectives <= MOST_COLLECTIVES,
        "memory": found.over_memory == 0,
        "cold": found.coldest * 1e3 < cold_ms or name != "ours",
        "warm": found.warm * 1e6 < WARM_US,
    }
    return [target for target, ok in reached.items() if not ok]


def plan_rows(title: str, found: dict[str, Summary], cold_ms: float, ratios: bool = True) -> list[str]:
    """Print one table; the names of missed targets."""
    head = f"{'geo-mean':>10}{'worst':>8}{'collectives':>13}{'over memory':>13}{'cold, ms':>10}{'worst':>8}{'warm, µs':>10}"
    print(f"\n{title:26}{head}")
    missed = []
    for name, row in found.items():
        missing = missed_by(name, row, cold_ms, ratios) if name in MOST_RATIO else []
        missed += [f"{title} {name}: {target}" for target in missing]
        plan = f"{row.geomean:10.3f}{row.worst:8.2f}{row.collectives:13}{row.over_memory:13.1%}"
        took = f"{row.cold * 1e3:10.2f}{row.coldest * 1e3:8.2f}{row.warm * 1e6:10.2f}"
        print(f"{name:26}{plan}{took}  {verdict(missing) if name in MOST_RATIO else ''}", flush=True)
    return missed


def plan_tables() -> list[str]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    # A collection in the middle of a timed plan would count against whichever side it meets.
    gc.disable()
    missed = []
    for sizes in MESHES:
        sides, axes = planners((SIDE, SIDE), sizes), AXES[: len(sizes)]
        compare(sides, pairs_of(unordered(axes, 2))[-3:], cold_rounds=1)
        for title, layouts in (("placements", unordered(axes, 2)), ("every order", ordered(axes, 2))):
            able = [side for side in sides if side.orders or title == "placements"]
            pairs = pairs_of(layouts)
            text = f"{'x'.join(map(str, sizes))}, {title}, {len(pairs)}"
            asked = title == "placements"
            missed += plan_rows(text, compare(able, pairs, cold_rounds=3 if asked else 1), COLD_MS, ratios=asked)
            gc.collect()
    missed += plan_rows(*four_axes(), COLD_MS_OF_FOUR, ratios=False)
    dist.destroy_process_group()
    return missed


def four_axes() -> tuple[str, dict[str, Summary]]:
    """A sample of pairs of a 3-D tensor on four axes; a smaller one for the peer's slow planner."""
    shape, sizes = (1024, 512, 512), (2, 2, 2, 2)
    pairs: list[Pair] = random.Random(0).sample(pairs_of(ordered(AXES, 3)), SAMPLE)
    sides = planners(shape, sizes)[1:]
    some, found = compare(sides, pairs[:PEER_SAMPLE], cold_rounds=1), compare(sides[1:], pairs, cold_rounds=3)
    return f"2x2x2x2, 3-D, {SAMPLE} ({PEER_SAMPLE})", some | found


# ── moves ──

# The edge of a square f32 tensor, and the seconds to spend on one move of it.
SIZES = {"4 KiB": (32, 1.0), "1 MiB": (512, 1.5), "64 MiB": (4096, 9.0)}
MOST_TIME, MEAN_TIME = 1.1, 0.6
# What training and serving ask for, on one axis and on two; P is Partial, S0 is Shard(0).
MOVES = (
    "S0 → R",  # gather a parameter
    "S1 → R",
    "R → S0",
    "P → R",  # reduce gradients
    "P → S0",  # reduce gradients and shard them
    "P → S1",
    "S0 → S1",  # from sequence to heads
    "uneven S0 → R",
    "uneven P → S0",
    "P,P → R,R",  # reduce gradients over data and context
    "P,R → R,R",
    "P,P → S0,S0",
    "P,S1 → S0,S1",  # shard the gradients of a weight that is sharded already
    "S0,S0 → R,R",
    "S0,S1 → R,R",
    "S0,S1 → S1,S0",  # swap the axes
    "S0,R → R,S0",  # from one axis to the other
    "S0,S0 → R,S0",
    "S1,S0 → S0,S0",  # from training to serving
    "uneven S0,S0 → R,R",
)


class Move(NamedTuple):
    """One pair of layouts of a square tensor, by its edge."""

    name: str
    edge: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.edge + 1, self.edge - 1) if "uneven" in self.name else (self.edge, self.edge)

    @property
    def ends(self) -> list[list[str]]:
        return [end.split(",") for end in self.name.removeprefix("uneven ").split(" → ")]


class Library(NamedTuple):
    """One of the two, and its meshes of one and of two axes."""

    api: ModuleType
    meshes: dict[int, Any]


def mesh_sizes(axes: int, ranks: int) -> tuple[int, ...]:
    return (ranks,) if axes == 1 else (2, ranks // 2)


def peer_mesh(axes: int, ranks: int, flatten: bool) -> DeviceMesh:
    names = tuple(AXES[:axes])
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(mesh_sizes(axes, ranks)), mesh_dim_names=names)
    if flatten and axes > 1:
        mesh._flatten()
    return mesh


def libraries(ranks: int, flatten: bool) -> list[Library]:
    ours = {n: sw.init_mesh(**dict(zip(AXES, mesh_sizes(n, ranks), strict=False))) for n in (1, 2)}
    return [Library(peer_api, {n: peer_mesh(n, ranks, flatten) for n in (1, 2)}), Library(sw, ours)]


def shard(dense: Tensor, end: Sequence[str], ranks: int) -> Tensor:
    """What this rank holds of a tensor; where it is partial, the k-th rank holds k times the tensor."""
    sizes, rank = mesh_sizes(len(end), ranks), dist.get_rank()
    point = (rank,) if len(end) == 1 else divmod(rank, sizes[1])
    for placement, size, k in zip(end, sizes, point, strict=True):
        if placement == "P":
            dense = dense * (k + 1)
        elif placement != "R":
            dim = int(placement[1:])
            step = -(-dense.shape[dim] // size)
            start = min(k * step, dense.shape[dim])
            dense = dense.narrow(dim, start, min(step, dense.shape[dim] - start))
    return dense.contiguous()


def total(end: Sequence[str], ranks: int) -> int:
    """How many times the tensor the partial shards add up to."""
    sizes = mesh_sizes(len(end), ranks)
    return math.prod(n * (n + 1) // 2 for placement, n in zip(end, sizes, strict=True) if placement == "P")


def mover(library: Library, move: Move, dense: Tensor, ranks: int) -> Callable[[], Tensor]:
    """A call that makes the move and waits for its result."""
    api, (have, want) = library.api, move.ends
    mesh = library.meshes[len(have)]
    kinds = {"R": api.Replicate, "P": api.Partial, "S0": lambda: api.Shard(0), "S1": lambda: api.Shard(1)}
    before, after = ([kinds[name]() for name in end] for end in (have, want))
    local = shard(dense, have, ranks)
    x = api.DTensor.from_local(local, mesh, before, run_check=False, shape=dense.shape, stride=dense.stride())

    def call() -> Tensor:
        moved = x.redistribute(placements=after).to_local()
        return moved.wait() if isinstance(moved, dist._functional_collectives.AsyncCollectiveTensor) else moved

    return call


# ── time ──


def slowest(values: Sequence[float]) -> list[float]:
    """Each value's largest among the ranks."""
    agreed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.tolist()


def seconds(call: Callable[[], Tensor], repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def trouble(call: Callable[[], Tensor], expected: Tensor) -> str:
    """What is wrong with a move on any rank, or nothing."""
    wrong = refused = False
    try:
        wrong = not torch.equal(call(), expected)
    except Exception as error:
        refused = True
        say(f"{type(error).__name__}: {error}")
    wrong, refused = slowest([wrong, refused])
    return "refuses" if refused else "is wrong" if wrong else ""


def race(calls: Sequence[Callable[[], Tensor]], budget: float) -> list[float]:
    """The best seconds of each, of as many rounds as fit into `budget` seconds."""
    once = slowest([seconds(call, 1) for call in calls])
    repeats = max(1, min(20, math.ceil(0.01 / max(once))))
    rounds = max(4, min(40, int(budget / (sum(once) * repeats))))
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        for which in range(len(calls)) if i % 2 else reversed(range(len(calls))):
            times[which].append(seconds(calls[which], repeats))
    return [min(slowest(each)) for each in times]


class Result(NamedTuple):
    """One move at one size: seconds of the peer and of ours, or what is wrong with either."""

    peer: float = math.nan
    ours: float = math.nan
    trouble: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    def __str__(self) -> str:
        return f"{self.trouble:>30}" if self.trouble else f"{self.peer * 1e3:14.3f}{self.ours * 1e3:10.3f}{self.ratio:6.2f}"


def measure(move: Move, sides: Sequence[Library], ranks: int, budget: float) -> Result:
    dense = (torch.arange(math.prod(move.shape), dtype=torch.int32) % 9973).float().view(move.shape)
    have, want = move.ends
    expected = shard(dense * total(have, ranks), want, ranks)
    calls = [mover(side, move, dense, ranks) for side in sides]
    wrong = [trouble(call, expected) for call in calls]
    if any(wrong):
        return Result(trouble="; ".join(f"{who} {what}" for who, what in zip(("peer", "ours"), wrong, strict=True) if what))
    first = Result(*race(calls, budget))
    if first.ratio <= MOST_TIME:
        return first
    return Result(*map(min, first[:2], race(calls, budget)))


def run_table(sides: Sequence[Library], ranks: int) -> list[str]:
    """Say how long every move takes at every size; the names of missed targets."""
    say(f"{f'{ranks} ranks, ms':20}" + "".join(f"{f'peer, {size}':>14}{'ours':>10}{'':6}" for size in SIZES))
    results: dict[str, list[Result]] = {size: [] for size in SIZES}
    for name in MOVES:
        for size, (edge, budget) in SIZES.items():
            results[size].append(measure(Move(name, edge), sides, ranks, budget))
            gc.collect()
        say(f"{name:20}" + "".join(str(column[-1]) for column in results.values()))
    missed = []
    results["all"] = [result for column in results.values() for result in column]
    for size, column in results.items():
        ratios = [result.ratio for result in column if not result.trouble]
        worst, mean = max(ratios), math.exp(statistics.fmean(map(math.log, ratios)))
        found = [name for name, ok in (("worst", worst <= MOST_TIME), ("geo-mean", mean <= MEAN_TIME)) if not ok]
        text = f"worst {worst:.2f} (target {MOST_TIME}), geo-mean {mean:.2f} (target {MEAN_TIME})"
        say(f"{size:20}{text}, of {len(ratios)} of {len(column)}  {verdict(found)}")
        missed += [f"{size} {name}" for name in found]
    return missed


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def worker(rank: int, ranks: int, store: str, flatten: bool, answer: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    patience = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=patience)
    # A collection in the middle of a timed move would count against whichever side it meets.
    gc.disable()
    missed = run_table(libraries(ranks, flatten), ranks)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        answer.put(missed)


def run_tables(ranks: int, flatten: bool) -> list[str]:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (ranks, str(Path(folder) / "store"), flatten, answer), nprocs=ranks)
    return answer.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "run"))
    parser.add_argument("--ranks", type=int, default=4, help="processes to run on, an even number")
    parser.add_argument("--flatten", action="store_true", help="flatten the peer's mesh of two axes, so that it can merge")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    missed = plan_tables() if given.what == "plan" else run_tables(given.ranks, given.flatten)
    if missed:
        sys.exit(f"\nmissed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
