"""Plans: deterministic, within memory, never below the lower bound, and proven."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

import shardwise as sw
from shardwise import Mesh, Partial, PlanError
from shardwise.planning.cost import ORDINARY, Link, set_links
from shardwise.planning.plan import Plan
from shardwise.planning.proof import prove
from shardwise.planning.step import Step
from tests.helpers.plans import ALL, S0, S1, SHARDED, P, R, layouts, mesh_of, pairs


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
def test_shards_are_moved_at_the_lower_bound_in_one_collective(sizes: tuple[int, ...]) -> None:
    for have, want in pairs(mesh_of(*sizes), (16384, 16384), SHARDED, 60):
        plan = sw.plan(have, want)
        assert plan.bytes == plan.lower_bound and plan.collectives <= 1, plan


def test_without_exchanges_little_more_is_received() -> None:
    ratios = []
    for have, want in pairs(mesh_of(4, 2, 8), (16384, 16384), SHARDED, 60):
        plan = sw.plan(have, want, without=("exchange",))
        ratios.append(plan.ratio)
        assert plan.ratio <= 2.5 and plan.collectives <= 4 and plan.peak_bytes <= max(have.nbytes, want.nbytes), plan
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.16


def kinds(have: Any, want: Any, mesh: Mesh, shape: tuple[int, ...] = (8, 8)) -> list[tuple[str, tuple[str, ...]]]:
    return [(s.kind, s.axes) for s in sw.plan(sw.layout(shape, mesh, have), sw.layout(shape, mesh, want)).steps]


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


def test_whole_tensors_are_sharded_without_communication() -> None:
    mesh = mesh_of(4, 2, 8)
    whole_ = sw.layout((16384, 16384), mesh, [R, R, R])
    for want in layouts(mesh, (16384, 16384), SHARDED):
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
