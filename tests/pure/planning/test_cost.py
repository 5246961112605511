"""What links cost: by the mesh's word, by measurement, and over several axes together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Mesh, MeshError
from shardwise.planning.cost import (
    ORDINARY,
    SLOW,
    Link,
    change,
    collective,
    links,
    route,
    set_links,
)


def mesh_of(*sizes: int, **facts: object) -> Mesh:
    return Mesh(tuple("abcd"[: len(sizes)]), sizes, range(math.prod(sizes)), "cpu", "simulated", None, **facts)  # type: ignore[arg-type]


@pytest.fixture
def measured() -> Iterator[Mesh]:
    """A mesh whose links a test may set."""
    mesh = mesh_of(2, 4, 1)
    yield mesh
    set_links(mesh, dict.fromkeys(mesh.axes, ORDINARY))


def test_a_slow_axis_has_slow_links() -> None:
    mesh = mesh_of(2, 2, slow=("b",))
    assert links(mesh) == {"a": ORDINARY, "b": SLOW}
    assert links(mesh["b"]) == links(mesh)
    assert links(mesh_of(2, 2)) == {"a": ORDINARY, "b": ORDINARY}


def test_measured_links_take_the_place_of_the_defaults(measured: Mesh) -> None:
    before = route(measured, ("a", "b"))
    set_links(measured["b"], {"b": Link(1.0, 2.0)})
    assert links(measured) == {"a": ORDINARY, "b": Link(1.0, 2.0), "c": ORDINARY}
    assert route(measured, ("b",)) == Link(1.0, 2.0)
    assert route(measured, ("a", "b")) != before and route(measured, ("a", "b")).latency == 1.0
    assert links(mesh_of(2, 4)) == {"a": ORDINARY, "b": ORDINARY}, "another mesh keeps its own"


def test_measured_links_make_caches_forget_what_was_chosen(measured: Mesh) -> None:
    layout = sw.layout((8,), measured, {"a": sw.Shard(0)})
    sw.plan(layout, sw.layout((8,), measured, {}))
    assert sw.cache_info()["plans"].size
    set_links(measured, {"a": SLOW})
    assert sw.cache_info()["plans"].size == sw.cache_info()["decisions"].size == 0


def test_a_link_of_no_axis() -> None:
    with pytest.raises(MeshError, match=r"mesh \(a=2, b=2\) has no axis 'z'; its axes are a, b"):
        set_links(mesh_of(2, 2), {"z": ORDINARY})


# ── several axes together ──


def mean_over_peers(mesh: Mesh, axes: tuple[str, ...]) -> float:
    """Seconds per byte, peer by peer: two ranks talk over the slowest link of the axes along which they differ."""
    here = mesh.coordinates[0]
    peers = [mesh.coordinates[place] for place in mesh.peers(0, axes) if place != 0]
    slowest = [
        max(links(mesh)[a].per_byte for a, x, y in zip(mesh.axes, here, there, strict=True) if x != y) for there in peers
    ]
    return math.fsum(slowest) / len(slowest) if slowest else 0.0


speeds = st.floats(1e-12, 1e-6)


@given(st.lists(st.tuples(st.integers(1, 4), speeds, speeds), min_size=1, max_size=4), st.data())
def test_a_route_is_the_mean_over_its_peers(axes: list[tuple[int, float, float]], data: st.DataObject) -> None:
    mesh = mesh_of(*(size for size, _, _ in axes))
    set_links(mesh, {name: Link(latency, speed) for name, (_, latency, speed) in zip(mesh.axes, axes, strict=True)})
    try:
        chosen = tuple(axis for axis in mesh.axes if data.draw(st.booleans()))
        found = route(mesh, chosen)
        assert found.per_byte == pytest.approx(mean_over_peers(mesh, chosen), rel=1e-12)
        assert found.latency == max((links(mesh)[a].latency for a in chosen if mesh.axis_sizes[a] > 1), default=0.0)
        assert route(mesh, chosen) is found and route(mesh[mesh.axes[0]], chosen) == found
    finally:
        set_links(mesh, dict.fromkeys(mesh.axes, ORDINARY))


@pytest.mark.parametrize("sizes", [(2,), (4, 2, 8), (3, 5, 7), (2, 1, 6)])
def test_equal_links_make_a_route_like_each(sizes: tuple[int, ...]) -> None:
    """Exactly: a rounding would break ties that are none."""
    mesh = mesh_of(*sizes)
    assert route(mesh, mesh.axes) == ORDINARY
    slow = mesh_of(*sizes, slow=mesh.axes)
    assert route(slow, slow.axes) == SLOW


def test_nothing_is_crossed_along_an_axis_of_one() -> None:
    mesh = mesh_of(2, 1, slow=("b",))
    assert route(mesh, ("a", "b")) == ORDINARY
    assert route(mesh, ("b",)) == route(mesh, ()) == Link(0.0, 0.0)


# ── steps ──


def test_the_price_of_a_collective() -> None:
    link = Link(3.0, 0.5)
    assert collective("all_gather", 8, 4, link) == 3 + 8 * 3 * 0.5
    assert collective("reduce_scatter", 8, 4, link) == collective("all_to_all", 8, 4, link) == 3 + 6 * 0.5
    assert collective("all_reduce", 8, 4, link) == 3 + 12 * 0.5
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    assert [collective(kind, 8, 1, link) for kind in kinds] == [0, 0, 0, 0]


def test_the_price_of_a_change_is_that_of_its_collective() -> None:
    link = Link(3.0, 0.5)
    assert change(0, 0, 8, 4, link) == 0
    assert change(0, None, 8, 4, link) == collective("all_gather", 8, 4, link)
    assert change(0, 1, 8, 4, link) == collective("all_to_all", 8, 4, link)
    assert change("sum", None, 8, 4, link) == collective("all_reduce", 8, 4, link)
    assert change("sum", 1, 8, 4, link) == collective("reduce_scatter", 8, 4, link)
    assert change(None, 0, 8, 4, link) == change(None, 0, 8, 4, SLOW) < 1e-6, "local steps cross no link"
