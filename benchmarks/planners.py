"""What planners of redistributions plan, and how fast: Shardwise's and the two of torch.distributed.tensor (the peer).

A layout is written as the axes that sharding each dim, major to minor; axes that sharding nothing replicate. Nothing is moved:
a plan is read as bytes that the worst rank receives, the largest local tensor between its steps, and collectives. Times are
those of the planning thread on its processor, since nothing waits for anything.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    _optimize_transform_infos,
    clear_redistribute_planner_cache,
)

import shardwise as sw
from shardwise.planning.bounds import lower_bound

AXES = "abcd"
Cuts = tuple[tuple[str, ...], ...]
Pair = tuple[Cuts, Cuts]


class Outcome(NamedTuple):
    """What one plan does."""

    received: int
    peak: int
    collectives: int


class Planner(NamedTuple):
    """One planner: how it writes a layout, plans, forgets all plans, and what a plan of its means."""

    name: str
    layout: Callable[[Cuts], Any]
    plan: Callable[[Any, Any], Any]
    forget: Callable[[], None]
    read: Callable[[Any, Any], Outcome]
    #: whether it takes axes on one dim in another order than the mesh's
    orders: bool


class Measured(NamedTuple):
    """What one planner does for one pair: the plan, seconds of planning it when all is forgotten, and when it is known."""

    outcome: Outcome
    cold: float
    warm: float


# ── layouts ──


def unordered(axes: str, ndim: int) -> list[Cuts]:
    """Every choice of Replicate or Shard(dim) for every axis; the axes of one dim in mesh order."""
    choices = product(range(-1, ndim), repeat=len(axes))
    return [tuple(tuple(a for a, d in zip(axes, dims, strict=True) if d == dim) for dim in range(ndim)) for dims in choices]


def ordered(axes: str, ndim: int) -> list[Cuts]:
    """The same in every order of the axes of one dim."""
    return [cuts for plain in unordered(axes, ndim) for cuts in product(*(permutations(dim) for dim in plain))]


def pairs_of(layouts: Sequence[Cuts]) -> list[Pair]:
    """All pairs of different layouts."""
    return [(have, want) for have in layouts for want in layouts if have != want]


# ── planners ──


def our_planner(name: str, shape: Sequence[int], sizes: Sequence[int], without: tuple[str, ...]) -> Planner:
    """Ours, without some kinds of steps."""
    mesh = sw.init_mesh(**dict(zip(AXES, sizes, strict=False)), ranks=range(math.prod(sizes)))

    def layout(cuts: Cuts) -> Any:
        return sw.layout(shape, mesh, {axis: sw.Shard(dim) for dim, axes in enumerate(cuts) for axis in axes})

    def plan(have: Any, want: Any) -> Any:
        return sw.plan(have, want, None, without)

    def read(plan: Any, have: Any) -> Outcome:
        return Outcome(plan.bytes, max([have.nbytes, *(step.after.nbytes for step in plan.steps)]), plan.collectives)

    return Planner(name, layout, plan, sw.cache_clear, read, orders=True)


def peer_planner(name: str, shape: Sequence[int], sizes: Sequence[int], graph: bool) -> Planner:
    """The peer's: greedy by default, by Dijkstra's algorithm where it is asked to (`graph`)."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(sizes)).view(*sizes), mesh_dim_names=tuple(AXES[: len(sizes)]))
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)

    def layout(cuts: Cuts) -> DTensorSpec:
        dims = {axis: dim for dim, axes in enumerate(cuts) for axis in axes}
        placements = tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in AXES[: len(sizes)])
        order = [ShardOrderEntry(dim, tuple(map(AXES.index, axes))) for dim, axes in enumerate(cuts) if axes]
        return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=tuple(order), use_strided_shard_as_shard_order=False)

    def plan(have: DTensorSpec, want: DTensorSpec) -> Any:
        return _optimize_transform_infos(_gen_transform_infos(have, want, graph), mesh, have.placements, want.placements)

    def forget() -> None:
        _gen_transform_infos.cache_clear()
        clear_redistribute_planner_cache()

    def read(steps: Any, have: DTensorSpec) -> Outcome:
        return _read_peer(steps, have, sizes)

    return Planner(name, layout, plan, forget, read, orders=graph)


def _read_peer(steps: Any, have: DTensorSpec, sizes: Sequence[int]) -> Outcome:
    """The bytes of collectives that do what the peer's steps say, each over one axis; every sharding of it must be even."""
    now = list(have.placements)
    size = 4 * math.prod(have.shape)
    received = collectives = 0
    held = peak = size // math.prod(n for n, p in zip(sizes, now, strict=True) if p.is_shard())
    for step in steps:
        (source, target), ranks = step.src_dst_placements, sizes[step.mesh_dim]
        if source.is_shard():
            collectives += 1
            received += held * (ranks - 1) if target.is_replicate() else held * (ranks - 1) // ranks
        now[step.mesh_dim] = target
        held = size // math.prod(n for n, p in zip(sizes, now, strict=True) if p.is_shard())
        peak = max(peak, held)
    return Outcome(received, peak, collectives)


def planners(shape: Sequence[int], sizes: Sequence[int]) -> list[Planner]:
    """The four, for one tensor on one mesh."""
    return [
        peer_planner("peer, default", shape, sizes, graph=False),
        peer_planner("peer, Dijkstra", shape, sizes, graph=True),
        our_planner("ours, no exchange", shape, sizes, ("exchange",)),
        our_planner("ours", shape, sizes, ()),
    ]


# ── measuring ──


def plan_anew(planner: Planner, pair: Pair) -> tuple[Outcome, float]:
    """The plan of a pair with everything forgotten and layouts made anew, and the seconds that planning took."""
    planner.forget()
    have, want = map(planner.layout, pair)
    start = time.thread_time()
    plan = planner.plan(have, want)
    took = time.thread_time() - start
    return planner.read(plan, have), took


def plan_again(planner: Planner, pair: Pair, repeats: int) -> float:
    """Seconds of planning a pair that is known."""
    have, want = map(planner.layout, pair)
    planner.plan(have, want)
    start = time.thread_time()
    for _ in range(repeats):
        planner.plan(have, want)
    return (time.thread_time() - start) / repeats


def measure(planner: Planner, pair: Pair, cold_rounds: int) -> Measured:
    """The best of a few cold plans, and the warm one."""
    plans = [plan_anew(planner, pair) for _ in range(cold_rounds)]
    return Measured(plans[0][0], min(took for _, took in plans), plan_again(planner, pair, repeats=100))


class Summary(NamedTuple):
    """One planner over many pairs. `geomean` and `worst` are of bytes over the lower bound; times in seconds."""

    geomean: float
    worst: float
    collectives: int
    over_memory: float
    cold: float
    coldest: float
    warm: float


def summary(measured: Sequence[Measured], bounds: Sequence[int], floors: Sequence[int]) -> Summary:
    """Pairs that need nothing from other ranks have no ratio, unless their plan receives something: then it is infinite.

    `floors` is what a rank holds before or after, whichever is more.
    """
    plans = [each.outcome for each in measured]
    ratios = [p.received / b if b else math.inf for p, b in zip(plans, bounds, strict=True) if b or p.received]
    return Summary(
        geomean=math.exp(statistics.fmean(map(math.log, ratios))),
        worst=max(ratios),
        collectives=max(plan.collectives for plan in plans),
        over_memory=statistics.fmean(plan.peak > floor for plan, floor in zip(plans, floors, strict=True)),
        cold=statistics.median(each.cold for each in measured),
        coldest=max(each.cold for each in measured),
        warm=statistics.median(each.warm for each in measured),
    )


def compare(sides: Sequence[Planner], pairs: Iterable[Pair], cold_rounds: int) -> dict[str, Summary]:
    """Every planner on every pair, in turns; the last one is ours, whose layouts the lower bounds are taken from."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    layout = sides[-1].layout
    measured: dict[str, list[Measured]] = {side.name: [] for side in sides}
    bounds, floors = [], []
    for pair in pairs:
        for side in sides:
            measured[side.name].append(measure(side, pair, cold_rounds))
        have, want = map(layout, pair)
        bounds.append(lower_bound(have, want))
        floors.append(max(have.nbytes, want.nbytes))
    return {name: summary(each, bounds, floors) for name, each in measured.items()}
