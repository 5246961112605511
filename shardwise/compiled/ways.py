"""The ways in (`from_local`, `distribute_tensor`, `zeros`, …) as operators of a traced program.

A traced function of the user's holds them with texts for meshes and placements, and with the library's key, since no DTensor
among its inputs may speak for it. They are made of other operators, forward and backward, when the program is traced further.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm import door, seen
from ..errors import LayoutError
from ..factories import Want, made_tensor
from ..layout import Layout, as_read
from ..mesh import Mesh
from ..placement import Replicate, Shard
from ..targets import assumed_layout
from ..tensor import distribute, of_pieces

#: What a traced function of the user's may hold beside torch's own operators.
WAYS = ("from_local", "distribute", "new")


def _mesh(text: str) -> Mesh:
    """The mesh of a traced program, with what a program on it needs, which may come from a cache."""
    mesh = seen(Mesh.read(text))
    door(mesh).ready(mesh)
    return mesh


torch.library.define(
    "shardwise::from_local",
    "(Tensor x, str mesh, str placements, SymInt[]? shape, SymInt[]? stride, bool check, str library) -> Tensor",
)
torch.library.define("shardwise::distribute", "(Tensor x, str mesh, str placements, int? source, str library) -> Tensor")


def _from_local(  # noqa: PLR0913  as the operator
    x: Tensor, mesh: str, placements: str, shape: Any, stride: Any, check: bool, library: str
) -> Tensor:
    """`DTensor.from_local` where no rank can be asked for its shape: it is only known when the program runs."""
    wanted = as_read(placements)
    if isinstance(wanted, Layout):
        return of_pieces(x, wanted)
    if isinstance(wanted, dict):
        given = wanted
        wanted = tuple(given.get(axis, Replicate()) for axis in _mesh(mesh).axes)
    if check and shape is None and any(isinstance(placement, Shard) for placement in wanted):
        raise LayoutError(
            f"from_local of {list(x.shape)} in a compiled function: the ranks cannot compare the shapes of their pieces there; "
            "give shape=, or promise with run_check=False that all pieces are equal"
        )
    size, steps = None if shape is None else tuple(shape), None if stride is None else tuple(stride)
    return of_pieces(x, assumed_layout(x.shape, x.dtype, _mesh(mesh), wanted, size, steps))


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
