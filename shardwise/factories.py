"""New DTensors from sizes: `zeros`, `ones`, `full`, `empty`, `rand`, `randn`. No rank makes more than its own piece, except of
random numbers, which are those of the whole tensor whatever the mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .comm import door
from .layout import Layout, PerRank, Placements, make_layout
from .mesh import Mesh
from .placement import Replicate
from .random import Fill, normal, sample, uniform
from .tensor import DTensor
from .tools import Tools, wrap


def _layout(size: tuple[Any, ...], mesh: Mesh | Any, placements: Placements | None, dtype: torch.dtype | None) -> Layout:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    on = Mesh.from_torch(mesh)
    wanted = [Replicate()] * on.ndim if placements is None else placements
    return make_layout(shape, on, wanted, dtype or torch.get_default_dtype()).reduced()


def _filled(layout: Layout, value: Any, requires_grad: bool) -> DTensor:
    world = door(layout.mesh)
    local = world.each(_fill, layout.mesh, PerRank(layout.local_shape), value, layout.dtype, layout.device)
    found: DTensor = wrap(DTensor, local, layout)
    return found.requires_grad_(requires_grad)


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
    return _filled(_layout(size, mesh, placements, dtype), 0, requires_grad)


def ones(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Ones.

    >>> import shardwise as sw
    >>> ones(6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(0)}).sum().item()
    6.0
    """
    return _filled(_layout(size, mesh, placements, dtype), 1, requires_grad)


def full(
    size: Any, fill_value: Any, *, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None
) -> DTensor:
    """One value everywhere.

    >>> import shardwise as sw
    >>> full((2, 3), 7.0, mesh=sw.init_mesh(tp=2)).sum().item()
    42.0
    """
    return _filled(_layout((size,), mesh, placements, dtype or torch.tensor(fill_value).dtype), fill_value, False)


def empty(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Uninitialised memory.

    >>> import shardwise as sw
    >>> empty(4, mesh=sw.init_mesh(tp=2), dtype=torch.int64)
    DTensor(i64[4], mesh=(tp=2))
    """
    return _filled(_layout(size, mesh, placements, dtype), None, requires_grad)


def _random(layout: Layout, fill: Fill, requires_grad: bool) -> DTensor:
    whole = sample(layout.shape, layout.dtype, layout.device, fill)
    found: DTensor = Tools(DTensor).distribute(whole, layout)
    return found.requires_grad_(requires_grad)


def rand(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Numbers from 0 to 1: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> rand(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _random(_layout(size, mesh, placements, dtype), uniform, requires_grad)


def randn(
    *size: Any, mesh: Mesh, placements: Placements | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> DTensor:
    """Standard normal numbers: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randn(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _random(_layout(size, mesh, placements, dtype), normal, requires_grad)
