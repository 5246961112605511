"""Plans: exact, deterministic, within memory, never below the lower bound, and proven; the proof refuses what is wrong."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import pytest

import shardwise as sw
from shardwise import Mesh, Partial, PlanError, Replicate, Shard
from shardwise.layouts.layout import Factor, Layout, make_layout, whole
from shardwise.planning.bounds import lower_bound, missing
from shardwise.planning.cost import ORDINARY, Link, set_links
from shardwise.planning.plan import Plan
from shardwise.planning.proof import prove
from shardwise.planning.search import _FAMILIES, Node, Space, search
from shardwise.planning.step import Step

NAMES = "abcd"


def mesh_of(*sizes: int, **words: Any) -> Mesh:
    return Mesh(tuple(NAMES[: len(sizes)]), sizes, range(math.prod(sizes)), "cpu", "simulated", **words)


def layouts(mesh: Mesh, shape: tuple[int, ...], options: list[Any]) -> list[Layout]:
    """Every placement of every axis, in every order of axes."""
    found = {}
    for order in itertools.permutations(mesh.axes):
        for placements in itertools.product(options, repeat=mesh.ndim):
            found[make_layout(shape, mesh, dict(zip(order, placements, strict=True)))] = None
    return list(found)


def pairs(mesh: Mesh, shape: tuple[int, ...], options: list[Any], count: int, seed: int = 0) -> Iterator[tuple[Layout, Layout]]:
    every = layouts(mesh, shape, options)
    chance = random.Random(seed)
    for _ in range(count):
        yield chance.choice(every), chance.choice(every)


CUTS = [Replicate(), Shard(0), Shard(1)]
ALL = [*CUTS, Partial("sum"), Partial("avg")]


def cheapest(have: Layout, want: Layout, cap: float, without: tuple[str, ...]) -> float:
    """Dijkstra's search over the same graph with nothing left out: what the quick search must agree with."""
    space = Space(have, want, cap, without, False)
    space.straight = False
    best: dict[Node, float] = {space.start: 0.0}
    queue: list[tuple[float, int, Node]] = [(0.0, 0, space.start)]
    count = 0
    while queue:
        spent, _, node = heappop(queue)
        if node == space.goal:
            return spent
        for family in _FAMILIES:
            for edge in family(space, node, math.inf):
                total = spent + edge.seconds
                if total < best.get(edge.node, math.inf):
                    best[edge.node] = total
                    count += 1
                    heappush(queue, (total, count, edge.node))
    return math.inf


@pytest.mark.parametrize("without", [(), ("exchange",), ("exchange", "permute")], ids=str)
@pytest.mark.parametrize("slow", [(), ("a",)], ids=["alike", "slow"])
@pytest.mark.parametrize(("sizes", "shape"), [((2, 4), (16, 16)), ((2, 2, 2), (1024, 4096)), ((2, 3), (5, 4))], ids=str)
def test_the_search_is_exact(sizes: tuple[int, ...], shape: tuple[int, int], slow: tuple[str, ...], without: Any) -> None:
    mesh = mesh_of(*sizes, slow=slow)
    for have, want in pairs(mesh, shape, ALL, 12):
        cap = max(have.nbytes, want.nbytes)
        steps = search(have, want, cap, without)
        least = cheapest(have, want, cap, without)
        assert (steps is None) == (least == math.inf)
        if steps is not None:
            given_away = 0.0 if slow or without else 0.2 * ORDINARY.latency  # see `Space.straight`
            assert sw.plan(have, want, None, without).cost <= (least + given_away) * (1 + 1e-9), f"{have} → {want}"


@pytest.mark.parametrize(
    ("sizes", "shape"), [((2, 4), (512, 256)), ((2, 2, 2), (16, 12)), ((3, 2), (5, 3)), ((4,), (2, 1))], ids=str
)
def test_plans_keep_their_promises(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    for have, want in pairs(mesh_of(*sizes), shape, ALL, 150):
        plan = sw.plan(have, want)
        assert plan.bytes >= plan.lower_bound, plan
        assert plan.peak_bytes <= max(have.nbytes, want.nbytes), plan
        assert plan.layouts[0] is have and plan.layouts[-1] is want
        prove(plan.steps, have, want)


@pytest.mark.parametrize("sizes", [(4, 2, 8), (2, 2, 2), (2, 4)], ids=str)
def test_cuts_are_moved_at_the_lower_bound_in_one_collective(sizes: tuple[int, ...]) -> None:
    for have, want in pairs(mesh_of(*sizes), (16384, 16384), CUTS, 60):
        plan = sw.plan(have, want)
        assert plan.bytes == plan.lower_bound and plan.collectives <= 1, plan


def test_without_exchanges_little_more_is_received() -> None:
    ratios = []
    for have, want in pairs(mesh_of(4, 2, 8), (16384, 16384), CUTS, 60):
        plan = sw.plan(have, want, without=("exchange",))
        ratios.append(plan.ratio)
        assert plan.ratio <= 2.5 and plan.collectives <= 4 and plan.peak_bytes <= max(have.nbytes, want.nbytes), plan
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.16


def kinds(have: Any, want: Any, mesh: Mesh, shape: tuple[int, ...] = (8, 8)) -> list[tuple[str, tuple[str, ...]]]:
    return [(s.kind, s.axes) for s in sw.plan(sw.layout(shape, mesh, have), sw.layout(shape, mesh, want)).steps]


R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
MERGED: dict[str, tuple[Any, Any, list[tuple[str, tuple[str, ...]]]]] = {
    "all-reduces that are not neighbours": ([P, R, P], [R, R, R], [("all_reduce", ("a", "c"))]),
    "sum and avg": ([P, Partial("avg"), R], [R, R, R], [("all_reduce", ("a", "b"))]),
    "reduce-scatters": ([P, P, P], [S0, S0, S0], [("reduce_scatter", ("a", "b", "c"))]),
    "reduce-scatters onto two dims": ([P, P, R], [S0, S1, R], [("reduce_scatter", ("a", "b"))]),
    "reduce-scatters in descending order": ({"a": P, "b": P}, {"b": S0, "a": S0}, [("reduce_scatter", ("a", "b"))]),
    "all-gathers": ([S0, S0, S0], [R, R, R], [("all_gather", ("a", "b", "c"))]),
    "all-gathers of two dims": ([S0, S1, R], [R, R, R], [("all_gather", ("a", "b"))]),
    "all-gathers in descending order": ({"c": S0, "a": S0}, [R, R, R], [("all_gather", ("a", "c"))]),
    "all-to-alls": ([S0, S0, R], [S1, S1, R], [("all_to_all", ("a", "b"))]),
    "all-to-alls in descending order": ({"b": S0, "a": S0}, {"b": S1, "a": S1}, [("all_to_all", ("a", "b"))]),
    "a swap of axes": ([S0, S1, R], [S1, S0, R], [("permute", ("a", "b"))]),
    "another axis": ([S0, R, R], [R, S0, R], [("permute", ("a", "b"))]),
}


@pytest.mark.parametrize("case", MERGED)
def test_collectives_merge(case: str) -> None:
    have, want, steps = MERGED[case]
    assert kinds(have, want, mesh_of(2, 2, 2)) == steps


@pytest.mark.parametrize("case", [name for name in MERGED if "all-to-all" not in name and "axis" not in name])
def test_uneven_collectives_merge(case: str) -> None:
    have, want, steps = MERGED[case]
    assert kinds(have, want, mesh_of(2, 2, 2), (5, 7)) == steps


def test_replicas_share_the_work_of_a_large_reduction() -> None:
    mesh = mesh_of(4, 2)
    plan = sw.plan(sw.layout((4096, 4096), mesh, [P, R]), sw.layout((4096, 4096), mesh, [R, R]))
    assert [step.kind for step in plan.steps] == ["take", "reduce_scatter", "all_gather"]
    assert plan.bytes == plan.lower_bound < 2 * 3 / 4 * plan.want.nbytes


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2, 1), (1, 2, 1)], ids=str)
def test_axes_of_one_rank_cost_nothing(sizes: tuple[int, ...]) -> None:
    mesh = mesh_of(*sizes)
    for have, want in pairs(mesh, (4, 6), ALL, 40):
        plan = sw.plan(have, want)
        assert plan.collectives <= (mesh.size() > 1) * 2 and plan.bytes >= plan.lower_bound


def test_slow_axes_carry_less() -> None:
    shape, fast, mixed = (4096, 4096), mesh_of(2, 4), mesh_of(2, 4, slow=("a",))
    (merged,) = kinds([S0, S1], [R, R], fast, shape)
    assert merged == ("all_gather", ("a", "b"))
    assert kinds([S0, S1], [R, R], mixed, shape) == [("all_gather", ("a",)), ("all_gather", ("b",))]


def test_replicas_share_slow_links() -> None:
    mesh = mesh_of(2, 4, slow=("a",))
    plan = sw.plan(sw.layout((4096, 4096), mesh, [S0, R]), sw.layout((4096, 4096), mesh, [S1, R]))
    direct = Plan(plan.have, plan.want, (Step("all_to_all", ("a",), plan.have, plan.want),))
    assert [step.kind for step in plan.steps] == ["take", "all_to_all", "all_gather"]
    assert plan.cost < 0.8 * direct.cost


def test_whole_tensors_are_cut_without_communication() -> None:
    mesh = mesh_of(4, 2, 8)
    whole_ = sw.layout((16384, 16384), mesh, [R, R, R])
    for want in layouts(mesh, (16384, 16384), CUTS):
        assert sw.plan(whole_, want).collectives == 0, want


def test_measured_links_change_the_plan() -> None:
    mesh = mesh_of(2, 4, slow=("b",))
    before = kinds([S0, S1], [R, R], mesh, (4096, 4096))
    set_links(mesh, {"a": ORDINARY, "b": Link(1.0, ORDINARY.per_byte)})
    try:
        assert kinds([S0, S1], [R, R], mesh, (4096, 4096)) == [("all_gather", ("a", "b"))] != before
    finally:
        set_links(mesh, {"a": ORDINARY, "b": Link(5e-5, 1 / 12.5e9)})


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_too_little_memory_states_both_numbers() -> None:
    mesh = mesh_of(2, 2)
    have, want = sw.layout((8, 8), mesh, [S0, R]), sw.layout((8, 8), mesh, [S1, S0])
    text = (
        r"f32\[8@a, 8\] → f32\[8@b, 8@a\] with max_bytes=100: a rank holds 128 bytes before and 64 after, "
        "so every plan needs at least 128"
    )
    with pytest.raises(PlanError, match=text):
        sw.plan(have, want, max_bytes=100)


def test_more_memory_is_used_where_it_helps() -> None:
    mesh = mesh_of(2, 2)
    have, want = sw.layout((8, 8), mesh, [S0, S1]), sw.layout((8, 8), mesh, [S1, S0])
    narrow = sw.plan(have, want, without=("exchange", "permute"))
    wide = sw.plan(have, want, max_bytes=1 << 20, without=("exchange", "permute"))
    assert narrow.peak_bytes == have.nbytes < wide.peak_bytes <= 1 << 20
    assert wide.cost < narrow.cost


def test_no_way_is_left() -> None:
    mesh = mesh_of(2)
    have, want = sw.layout((8, 8), mesh, [P]), sw.layout((8, 8), mesh, [R])
    with pytest.raises(PlanError, match="no steps are left that lead there"):
        sw.plan(have, want, without=("all_reduce", "reduce_scatter"))


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_groups_that_were_made_are_used() -> None:
    mesh = mesh_of(2, 2, groups="explicit")
    have, want = sw.layout((512, 512), mesh, [P, P]), sw.layout((512, 512), mesh, [R, R])
    with pytest.warns(UserWarning, match=r"no group over a, b; mesh.flatten\('a', 'b'\) makes it, and all_reduce over a,b"):
        apart = sw.plan(have, want)
    assert all(len(step.axes) == 1 for step in apart.steps if step.communicates)
    sw.cache_clear()
    assert sw.plan(have, want).steps == apart.steps  # warned once for the shape of the mesh
    mesh.flatten("a", "b")
    assert [(step.kind, step.axes) for step in sw.plan(have, want).steps] == [("all_reduce", ("a", "b"))]


# ── the proof ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_proof_refuses_what_is_not_so() -> None:
    mesh = mesh_of(2, 2)

    def at(*placements: Any) -> Layout:
        return sw.layout((5, 4), mesh, list(placements))

    wrong = [
        Step("all_gather", ("a",), at(S0, S0), make_layout((5, 4), mesh, {"b": S0})),  # a is not the minor axis
        Step("all_gather", ("a",), at(S0, S1), at(R, R)),  # b is gathered as well
        Step("take", ("a",), at(S0, R), at(S1, R)),  # nobody holds its columns
        Step("take", (), at(P, R), at(R, R)),  # nothing was reduced
        Step("all_reduce", ("a",), at(P, P), at(R, R)),  # b is still partial
        Step("reduce_scatter", ("a",), at(P, R), at(R, S0)),  # a does not sharded
        Step("exchange", ("a",), at(S0, S1), at(S1, S0)),  # half of it lies along b
        Step("all_to_all", ("a",), at(S0, R), at(S1, R)),  # five rows are not equal shards
        Step("permute", ("a",), at(S0, R), at(S1, R)),  # rows are not columns
        Step("split", ("a",), at(S0, R), at(P, R)),  # a rank holds its rows only
        Step("embed", ("a",), at(S0, S0), at(P, S0)),
        Step("scale", ("a",), at(P, R), at(Partial("max"), R)),
    ]
    for step in wrong:
        with pytest.raises(PlanError, match="does not denote its target"):
            prove((step,), step.before, step.after)
    with pytest.raises(PlanError, match="end in"):
        prove((), at(S0, R), at(R, R))
    with pytest.raises(PlanError, match="does not start from"):
        prove((Step("take", ("a",), at(R, R), at(S0, R)),), at(S1, R), at(S0, R))


# ── the bound ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def held(layout: Layout, place: int) -> set[tuple[int, ...]]:
    spans = ([i for low, high in layout.runs(dim, place) for i in range(low, high)] for dim in range(layout.ndim))
    return set(itertools.product(*spans))


@pytest.mark.parametrize(("sizes", "shape"), [((2, 2), (5, 3)), ((2, 3), (4, 6)), ((2, 2, 2), (8, 6))], ids=str)
def test_what_is_missing_is_counted_from_sets(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    mesh = mesh_of(*sizes)
    every = list(pairs(mesh, shape, CUTS, 40))
    if shape[1] % 2 == 0:
        strided = Layout.of(mesh, [[whole(shape[0])], [whole(shape[1] // 2), Factor(2, ("a",), (1, 1))]])
        every += [(strided, strided.replicated()), (strided.replicated(), strided)]
    for have, want in every:
        most = max(len(held(want, p) - held(have, p)) for p in range(mesh.size()))
        assert missing(have, want) == 4 * most == lower_bound(have, want)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_reductions_have_the_textbook_bounds(ranks: int) -> None:
    mesh = mesh_of(ranks)
    partials, whole_, cut = (sw.layout((64,), mesh, [p]) for p in (P, R, S0))
    assert lower_bound(partials, whole_) == 2 * (ranks - 1) * 256 // ranks
    assert lower_bound(partials, cut) == (ranks - 1) * 256 // ranks
    assert lower_bound(cut, whole_) == (ranks - 1) * 256 // ranks
    assert lower_bound(whole_, partials) == lower_bound(cut, partials) == 0


# ── the certificate reads well, and is the same everywhere ────────────────────────────────────────────────────────────


def test_a_plan_tells_what_was_rejected() -> None:
    mesh = mesh_of(4, 2)
    text = sw.plan(sw.layout((4096, 4096), mesh, [P, R]), sw.layout((4096, 4096), mesh, [R, R])).explain()
    assert "no reduce-scatter  1.72 ms, 2 collectives, 83,886,080 bytes, peak 67,108,864: take over b, all_reduce" in text, text
    assert "83,886,080 bytes received (at least 83,886,080: 1.00)" in text, text


PROGRAM = """
import random, itertools
import shardwise as sw
from shardwise import Mesh, Partial, Replicate, Shard
mesh = Mesh(tuple("abc"), (2, 2, 2), range(8), "cpu", "simulated", slow=("a",))
options = [Replicate(), Shard(0), Shard(1), Partial()]
chance = random.Random(0)
for _ in range(40):
    have, want = ([chance.choice(options) for _ in range(3)] for _ in range(2))
    print(sw.plan(sw.layout((64, 48), mesh, have), sw.layout((64, 48), mesh, want)))
"""


def test_plans_are_the_same_in_every_process() -> None:
    said = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        said.add(done.stdout)
    assert len(said) == 1 and len(next(iter(said))) > 1000


def test_large_meshes_are_planned() -> None:
    mesh = mesh_of(64, 8, 32)
    gathered = sw.plan(sw.layout((65536, 8192), mesh, [S0, S0, S0]), sw.layout((65536, 8192), mesh, [R, R, R]))
    assert [step.kind for step in gathered.steps] == ["all_gather"]
    plan = sw.plan(sw.layout((65536, 8192), mesh, [S0, S1, R]), sw.layout((65536, 8192), mesh, [S0, R, S1]))
    assert plan.collectives == 1 and plan.bytes == plan.lower_bound <= plan.want.nbytes == 4 * 65536 * 8192 // 64 // 32
