"""The ways in (`from_local`, `distribute_tensor`, `zeros`, …) as operators of a traced program.

A traced function of the user's holds them with texts for meshes and placements, and with the library's key, since no DTensor
among its inputs may speak for it. They are made of other operators, forward and backward, when the program is traced further.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm import seen, transport
from ..errors import LayoutError
from ..layouts.layout import Layout, make_layout
from ..layouts.mesh import Mesh
from ..layouts.placement import Replicate
from ..layouts.text import as_read
from ..tensor.distribute import distribute
from ..tensor.dtensor import from_shards
from ..tensor.factories import Want, made_tensor
from ..tensor.placements_given import assumed_layout

#: What a traced function of the user's may hold beside torch's own operators.
WAYS = ("from_local", "distribute", "new")


def _mesh(text: str) -> Mesh:
    """The mesh of a traced program, with what a program on it needs, which may come from a cache."""
    mesh = seen(Mesh.read(text))
    transport(mesh).ready(mesh)
    return mesh


torch.library.define(
    "shardwise::from_local",
    "(Tensor x, str mesh, str placements, SymInt[]? shape, SymInt[]? stride, bool check, str grads, str library) -> Tensor",
)
torch.library.define("shardwise::distribute", "(Tensor x, str mesh, str placements, int? source, str library) -> Tensor")


def _from_local(  # noqa: PLR0913  as the operator
    x: Tensor, mesh: str, placements: str, shape: Any, stride: Any, check: bool, grads: str, library: str
) -> Tensor:
    """`DTensor.from_local` where no rank can be asked for its shape: it is only known when the program runs."""
    on, wanted = _mesh(mesh), as_read(placements)
    if wanted is None:
        wanted = (Replicate(),) * on.ndim
    if check and shape is None and not isinstance(wanted, Layout):
        raise LayoutError(
            f"from_local(run_check=True) of {list(x.shape)} in a compiled function: the ranks cannot compare the shapes of "
            "their shards there; give shape=, or leave run_check out where all shards are equal"
        )
    size, steps = None if shape is None else tuple(shape), None if stride is None else tuple(stride)
    layout = assumed_layout(x.shape, x.dtype, on, wanted, size, steps)
    given = as_read(grads)
    return from_shards(x, layout, given and make_layout(layout.shape, on, given, layout.dtype, layout.stride))


def _distributed(x: Tensor, mesh: str, placements: str, source: int | None, library: str) -> Tensor:
    return distribute(x, _mesh(mesh), as_read(placements), source)


torch.library.impl("shardwise::from_local", "CompositeImplicitAutograd", _from_local)
torch.library.impl("shardwise::distribute", "CompositeImplicitAutograd", _distributed)


torch.library.define(
    "shardwise::new",
    "(SymInt[] shape, str mesh, str placements, ScalarType dtype, str draw, Scalar[] numbers, str library) -> Tensor",
)


def _new_traced(  # noqa: PLR0913  as the operator
    shape: Any, mesh: str, placements: str, dtype: torch.dtype, draw: str, numbers: Any, library: str
) -> Tensor:
    return made_tensor(shape, _mesh(mesh), as_read(placements), dtype, Want(draw, tuple(numbers)))


torch.library.impl("shardwise::new", "CompositeImplicitAutograd", _new_traced)
