"""`Absent`: what a rank holds of a tensor on a mesh that it is not in: a shape, a dtype and a device, but no data.

The same program runs on every rank. Where a rank has no part in a tensor, its operators give shapes only, so that gradients,
optimizers and views go on, and reading a value is refused.

>>> mesh = Mesh(("tp",), (2,), range(2), "cpu", "processes")
>>> (Absent((2, 3), torch.float32, mesh) @ torch.ones(3, 4)).shape
torch.Size([2, 4])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.compiler import untraced
from .._torch.tensors import make_wrapper, no_torch_function, schema
from ..errors import MeshError
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .simulated import outputs, stands_back

_META = torch.device("meta")


def _on_shapes(
    cls: type, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an operator on shapes."""
    if stands_back(cls, types):
        return NotImplemented
    kwargs = kwargs or {}
    mesh = _mesh((args, kwargs))
    if torch.Tag.data_dependent_output in func.tags:
        refuse(mesh, f"{func} needs its values")
    try:
        outs = func(*_ghosts(args), **_ghosts(kwargs))
    except NotImplementedError:
        if any(result.alias_info is None for result in schema(func).returns):
            refuse(mesh, f"{func} gives no shapes without its values")
        outs = None  # it only writes to its arguments, of which there is nothing here
    return outputs(func, absent(outs, mesh), args, kwargs)


@untraced
class Absent(torch.Tensor):
    """A tensor without data, on the device of a mesh that this rank is not in.

    A plain tensor on torch's `meta` device would not do: kernels ask a tensor for its device, to make others beside it.
    """

    mesh: Mesh
    #: the same shape and strides on the device that computes nothing else
    ghost: Tensor

    @staticmethod
    def __new__(cls: type[Absent], shape: Sequence[int], dtype: torch.dtype, mesh: Mesh) -> Absent:
        return _shown(torch.empty(tuple(shape), dtype=dtype, device=_META), mesh)

    __torch_function__ = no_torch_function
    __torch_dispatch__: Any = classmethod(_on_shapes)

    def tolist(self) -> Any:
        """Refused: there are no values."""
        refuse(self.mesh, "tolist needs its values")

    def _text(self, **_: Any) -> str:
        return f"Absent({list(self.shape)}, {self.dtype}, mesh={self.mesh})"

    __repr__: Any = _text

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Absent, (tuple(self.shape), self.dtype, self.mesh)


torch.serialization.add_safe_globals([Absent])


def _shown(ghost: Tensor, mesh: Mesh) -> Absent:
    self: Absent = make_wrapper(
        Absent,
        ghost.shape,
        strides=ghost.stride(),
        storage_offset=ghost.storage_offset(),
        dtype=ghost.dtype,
        layout=ghost.layout,
        device=Layout.of(mesh, ()).device,
    )
    self.ghost, self.mesh = ghost, mesh
    return self


def absent(value: Any, mesh: Mesh) -> Any:
    """`value` with every tensor in it (through lists and tuples) replaced by its shape."""
    if isinstance(value, Tensor):
        return value if isinstance(value, Absent) else _shown(_ghosts(value), mesh)
    kind = type(value)
    return kind([absent(item, mesh) for item in value]) if kind is tuple or kind is list else value


def _ghosts(value: Any) -> Any:
    """`value` with every tensor and device in it replaced by one that holds no data."""
    if isinstance(value, Absent):
        return value.ghost
    if isinstance(value, Tensor):
        return value if value.is_meta else torch.empty_like(value, device=_META)
    if isinstance(value, torch.device):
        return _META
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_ghosts(item) for item in value])
    return {key: _ghosts(item) for key, item in value.items()} if kind is dict else value


def _mesh(value: Any) -> Any:
    """The mesh of the first absent tensor in `value`."""
    if isinstance(value, Absent):
        return value.mesh
    several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((mesh for mesh in map(_mesh, several) if mesh is not None), None)


def refuse(mesh: Mesh, why: str) -> NoReturn:
    """Say that there is nothing to read here."""
    raise MeshError(
        f"rank {dist.get_rank()} is none of the {len(mesh.ranks)} ranks of mesh {mesh} and holds nothing of a tensor on it: "
        f"{why}; redistribute the tensor to a mesh with this rank first, or guard the code with "
        "`if mesh.coordinate(rank) is not None`"
    )
