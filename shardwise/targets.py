"""Which layout the placements that a user gives stand for: as the target of a move, or of pieces that each rank gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .comm import door, seen
from .errors import LayoutError
from .keep import watched
from .layout import Factor, Layout, Placements, make_layout
from .memo import memo
from .mesh import Mesh
from .placement import Placement, Replicate, Shard


def target(have: Layout, mesh: Mesh | Any, placements: Placements | Layout | None) -> Layout:
    """The layout of a tensor that is asked for."""
    if isinstance(placements, Layout):
        if mesh is not None and placements.mesh is not Mesh.from_torch(mesh):
            raise LayoutError(
                f"redistribute to mesh {Mesh.from_torch(mesh)}: the layout {placements} is on mesh {placements.mesh}"
            )
        return placements if placements.stride == have.stride else placements.replace(stride=have.stride)
    on = have.mesh if mesh is None else seen(Mesh.from_torch(mesh))
    if isinstance(placements, dict):
        return make_layout(have.shape, on, placements, have.dtype, have.stride)
    return _placed(have, on, None if placements is None else tuple(cast(Sequence[Placement], placements)))


@memo("targets", limit=4096)
def _placed(have: Layout, mesh: Mesh, placements: tuple[Placement, ...] | None) -> Layout:
    wanted = [Replicate()] * mesh.ndim if placements is None else placements
    return make_layout(have.shape, mesh, wanted, have.dtype, have.stride)


@memo("from_local", limit=4096)
def assumed_layout(local: Any, dtype: torch.dtype, mesh: Any, placements: Any, shape: Any, stride: Any) -> Layout:
    """The layout of equal pieces, or of the chunks of `shape`."""
    if isinstance(placements, Layout):
        return placements
    mesh = Mesh.from_torch(mesh)
    if shape is None:
        size = list(local)
        for axis, placement in zip(mesh.axes, placements, strict=False):
            if isinstance(placement, Shard) and -len(size) <= placement.dim < len(size):
                size[placement.dim] = sum(placement.sizes) if placement.sizes else size[placement.dim] * mesh.axis_sizes[axis]
        shape = tuple(size)
    return make_layout(shape, mesh, placements, dtype, stride)


def checked_layout(local: Tensor, mesh: Mesh, placements: Any, shape: Any, stride: Any) -> Layout:
    """The layout that fits the pieces of all ranks, from their shapes; a rank outside the mesh is not told them."""
    world = door(mesh, "from_local")
    shapes = watched("from_local", ("shapes", mesh), local, lambda: world.shapes(local, mesh))
    layout = told = _told_layout(local.dtype, mesh, placements, shape, stride)
    if shapes and not isinstance(placements, Layout):
        probe = make_layout(shapes[0], mesh, _unsized(mesh, placements), local.dtype)
        sizes = [_summed(probe, dim, shapes) for dim in range(probe.ndim)]
        dims = [[Factor(sum(n), probe.axes_of(dim), tuple(n))] for dim, n in enumerate(sizes)]
        layout = Layout.of(mesh, dims, probe.partials, local.dtype, stride)
    if layout is None:
        raise LayoutError(
            f"from_local on a rank that is none of the {len(mesh.ranks)} ranks of mesh {mesh}: they do not tell it the shapes "
            "of their pieces; give shape="
        )
    if shape is not None and (told is not layout or tuple(shape) != tuple(layout.shape)):
        raise LayoutError(
            f"from_local: the pieces make up {layout}, but shape={list(shape)} was given, which is {told} by these placements; "
            "leave shape out, or give the size of each shard, as in Shard(0, sizes=(1, 3))"
        )
    for place, have in enumerate(shapes):
        want = layout.local_shape(place)
        if tuple(have) != want:
            raise LayoutError(f"from_local: rank {mesh.ranks[place]} gave {list(have)}, {layout} has {list(want)} there")
    return layout


def _told_layout(dtype: torch.dtype, mesh: Mesh, placements: Any, shape: Any, stride: Any) -> Layout | None:
    """The layout as far as every rank knows it without asking."""
    if isinstance(placements, Layout):
        return placements
    return None if shape is None else make_layout(tuple(shape), mesh, placements, dtype, stride)


def _unsized(mesh: Mesh, placements: Any) -> Any:
    if isinstance(placements, dict):
        return {a: Shard(p.dim) if isinstance(p, Shard) else p for a, p in placements.items()}
    return [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]


def _summed(probe: Layout, dim: int, shapes: Sequence[Sequence[int]]) -> list[int]:
    """The size of each shard of a dim, major to minor, from the local shapes."""
    return [shapes[place][dim] for place in probe.mesh.peers(0, probe.axes_of(dim))]
