"""Laws of layouts: interning, pickling, partition of the global tensor, and texts of errors."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import ArgumentError, Layout, LayoutError, Mesh, MeshError, Partial, Replicate, Shard
from shardwise.layouts.factor import Factor, canonical, default_sizes, whole

MESH = Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated")


@st.composite
def drawn_layouts(draw: Any) -> Layout:
    """Layouts of any number of dims and factors on a mesh of up to three axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes, range(_product(sizes)), "cpu", "simulated")
    free = list(draw(st.permutations(mesh.axes)))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        factors = []
        for _ in range(draw(st.integers(1, 2))):
            axes = tuple(free.pop() for _ in range(min(len(free), draw(st.integers(0, 2)))))
            shards = _product(mesh.axis_sizes[axis] for axis in axes)
            pieces = draw(st.lists(st.integers(0, 3), min_size=shards, max_size=shards))
            factors.append(Factor(sum(pieces), axes, tuple(pieces)))
        dims.append(factors)
    partials = [(axis, "sum") for axis in free if draw(st.booleans())]
    return Layout.of(mesh, dims, partials)


def _product(numbers: Any) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


@settings(deadline=None)
@given(drawn_layouts())
def test_the_shards_are_the_whole(layout: Layout) -> None:
    for dim in range(layout.ndim):
        axes = layout.axes_of(dim)
        held = Counter(i for place in layout.mesh.peers(0, axes) for lo, hi in layout.runs(dim, place) for i in range(lo, hi))
        assert held == Counter(range(layout.shape[dim]))
    for place in range(layout.mesh.size()):
        sizes = tuple(sum(hi - lo for lo, hi in layout.runs(dim, place)) for dim in range(layout.ndim))
        assert sizes == layout.local_shape(place)


@settings(deadline=None)
@given(drawn_layouts())
def test_equal_layouts_are_one_object(layout: Layout) -> None:
    again = Layout.of(layout.mesh, layout.dims, layout.partials, layout.dtype, layout.stride)
    assert again is layout and pickle.loads(pickle.dumps(layout)) is layout


def test_a_pickle_has_the_same_bytes_in_every_process() -> None:
    program = (
        "import pickle, shardwise as sw; m = sw.Mesh(('dp', 'tp'), (2, 4), range(8), 'cpu', 'simulated');"
        "x = sw.layout((8, 6), m, [sw.Shard(0), sw.Partial()]); print(pickle.dumps(x).hex(), m.fingerprint, m.alias(('tp',)))"
    )
    outs = {
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": str(i)}, capture_output=True, text=True).stdout
        for i in range(2)
    }
    assert len(outs) == 1 and "sw:" in outs.pop()


@pytest.mark.parametrize(
    ("shape", "placements", "text"),
    [
        ((8, 16), [Shard(0), Replicate()], "f32[8@dp, 16]"),
        ((8, 16), [Shard(0), Shard(0)], "f32[8@(dp,tp), 16]"),
        ((8, 16), {"tp": Shard(0), "dp": Shard(0)}, "f32[8@(tp,dp), 16]"),
        ((10, 16), {"tp": Shard(0, sizes=(1, 2, 3, 4))}, "f32[10@tp{1,2,3,4}, 16]"),
        ((8, 16), [Partial(), Replicate()], "f32[8, 16 | sum@dp]"),
        ((), [Replicate(), Partial("max")], "f32[ | max@tp]"),
    ],
)
def test_a_layout_prints_on_one_line(shape: Any, placements: Any, text: str) -> None:
    assert repr(sw.layout(shape, MESH, placements)) == text


def test_a_factor_of_a_flattened_dim_prints() -> None:
    layout = Layout.of(MESH, [[whole(2), Factor(8, ("tp",), (2, 2, 2, 2))]])
    assert repr(layout) == "f32[(2*8@tp)]"
    assert layout.runs(0, 1) == [(2, 4), (10, 12)]


def test_default_chunks_are_torchs() -> None:
    assert default_sizes(5, [4]) == (2, 2, 1, 0)
    assert default_sizes(7, [2, 2]) == (2, 2, 2, 1)


def test_canonical_merges_what_is_one_interval() -> None:
    assert canonical([Factor(2, ("dp",), (1, 1)), Factor(8, ("tp",), (2, 2, 2, 2))]) == (Factor(16, ("dp", "tp"), (2,) * 8),)
    assert canonical([whole(16), Factor(1, ("dp",), (0, 1))]) == (Factor(16, ("dp",), (0, 16)),)


DIM = (
    r"Shard\(5\) on axis 'dp' of mesh \(dp=2, tp=4\): "
    r"the tensor has 2 dims \[4, 4\]; use a dim from -2 to 1"
)
FEW = (
    r"mesh \(dp=2, tp=4\) has 2 axes and takes 2 placements, got 1: \(Shard\(0\),\); "
    r"name the axes \({'dp': Shard\(0\)}\)"
)


@pytest.mark.parametrize(
    ("shape", "placements", "error", "text"),
    [
        ((4, 4), [Shard(5), Replicate()], LayoutError, DIM),
        ((), [Shard(0), Replicate()], LayoutError, r"a tensor without dims cannot be sharded; use Replicate\(\)"),
        ((4, 4), [Shard(0)], LayoutError, FEW),
        ((4, 4), {"pp": Shard(0)}, MeshError, r"mesh \(dp=2, tp=4\) has no axis 'pp'; its axes are dp, tp"),
        ((4, 4), [0, Replicate()], LayoutError, r"axis 'dp' takes Shard, Replicate or Partial, got 0"),
        ((4, 4), {"dp": Shard(0, sizes=(1, 2))}, LayoutError, r"needs 2 sizes that add up to 4, got 2 that add up to 3"),
    ],
)
def test_a_layout_that_cannot_be(shape: Any, placements: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        sw.layout(shape, MESH, placements)


def test_a_placement_that_cannot_be() -> None:
    with pytest.raises(LayoutError, match="Partial\\(reduce_op='median'\\) is not known; use one of sum, avg"):
        Partial("median")
    with pytest.raises(ArgumentError, match="Shard: dim is an integer, got 'x'"):
        Shard("x")  # type: ignore[arg-type]


def test_sub_meshes_and_coordinates() -> None:
    tp = MESH["tp"]
    assert (tp.axis_sizes, tp.shape, tp.size(), tp.root) == ({"tp": 4}, (4,), 4, MESH)
    assert (MESH.coordinate(6), tp.coordinate(6), MESH.coordinate(9)) == ((1, 2), (2,), None)
    assert MESH["dp", "tp"] is MESH and MESH["tp"] is tp
    assert MESH.peers(5, ("tp",)) == (4, 5, 6, 7) and MESH.groups(("dp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("axes", "sizes", "ranks", "text"),
    [
        ((), (), [], "at least one axis"),
        (("a", "a"), (2, 2), range(4), "axis names must differ"),
        (("a",), (2,), range(3), "takes 2 different ranks, got 3"),
        (("a",), (0,), [], "one positive size"),
    ],
)
def test_a_mesh_that_cannot_be(axes: Any, sizes: Any, ranks: Any, text: str) -> None:
    with pytest.raises(MeshError, match=text):
        Mesh(axes, sizes, ranks, "cpu", "simulated")
