"""make_layout: the layout of a tensor from the placements that a user gives, checked.

>>> make_layout((8, 16), Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated"), {"dp": Shard(0)})
f32[8@dp, 16]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import SymInt

from ..base.argument_checks import a_dtype, integers, optional, several, shown, sizes
from ..errors import LayoutError, MeshError
from .dims import Shards, dim_of, size_of
from .layout import Layout
from .mesh import Mesh
from .placement import Partial, Placement, Shard, taken

Placements = Sequence[Placement] | Mapping[str, Placement]


def make_layout(
    shape: Sequence[int],
    mesh: Mesh | Any,
    placements: Placements | Layout,
    dtype: torch.dtype = torch.float32,
    stride: Sequence[int] | None = None,
) -> Layout:
    """A layout from placements: one per mesh axis, or by axis name (the order of names is then the order of the shardings).

    >>> mesh = Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated")
    >>> make_layout((8, 4), mesh, {"tp": Shard(0), "dp": Shard(0)})
    f32[8@(tp,dp), 4]
    """
    mesh = Mesh.from_torch(mesh)
    a_dtype(dtype, "layout: dtype")
    size, stride = sizes(shape, "layout: shape"), optional(integers, stride, "layout: stride", 0)
    if isinstance(placements, Layout):
        known = not any(isinstance(n, SymInt) for n in (*size, *placements.shape))
        if (known and size != tuple(placements.shape)) or placements.mesh is not mesh:
            raise LayoutError(
                f"placements={placements} is a layout on mesh {placements.mesh}, and the tensor has shape {list(size)} on mesh "
                f"{mesh}; give a layout of these, or placements"
            )
        return placements.replace(dtype=dtype, stride=stride)
    shardings, partials = _by_dim(size, mesh, placements)
    dims = [dim_of(n, shards, mesh) for n, shards in zip(size, shardings, strict=True)]
    return Layout.of(mesh, dims, partials, dtype, stride)


def whole_shape(local: Sequence[int], mesh: Mesh, placements: Placements) -> tuple[int, ...]:
    """The shape of a tensor of which every rank holds as much, or as much as the placements say.

    >>> whole_shape((2, 3), Mesh(("tp",), (2,), range(2), "cpu", "simulated"), [Shard(1)])
    (2, 6)
    """
    return tuple(size_of(n, shards, mesh) for n, shards in zip(local, _by_dim(local, mesh, placements)[0], strict=True))


def _by_dim(shape: Sequence[int], mesh: Mesh, placements: Placements) -> tuple[list[Shards], list[tuple[str, str]]]:
    """The axes that shard each dim, and those with partial values."""
    shardings: list[Shards] = [[] for _ in shape]
    partials = []
    for axis, placement in by_axis(mesh, placements).items():
        if isinstance(placement, Shard):
            if not -len(shape) <= placement.dim < len(shape):
                dims = f"has {len(shape)} dims {list(shape)}; use a dim from {-len(shape)} to {len(shape) - 1}"
                why = f"the tensor {dims}" if shape else "a tensor without dims cannot be sharded; use Replicate()"
                raise LayoutError(f"Shard({placement.dim}) on axis {axis!r} of mesh {mesh}: {why}")
            shardings[placement.dim] = [*shardings[placement.dim], (axis, placement)]
        elif isinstance(placement, Partial):
            partials.append((axis, placement.reduce_op))
    return shardings, partials


def by_axis(mesh: Mesh, placements: Placements) -> dict[str, Placement]:
    """What a user wants of each axis, checked as far as it can be without a tensor."""
    if isinstance(placements, Mapping):
        for axis in placements:
            if axis not in mesh.axis_sizes:
                raise MeshError(f"placements: mesh {mesh} has no axis {shown(axis)}; its axes are {', '.join(mesh.axes)}")
        given = dict(placements)
    else:
        if taken(placements) is not None:
            placements = cast(Sequence[Placement], (placements,))
        placements = several(placements, "placements", "one Shard, Replicate or Partial for each axis, or these by axis name")
        if len(placements) != mesh.ndim:
            raise LayoutError(
                f"mesh {mesh} has {mesh.ndim} axes and takes {mesh.ndim} placements, got {len(placements)}: "
                f"{shown(placements)}; name the axes ({{{mesh.axes[0]!r}: Shard(0)}}) to leave some replicated"
            )
        given = dict(zip(mesh.axes, placements, strict=True))
    found: dict[str, Placement] = {}
    for axis, placement in given.items():
        ours = taken(placement)
        if ours is None:
            raise LayoutError(f"placements: axis {axis!r} takes Shard, Replicate or Partial, got {shown(placement)}")
        found[axis] = ours
    return found
