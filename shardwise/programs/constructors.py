"""Constructors of DTensors (`from_local`, `distribute_tensor`, `zeros`, …) as operators of a traced program.

In Dynamo's graph they are single nodes with texts for meshes and placements, and with the library's key, because the function
may have no DTensor among its inputs that would carry it. AOTAutograd traces through them to local operators.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..comm import seen, transport
from ..errors import LayoutError
from ..layouts.from_placements import make_layout
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.placement import Replicate
from ..layouts.text import as_read
from ..random.bits import Draw
from ..tensor.distribute import distribute
from ..tensor.dtensor import from_shards
from ..tensor.factories import made_tensor
from ..tensor.placements_given import assumed_layout

#: The names of these operators.
WAYS = ("from_local", "distribute", "new")


def _mesh(text: str) -> Mesh:
    """The mesh of a traced program; its process groups are made now, since the program itself may come from a cache."""
    mesh = seen(Mesh.read(text))
    transport(mesh).ready(mesh)
    return mesh


torch.library.define(
    "shardwise::from_local",
    "(Tensor x, str mesh, str placements, SymInt[]? shape, SymInt[]? stride, bool check, str grads, str library) -> Tensor",
)
torch.library.define("shardwise::distribute", "(Tensor x, str mesh, str placements, int? source, str library) -> Tensor")
torch.library.define(
    "shardwise::new",
    "(SymInt[] shape, str mesh, str placements, ScalarType dtype, str draw, Scalar[] numbers, str library) -> Tensor",
)
_implementation = functools.partial(torch.library.impl, types="CompositeImplicitAutograd")


@_implementation("shardwise::from_local")
def _from_local(x: Tensor, mesh: str, placements: str, *options: Any) -> Tensor:
    """`DTensor.from_local`, where the ranks cannot exchange the shapes of their shards."""
    shape, stride, check, grads, _ = options
    on, wanted = _mesh(mesh), as_read(placements)
    wanted = (Replicate(),) * on.ndim if wanted is None else wanted
    if check and shape is None and not isinstance(wanted, Layout):
        raise LayoutError(
            f"from_local(run_check=True) of {list(x.shape)} in a compiled function: the ranks cannot compare the shapes of "
            "their shards there; give shape=, or leave run_check out where all shards are equal"
        )
    size, steps = None if shape is None else tuple(shape), None if stride is None else tuple(stride)
    layout = assumed_layout(x.shape, x.dtype, on, wanted, size, steps)
    given = as_read(grads)
    return from_shards(x, layout, given and make_layout(layout.shape, on, given, layout.dtype, layout.stride))


@_implementation("shardwise::distribute")
def _distribute(x: Tensor, mesh: str, placements: str, source: int | None, library: str) -> Tensor:
    return distribute(x, _mesh(mesh), as_read(placements), source)


@_implementation("shardwise::new")
def _new(shape: Any, mesh: str, placements: str, dtype: torch.dtype, *drawn: Any) -> Tensor:
    draw, numbers, _ = drawn
    return made_tensor(shape, _mesh(mesh), as_read(placements), dtype, Draw(draw, tuple(numbers)))
