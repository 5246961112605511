"""New DTensors from sizes: `zeros`, `ones`, `full`, `empty`, `rand`, `randn`. No rank makes more than its own piece, except of
random numbers, which are those of the whole tensor whatever the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .comm import door
from .identity import LIBRARY
from .layout import PerRank, Placements, make_layout, written
from .mesh import Mesh
from .placement import Replicate
from .random import Fill, normal, sample, uniform
from .tensor import DTensor
from .tools import Tools, wrap


class Want(NamedTuple):
    """What a new tensor is filled with: a value, or random numbers, or whatever lies in memory."""

    value: Any = None
    draw: str = ""


def _new(size: Any, mesh: Mesh | Any, placements: Placements | None, dtype: torch.dtype | None, want: Want) -> DTensor:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if torch.compiler.is_compiling():
        told = (mesh.write(), written(placements), dtype, want.value, want.draw, LIBRARY.key())
        traced: DTensor = torch.ops.shardwise.new(shape, *told)
        return traced
    return made_tensor(shape, Mesh.from_torch(mesh), placements, dtype, want)


def made_tensor(shape: Sequence[int], mesh: Mesh, placements: Any, dtype: torch.dtype, want: Want) -> DTensor:
    """A new tensor."""
    wanted = [Replicate()] * mesh.ndim if placements is None else placements
    layout = make_layout(shape, mesh, wanted, dtype).reduced()
    if want.draw:
        drawn: DTensor = Tools(DTensor).distribute(sample(layout.shape, dtype, layout.device, Fill(want.draw)), layout)
        return drawn
    local = door(mesh).each(_fill, mesh, PerRank(layout.local_shape), want.value, dtype, layout.device)
    made: DTensor = wrap(DTensor, local, layout)
    return made


def _fill(shape: tuple[int, ...], value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if value is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full(shape, value, dtype=dtype, device=device)


def zeros(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Zeros. A pending axis is replicated: every rank knows the value.

    >>> import shardwise as sw
    >>> zeros(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, mesh, placements, dtype, Want(0)).requires_grad_(requires_grad)


def ones(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Ones.

    >>> import shardwise as sw
    >>> ones(6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(0)}).sum().item()
    6.0
    """
    return _new(size, mesh, placements, dtype, Want(1)).requires_grad_(requires_grad)


def full(
    size: Any, fill_value: Any, *, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None
) -> DTensor:
    """One value everywhere.

    >>> import shardwise as sw
    >>> full((2, 3), 7.0, mesh=sw.init_mesh(tp=2)).sum().item()
    42.0
    """
    return _new((size,), mesh, placements, dtype or torch.tensor(fill_value).dtype, Want(fill_value))


def empty(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Uninitialised memory.

    >>> import shardwise as sw
    >>> empty(4, mesh=sw.init_mesh(tp=2), dtype=torch.int64)
    DTensor(i64[4], mesh=(tp=2))
    """
    return _new(size, mesh, placements, dtype, Want()).requires_grad_(requires_grad)


def rand(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Numbers from 0 to 1: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> rand(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, mesh, placements, dtype, Want(draw=uniform.operator)).requires_grad_(requires_grad)


def randn(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Standard normal numbers: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randn(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, mesh, placements, dtype, Want(draw=normal.operator)).requires_grad_(requires_grad)
