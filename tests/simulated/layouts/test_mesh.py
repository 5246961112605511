"""What a mesh says of its links and groups: slow axes, explicit groups, flattened axes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Mesh, MeshError, Partial, Replicate, Shard
from shardwise.planning.cost import ORDINARY, SLOW, set_links

PLAIN = sw.init_mesh(dp=2, pp=2, tp=2)
EXPLICIT = sw.init_mesh(dp=2, pp=2, tp=2, slow=("pp",), groups="explicit")

# ── the facts ──


def test_the_facts_are_part_of_the_mesh() -> None:
    assert EXPLICIT is sw.init_mesh(dp=2, pp=2, tp=2, slow="pp", groups="explicit")
    variants = [PLAIN, EXPLICIT, sw.init_mesh(dp=2, pp=2, tp=2, slow="pp"), sw.init_mesh(dp=2, pp=2, tp=2, groups="explicit")]
    assert len(set(variants)) == 4
    assert sw.init_mesh(dp=2, pp=2, tp=2, slow=["tp", "dp", "tp"]).slow == ("dp", "tp")
    assert sw.init_mesh(dp=2, pp=2, tp=2, slow=(), groups="auto") is PLAIN


def test_groups_do_not_depend_on_them() -> None:
    assert EXPLICIT.fingerprint == PLAIN.fingerprint
    assert EXPLICIT.alias(("dp", "tp")) == PLAIN.alias(("dp", "tp"))


def test_a_sub_mesh_has_its_roots_facts() -> None:
    sub = EXPLICIT["dp", "pp"]
    assert (sub.slow, sub.explicit) == (("pp",), True) and EXPLICIT["tp"].slow == ()
    assert sub["pp"] is EXPLICIT["pp"] and sub.root is EXPLICIT
    assert (PLAIN.slow, PLAIN["tp"].explicit) == ((), False)


def test_they_are_shown_where_they_say_something() -> None:
    assert (repr(PLAIN), str(PLAIN)) == ("Mesh(dp=2, pp=2, tp=2)", "(dp=2, pp=2, tp=2)")
    assert repr(EXPLICIT) == "Mesh(dp=2, pp=2, tp=2, slow=('pp',), groups='explicit')"
    assert str(EXPLICIT["pp"]) == "(pp=2, slow=('pp',), groups='explicit')"
    assert repr(sw.init_mesh(dp=2, slow="dp")["dp"]) == "Mesh(dp=2, slow=('dp',))"


@pytest.mark.parametrize("mesh", [PLAIN, EXPLICIT, EXPLICIT["pp"], EXPLICIT.flatten("dp", "pp")], ids=repr)
def test_a_pickle_gives_the_same_mesh(mesh: Mesh) -> None:
    assert pickle.loads(pickle.dumps(mesh)) is mesh


def test_another_process_pickles_to_the_same_bytes() -> None:
    program = (
        "import pickle, shardwise as sw; m = sw.init_mesh(dp=2, pp=2, tp=2, slow=('pp',), groups='explicit');"
        "m.flatten('dp', 'tp'); print(pickle.dumps(m).hex())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert bytes.fromhex(there.stdout.strip()) == pickle.dumps(EXPLICIT)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"slow": ("pp",)}, r"slow names axes with slow links, e.g. slow=\(\"dp\",\); the axes are dp, tp, got 'pp'"),
        ({"slow": "d"}, "the axes are dp, tp, got 'd'"),
        ({"slow": 4}, "the axes are dp, tp, got 4"),
        (
            {"groups": "none"},
            r'groups is "auto" \(.*\) or "explicit" \(only those that mesh.flatten made .*\), got \'none\'',
        ),
        ({"groups": 2}, "got 2"),
    ],
)
def test_facts_that_cannot_be(words: dict[str, Any], text: str) -> None:
    with pytest.raises(MeshError, match=text):
        sw.init_mesh(dp=2, tp=2, **words)


# ── flatten ──


def test_flattened_axes_are_one_axis_of_a_mesh() -> None:
    flat = PLAIN.flatten("dp", "tp")
    assert (flat.axes, flat.axis_sizes, flat.root.axis_sizes) == (("dp_tp",), {"dp_tp": 4}, {"dp_tp": 4, "pp": 2})
    for rank in range(8):
        dp, pp, tp = PLAIN.coordinate(rank) or ()
        assert flat.coordinate(rank) == (2 * dp + tp,) and flat.root.coordinate(rank) == (2 * dp + tp, pp)
    assert PLAIN.flatten("dp", "tp") is flat


@pytest.mark.parametrize(("axes", "shape"), [(("dp", "pp"), {"dp_pp": 4, "tp": 2}), (("pp", "tp"), {"dp": 2, "pp_tp": 4})])
def test_neighbours_flattened_leave_the_ranks_in_order(axes: tuple[str, ...], shape: dict[str, int]) -> None:
    root = PLAIN.flatten(*axes).root
    assert root.axis_sizes == shape and root.ranks == PLAIN.ranks


def test_the_first_of_flattened_axes_varies_slowest() -> None:
    flat = PLAIN.flatten("tp", "dp")
    assert flat.axes == ("tp_dp",)
    assert [flat.root.ranks[place] for place in flat.peers(0, ("tp_dp",))] == [0, 4, 1, 5]
    places = [PLAIN.peers(PLAIN.place(rank) or 0, ("tp", "dp")) for rank in flat.ranks]
    assert [[PLAIN.ranks[p] for p in group] for group in places] == [
        [flat.ranks[p] for p in flat.peers(place, ("tp_dp",))] for place in range(8)
    ]


def test_all_axes_flattened_are_a_root() -> None:
    flat = PLAIN.flatten()
    assert flat is flat.root and flat.axis_sizes == {"dp_pp_tp": 8} and flat.ranks == PLAIN.ranks
    assert PLAIN.flatten("dp", "pp", "tp") is flat
    assert PLAIN["dp", "pp"].flatten() is PLAIN.flatten("dp", "pp")


def test_one_axis_is_flat() -> None:
    assert PLAIN.flatten("tp") is PLAIN["tp"]


def test_flattened_axes_are_slow_if_one_is() -> None:
    assert EXPLICIT.flatten("dp", "pp").root.slow == ("dp_pp",)
    assert EXPLICIT.flatten("dp", "tp").root.slow == ("pp",)
    assert EXPLICIT.flatten("dp", "tp").explicit and not PLAIN.flatten("dp", "tp").explicit


def test_tensors_on_a_flattened_mesh() -> None:
    x, flat = torch.arange(20.0).view(10, 2), PLAIN.flatten("tp", "dp")
    d = sw.distribute_tensor(x, flat, [Shard(0)])
    assert torch.equal(d.full_tensor(), x) and torch.equal((d @ x.T).full_tensor(), x @ x.T)
    assert [tuple(shard.shape) for shard in d.to_local().shards] == [(3, 2)] * 6 + [(1, 2)] * 2


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (("dp", "dp"), "flatten takes each axis once, got dp, dp"),
        (("dp", "xp"), r"mesh \(dp=2, tp=2, dp_tp=2\) has no axis 'xp'; its axes are dp, tp, dp_tp"),
        (("dp", "tp"), r"mesh \(dp=2, tp=2, dp_tp=2\) has an axis 'dp_tp', which is what dp, tp are called as one; rename it"),
    ],
)
def test_axes_that_cannot_be_flattened(axes: tuple[str, ...], text: str) -> None:
    with pytest.raises(MeshError, match=text):
        sw.init_mesh(dp=2, tp=2, dp_tp=2).flatten(*axes)


# ── explicit ──


def test_every_group_is_usable_unless_groups_are_explicit() -> None:
    assert PLAIN.usable(("dp", "tp")) and PLAIN["dp", "tp"].usable(PLAIN.axes)


def test_explicit_groups_are_usable_once_made() -> None:
    mesh = sw.init_mesh(first=2, second=2, third=2, one=1, groups="explicit")
    pair, sub = ("first", "third"), mesh["first", "third"]
    assert mesh.usable(()) and mesh.usable(("first",)) and mesh.usable(("one", "first"))
    assert not mesh.usable(pair) and not sub.usable(pair)
    sub.flatten("third", "first")
    assert mesh.usable(pair) and sub.usable(pair) and mesh.usable((*pair, "one"))
    assert not mesh.usable(("first", "second")) and not mesh.usable(mesh.axes)
    assert pickle.loads(pickle.dumps(mesh)) is mesh and mesh is sw.init_mesh(
        first=2, second=2, third=2, one=1, groups="explicit"
    )


def test_a_group_that_becomes_known_makes_caches_forget() -> None:
    mesh = sw.init_mesh(left=2, right=2, groups="explicit")

    def plans_kept_by(axes: tuple[str, ...]) -> int:
        sw.plan(sw.layout((8,), mesh, {"left": Shard(0)}), sw.layout((8,), mesh, {}))
        mesh.flatten(*axes)
        return sw.cache_info()["plans"].size

    assert plans_kept_by(("left",)), "an axis was known before"
    assert not plans_kept_by(("left", "right"))
    assert plans_kept_by(("right", "left")), "made already"


def test_an_unknown_cache() -> None:
    with pytest.raises(sw.ShardwiseError, match=r"a name of \*names is one of .*'decisions'.*'plans'.*, got 'planes'"):
        sw.cache_clear("planes")


# ── decisions ──


def product(mesh: Mesh) -> tuple[Any, ...]:
    x = sw.ones(448, 2, mesh=mesh, placements={"dp": Shard(1)})
    return (x @ torch.ones(2, 448)).placements


def test_an_operator_avoids_a_slow_axis() -> None:
    """Gathering 2 kB now, or leaving 800 kB to be reduced later: cheaper in starts, but not over slow links."""
    assert product(sw.init_mesh(dp=2, tp=2)) == (Partial("sum"), Replicate())
    assert product(sw.init_mesh(dp=2, tp=2, slow=("dp",))) == (Replicate(), Replicate())
    assert product(sw.init_mesh(dp=2, tp=2, slow=("tp",))) == (Partial("sum"), Replicate())


def test_an_operator_reckons_with_measured_links() -> None:
    mesh = sw.init_mesh(dp=2, measured=2)
    assert product(mesh) == (Partial("sum"), Replicate())
    set_links(mesh, {"dp": SLOW})
    assert product(mesh) == (Replicate(), Replicate())
    set_links(mesh, {"dp": ORDINARY})
    assert product(mesh) == (Partial("sum"), Replicate())


def test_simulated_ranks_are_not_measured() -> None:
    assert sw.calibrate(EXPLICIT) == {"dp": ORDINARY, "pp": SLOW, "tp": ORDINARY}
    assert sw.calibrate(EXPLICIT["pp"]) == {"pp": SLOW}


def test_a_job_that_moves_nothing_is_not_measured() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = sw.init_mesh(dp=2, tp=2, slow="dp")
        assert mesh.world == "processes" and sw.calibrate(mesh) == {"dp": SLOW, "tp": ORDINARY}
    finally:
        dist.destroy_process_group()
