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
from .._torch.tensors import make_wrapper, no_torch_function, schema, tree_flatten, tree_map_only, tree_unflatten
from ..errors import MeshError
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .simulated import outputs, stands_back

_META = torch.device("meta")


def _on_shapes(cls: type, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
    """Run an operator on shapes."""
    if stands_back(cls, types):
        return NotImplemented
    kwargs = kwargs or {}
    leaves, tree = tree_flatten((args, kwargs))
    mesh, device = next((x.mesh, x.device) for x in leaves if isinstance(x, Absent))
    if torch.Tag.data_dependent_output in func.tags:
        refuse(mesh, f"{func} needs its values")
    try:
        ghosts, named = tree_unflatten(map(_ghost, leaves), tree)
        outs = func(*ghosts, **named)
    except NotImplementedError:
        if any(result.alias_info is None for result in schema(func).returns):
            refuse(mesh, f"{func} gives no shapes without its values")
        outs = None  # it only writes to its arguments, of which there is nothing here
    return outputs(func, absent(outs, mesh, device), args, kwargs)


@untraced
class Absent(torch.Tensor):
    """A tensor without data, on the device of a mesh that this rank is not in. One on torch's `meta` device would not do:
    kernels ask a tensor for its device, to make others beside it."""

    mesh: Mesh
    #: the same shape and strides on the device that computes nothing else
    ghost: Tensor

    @staticmethod
    def __new__(cls: type[Absent], shape: Sequence[int], dtype: torch.dtype, mesh: Mesh) -> Absent:
        return absent(torch.empty(tuple(shape), dtype=dtype, device=_META), mesh)

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


def absent(value: Any, mesh: Mesh, device: torch.device | None = None) -> Any:
    """`value` with every tensor in it replaced by its shape."""
    device = device or Layout.of(mesh, ()).device

    def without_data(x: Tensor) -> Absent:
        if isinstance(x, Absent):
            return x
        ghost = _ghost(x)
        facts = ghost.stride(), ghost.storage_offset(), None, ghost.dtype, ghost.layout, device
        self: Absent = make_wrapper(Absent, ghost.shape, *facts)
        self.ghost, self.mesh = ghost, mesh
        return self

    return without_data(value) if isinstance(value, Tensor) else tree_map_only(Tensor, without_data, value)


def _ghost(x: Any) -> Any:
    """A tensor or a device that holds no data, in the place of one that does; all else as it is."""
    if isinstance(x, Absent):
        return x.ghost
    if isinstance(x, Tensor):
        return x if x.is_meta else torch.empty_like(x, device=_META)
    return _META if isinstance(x, torch.device) else x


def refuse(mesh: Mesh, why: str) -> NoReturn:
    """Say that there is nothing to read here."""
    raise MeshError(
        f"rank {dist.get_rank()} is none of the {len(mesh.ranks)} ranks of mesh {mesh} and holds nothing of a tensor on it: "
        f"{why}; redistribute the tensor to a mesh with this rank first, or guard the code with "
        "`if mesh.coordinate(rank) is not None`"
    )
