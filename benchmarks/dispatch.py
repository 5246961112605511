"""What operators and a training step cost: plain torch, torch.distributed.tensor (the peer) and Shardwise, in one run.

    python benchmarks/dispatch.py            warm operators, cold operators, the training step
    python benchmarks/dispatch.py --six      cold operators of the peer on more than three axes too (minutes)

A fake process group of 64 ranks takes no time to communicate, so what is measured is the libraries' own work. Rounds
alternate between the sides, so that noise meets all of them, and the best round counts. Exits with 1 when a target is
missed.
"""

import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer_api
import torch.nn.functional as F
from small_gpt import distributed_step, plain_step
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

WORLD = 64
AXES = "abcdef"
SHAPES = [(64,), (8, 8), (4, 4, 4), (4, 4, 2, 2), (4, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2)]
# The largest allowed ratio of our time to the peer's.
TARGETS = {
    "add": 0.85,
    "mm": 0.85,
    "relu": 0.85,
    "sum": 0.85,
    "x*2.0": 0.5,
    "view": 0.5,
    "add_": 0.5,
    "from_local": 0.5,
    "S->R": 0.5,
    "layer_norm": 0.65,
}
STEP_TARGET, COLLECTIVES_TARGET, COLD_TARGET_MS = 0.45, 40, 5.0
Call = Callable[[], Any]


class Side(NamedTuple):
    """One of the two libraries: the module with its names, and how it builds a mesh of given axes and sizes."""

    api: ModuleType
    make_mesh: Callable[[Sequence[str], Sequence[int]], Any]


def peer_mesh(axes: Sequence[str], sizes: Sequence[int]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(sizes)).view(*sizes), mesh_dim_names=tuple(axes))


def our_mesh(axes: Sequence[str], sizes: Sequence[int]) -> Any:
    return sw.init_mesh(**dict(zip(axes, sizes, strict=True)), ranks=range(math.prod(sizes)))


PEER, OURS = Side(peer_api, peer_mesh), Side(sw, our_mesh)


# ── time ──


def seconds(call: Call, repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def best_of_rounds(calls: Sequence[Call], repeats: int, warm_up: int, rounds: int = 40) -> list[float]:
    """The best seconds per call of each; many short rounds, because a shared machine drifts within seconds."""
    for call in calls:
        seconds(call, warm_up)
    times = [[seconds(call, repeats) for call in calls] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


# ── what is run ──


def plain_calls() -> dict[str, Call]:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    return {
        "add": lambda: a + b,
        "mm": lambda: a @ b,
        "relu": lambda: torch.relu(a),
        "x*2.0": lambda: a * 2.0,
        "view": lambda: a.view(8, 2, 4),
        "add_": lambda: a.add_(1e-9),
        "layer_norm": lambda: torch.layer_norm(a, (8,)),
        "sum": lambda: a.sum(),
    }


def distributed_calls(side: Side) -> dict[str, Call]:
    api, mesh = side.api, side.make_mesh("xy", (8, 8))  # axes that no cold mesh has
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    rows, whole = [api.Shard(0), api.Replicate()], [api.Replicate(), api.Replicate()]
    x, y, w = (api.DTensor.from_local(t, mesh, p, run_check=False) for t, p in ((a, rows), (b, rows), (b, whole)))
    return {
        "add": lambda: x + y,
        "mm": lambda: x @ w,
        "relu": lambda: torch.relu(x),
        "x*2.0": lambda: x * 2.0,
        "view": lambda: x.view(64, 2, 4),
        "add_": lambda: x.add_(1e-9),
        "layer_norm": lambda: torch.layer_norm(x, (8,)),
        "sum": lambda: x.sum(),
        "from_local": lambda: api.DTensor.from_local(a, mesh, rows, run_check=False),
        "S->R": lambda: x.redistribute(placements=[api.Replicate()] * 2),
    }


def cold_ms(side: Side, sizes: Sequence[int]) -> tuple[float, float]:
    """Milliseconds of the first mm and the first add on a new mesh."""
    api, mesh = side.api, side.make_mesh(AXES[: len(sizes)], sizes)
    rest = [api.Replicate()] * (len(sizes) - 1)
    x = api.distribute_tensor(torch.randn(128, 128), mesh, [api.Shard(0), *rest])
    w = api.distribute_tensor(torch.randn(128, 128), mesh, [*rest, api.Shard(1)])
    return seconds(lambda: x @ w) * 1e3, seconds(lambda: x + w) * 1e3


def cold_linear_ms() -> float:
    """Milliseconds of the first F.linear on (dp, cp, tp): batch and sequence of the input shard, and the output of the
    weight."""
    mesh = OURS.make_mesh(("dp", "cp", "tp"), (2, 2, 2))
    x = sw.distribute_tensor(torch.randn(4, 6, 8), mesh, {"dp": sw.Shard(0), "cp": sw.Shard(1)})
    w = sw.distribute_tensor(torch.randn(10, 8), mesh, {"tp": sw.Shard(0)})
    return seconds(lambda: F.linear(x, w)) * 1e3


def our_collectives(step: Call) -> int:
    with sw.trace_comm() as log:
        step()
    return sum(log.counts().values())


def peer_collectives(step: Call) -> int:
    with CommDebugMode() as comm:
        step()
    return sum(comm.get_comm_counts().values())


# ── the three tables; each gives the names of missed targets ──


def verdict(ok: bool) -> str:
    return "OK" if ok else "MISS"


def warm_table() -> list[str]:
    print(f"{'warm, µs':12}{'plain':>9}{'peer':>9}{'ours':>9}{'ours/peer':>11}{'target':>9}")
    plain, peer, ours = plain_calls(), distributed_calls(PEER), distributed_calls(OURS)
    missed = []
    for name, target in TARGETS.items():
        calls = [peer[name], ours[name], *([plain[name]] if name in plain else [])]
        repeats = 30 if name == "S->R" else 300
        with torch.no_grad():
            peer_s, our_s, *plain_s = best_of_rounds(calls, repeats, warm_up=200)
        ok = our_s <= target * peer_s
        missed += [] if ok else [name]
        first = f"{plain_s[0] * 1e6:9.2f}" if plain_s else f"{'':9}"
        ratio = f"{our_s / peer_s:11.2f}{target:9.2f}  {verdict(ok)}"
        print(f"{name:12}{first}{peer_s * 1e6:9.2f}{our_s * 1e6:9.2f}{ratio}", flush=True)
    return missed


def cold_table(most_peer_axes: int) -> list[str]:
    print(f"\n{'cold, ms':22}{'peer mm':>9}{'peer add':>9}{'our mm':>9}{'our add':>9}{'target':>9}")
    missed = []
    for sizes in SHAPES:
        cells = [f"{ms:9.1f}" for ms in cold_ms(PEER, sizes)] if len(sizes) <= most_peer_axes else [f"{'':9}"] * 2
        ours = cold_ms(OURS, sizes)
        ok = max(ours) < COLD_TARGET_MS
        missed += [] if ok else [f"cold on {len(sizes)} axes"]
        cells += [f"{ms:9.2f}" for ms in ours]
        print(f"{sizes!s:22}{''.join(cells)}{COLD_TARGET_MS:9.1f}  {verdict(ok)}", flush=True)
    linear = cold_linear_ms()
    print(f"{'F.linear on 2x2x2':40}{linear:9.2f}{'':9}{COLD_TARGET_MS:9.1f}  {verdict(linear < COLD_TARGET_MS)}")
    return missed + ([] if linear < COLD_TARGET_MS else ["cold F.linear"])


def step_table() -> list[str]:
    peer = distributed_step(peer_api, peer_mesh(("dp", "tp"), (2, 4)))
    ours = distributed_step(sw, our_mesh(("dp", "tp"), (2, 4)))
    first_peer, first_ours = seconds(peer), seconds(ours)
    plain_s, peer_s, our_s = best_of_rounds([plain_step(), peer, ours], repeats=3, warm_up=5)
    counts = peer_collectives(peer), our_collectives(ours)
    ok_time, ok_count = our_s <= STEP_TARGET * peer_s, counts[1] <= COLLECTIVES_TARGET
    print(f"\n{'training step':22}{'plain':>9}{'peer':>9}{'ours':>9}{'ours/peer':>11}{'target':>9}")
    print(f"{'first step, ms':31}{first_peer * 1e3:9.0f}{first_ours * 1e3:9.0f}{first_ours / first_peer:11.2f}")
    ratio = f"{our_s / peer_s:11.2f}{STEP_TARGET:9.2f}  {verdict(ok_time)}"
    print(f"{'warm step, ms':22}{plain_s * 1e3:9.2f}{peer_s * 1e3:9.2f}{our_s * 1e3:9.2f}{ratio}")
    print(f"{'collectives':31}{counts[0]:9}{counts[1]:9}{'':11}{COLLECTIVES_TARGET:9}  {verdict(ok_count)}")
    return [name for name, ok in (("step", ok_time), ("collectives", ok_count)) if not ok]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    # A collection in the middle of a timed call would count against whichever side it meets.
    gc.disable()
    missed = warm_table() + cold_table(most_peer_axes=6 if "--six" in sys.argv else 3) + step_table()
    dist.destroy_process_group()
    if missed:
        sys.exit(f"\nmissed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
