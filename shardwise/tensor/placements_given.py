"""Which layout the placements that a user gives stand for: as the target of a move, or of shards that each rank gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.argument_checks import a_tensor, flag, integers, optional, shown, sizes
from ..base.caches import memo
from ..comm import seen, transport
from ..comm.interception import watched
from ..errors import LayoutError, MeshError
from ..layouts.from_placements import Placements, make_layout, whole_shape
from ..layouts.layout import Factor, Layout, PerRank, dense_stride
from ..layouts.mesh import Mesh
from ..layouts.placement import Placement, Replicate, Shard, StridedShard, taken


def target(have: Layout, mesh: Mesh | Any, placements: Placements | Layout | None) -> Layout:
    """The layout of a tensor that is asked for."""
    if isinstance(placements, Layout):
        if mesh is not None and placements.mesh is not Mesh.from_torch(mesh):
            raise LayoutError(
                f"redistribute to mesh {Mesh.from_torch(mesh)}: the layout {placements} is on mesh {placements.mesh}"
            )
        return placements if placements.stride == have.stride else placements.replace(stride=have.stride)
    on = have.mesh if mesh is None else seen(Mesh.from_torch(mesh))
    if placements is None or isinstance(placements, tuple | list):
        return _placed(have, on, None if placements is None else tuple(placements))
    return make_layout(have.shape, on, placements, have.dtype, have.stride)


@memo("targets", limit=4096)
def _placed(have: Layout, mesh: Mesh, placements: tuple[Placement, ...] | None) -> Layout:
    return make_layout(have.shape, mesh, {} if placements is None else placements, have.dtype, have.stride)


def fitting(layout: Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, verb: str) -> Layout:
    """The layout, if it is one of a tensor of this shape and dtype on this mesh."""
    if tuple(layout.shape) != tuple(shape) or layout.dtype != dtype or layout.mesh is not mesh:
        have = f"a tensor of shape {list(shape)} and {dtype} on mesh {mesh}"
        raise LayoutError(
            f"{verb}: the layout {layout} on mesh {layout.mesh} does not fit {have}; take one of that shape, dtype and mesh "
            "(`sw.layout`), or give placements"
        )
    return layout


def source_rank(given: object, mesh: Mesh) -> int | None:
    """`src_data_rank`, if there is such a coordinate on every axis of the mesh."""
    if given is None:
        return None
    least = min(mesh.shape)
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < least:
        raise MeshError(
            f"src_data_rank is the coordinate, on every axis of mesh {mesh}, of the rank whose values count: an int from 0 to "
            f"{least - 1}, or None where all have the same values; got {shown(given)}"
        )
    return given


def local_layout(local: Tensor, mesh: Mesh, placements: Any, run_check: bool, shape: Any, stride: Any) -> Layout:
    """The layout of a tensor of which each rank gives a local tensor."""
    if not isinstance(local, Tensor) or run_check is not False or shape is not None or stride is not None:
        a_tensor(local, "from_local: local_tensor")
        flag(run_check, "from_local: run_check")
        shape, stride = optional(sizes, shape, "from_local: shape"), optional(integers, stride, "from_local: stride", 0)
    if shape is not None and len(shape) != local.ndim:
        raise LayoutError(f"from_local: shape={list(shape)} has {len(shape)} dims, the local tensor {local.ndim}")
    if hasattr(local, "_layout"):
        raise LayoutError(
            f"from_local takes what a rank holds, an ordinary tensor; got {local!r}, which is distributed already"
        )
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    elif not isinstance(placements, dict | Layout):
        placements = tuple(placements) if isinstance(placements, Sequence) else (placements,)
    world = transport(mesh, "from_local")
    if run_check:
        return checked_layout(local, mesh, placements, shape, stride)
    if stride is None and not isinstance(placements, Layout) and not local.is_contiguous():
        shape = whole_shape(local.shape, mesh, placements) if shape is None else shape
        stride = dense_stride(shape, local.stride())
    layout = assumed_layout(local.shape, local.dtype, mesh, placements, shape, stride)
    world.assume(local, mesh, PerRank(layout.local_shape))
    return layout


@memo("from_local", limit=4096)
def assumed_layout(local: Any, dtype: torch.dtype, mesh: Any, placements: Any, shape: Any, stride: Any) -> Layout:
    """The layout of equal shards, or of the chunks of `shape`."""
    if isinstance(placements, Layout):
        return fitting(placements, placements.shape if shape is None else shape, dtype, mesh, "from_local")
    if shape is None:
        shape = whole_shape(local, mesh, placements)
    return make_layout(shape, mesh, placements, dtype, stride)


def checked_layout(local: Tensor, mesh: Mesh, placements: Any, shape: Any, stride: Any) -> Layout:
    """The layout that fits the shards of all ranks, from their shapes; a rank outside the mesh is not told them."""
    world = transport(mesh, "from_local")
    shapes = watched("from_local", ("shapes", mesh), local, lambda: world.shapes(local, mesh))
    known = shape is not None or isinstance(placements, Layout)  # as far as every rank knows it without asking
    given = assumed_layout(local.shape, local.dtype, mesh, placements, shape, stride) if known else None
    layout = _found_layout(shapes, local.dtype, mesh, placements, stride) if shapes else given
    if layout is None:
        raise LayoutError(
            f"from_local on a rank that is none of the {len(mesh.ranks)} ranks of mesh {mesh}: they do not tell it the shapes "
            "of their shards; give shape="
        )
    if shape is not None and (given is not layout or tuple(shape) != tuple(layout.shape)):
        raise LayoutError(
            f"from_local: the shards make up {layout}, but shape={list(shape)} was given, which is {given} by these placements"
            "; leave shape out, or give the size of each shard, as in Shard(0, sizes=(1, 3))"
        )
    for place, have in enumerate(shapes):
        want = layout.local_shape(place)
        if tuple(have) != want:
            raise LayoutError(f"from_local: rank {mesh.ranks[place]} gave {list(have)}, {layout} has {list(want)} there")
    return layout


def _found_layout(shapes: Any, dtype: torch.dtype, mesh: Mesh, placements: Any, stride: Any) -> Layout:
    """The layout that the shapes of all shards tell."""
    if isinstance(placements, Layout):
        return placements
    probe = make_layout(whole_shape(shapes[0], mesh, placements), mesh, placements, dtype, stride)
    given = [taken(p) for p in (placements.values() if isinstance(placements, dict) else placements)]
    if any(isinstance(p, StridedShard) or (isinstance(p, Shard) and p.sizes) for p in given):  # they say how large shards are
        return probe
    sizes = [[shapes[place][dim] for place in mesh.peers(0, probe.axes_of(dim))] for dim in range(probe.ndim)]
    dims = [[Factor(sum(n), probe.axes_of(dim), tuple(n))] for dim, n in enumerate(sizes)]
    return Layout.of(mesh, dims, probe.partials, dtype, stride)
