"""New DTensors from sizes: `zeros`, `ones`, `full`, `empty`, `rand`, `randn`, `randint`, `randperm`. No rank makes more than
its own shard, except of a permutation; random numbers are those of the whole tensor whatever the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor

from ..base.argument_checks import a_dtype, flag, integer, optional, refuse, sizes
from ..comm import transport
from ..errors import MeshError, OperatorError
from ..layouts.from_placements import Placements, make_layout
from ..layouts.layout import Layout, PerRank
from ..layouts.mesh import Mesh, chosen
from ..layouts.placement import Replicate
from ..layouts.text import written
from ..propagation.fingerprint import LIBRARY
from ..random.bits import DIGITS, Draw, bounds
from .draw import NORMAL, UNIFORM, draw
from .dtensor import DTensor
from .toolbox import Toolbox
from .wrapping import wrap


class Want(NamedTuple):
    """What a new tensor is filled with: random numbers of a kind, else one number, else (there is none) what lies in memory."""

    draw: str = ""
    numbers: tuple[Any, ...] = ()


class _How(NamedTuple):
    """The keywords of the functions here: those of torch's, and `mesh`, which is short for `device_mesh`."""

    mesh: Any
    placements: Any
    dtype: torch.dtype | None
    layout: Any = torch.strided
    requires_grad: bool = False
    device_mesh: Any = None


def _new(size: Any, want: Want, how: _How) -> DTensor:
    shape = sizes(size[0] if len(size) == 1 and not isinstance(size[0], int) else size, "size")
    optional(a_dtype, how.dtype, "dtype")
    flag(how.requires_grad, "requires_grad")
    dtype = torch.get_default_dtype() if how.dtype is None else how.dtype
    if how.layout is not torch.strided:
        refuse("layout", "torch.strided, which is how the elements of a DTensor lie (placements say on which rank)", how.layout)
    if how.mesh is not None and how.device_mesh is not None:
        raise MeshError("give one of mesh= and device_mesh=, which are the same")
    mesh = chosen(how.device_mesh if how.mesh is None else how.mesh)
    if torch.compiler.is_compiling():
        told = (mesh.write(), written(how.placements), dtype, want.draw, want.numbers, LIBRARY.key())
        traced: DTensor = torch.ops.shardwise.new(shape, *told)
        return traced.requires_grad_(how.requires_grad)
    return made_tensor(shape, mesh, how.placements, dtype, want).requires_grad_(how.requires_grad)


def made_tensor(shape: Sequence[int], mesh: Mesh, placements: Any, dtype: torch.dtype, want: Want) -> DTensor:
    """A new tensor."""
    wanted = [Replicate()] * mesh.ndim if placements is None else placements
    layout = make_layout(shape, mesh, wanted, dtype).reduced()
    made: Any
    if want.draw == "permutation":
        made = _permutation(Toolbox(DTensor), layout.replace(dtype=torch.int64)).to(dtype)
    elif want.draw:
        made = draw(Toolbox(DTensor), layout, Draw(*want))
    else:
        local = transport(mesh).each(_fill, mesh, PerRank(layout.local_shape), want.numbers, dtype, layout.device)
        made = wrap(DTensor, local, layout)
    return made


def _fill(shape: tuple[int, ...], value: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not value:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full(shape, value[0], dtype=dtype, device=device)


def _permutation(tools: Toolbox, layout: Layout) -> DTensor:
    """The order of random words: every rank sorts all of them, which is quicker than a sort that communicates."""
    words = draw(tools, layout.replicated(), Draw("bits"))
    local = tools.each(_order, layout.mesh, words)
    return tools.move(tools.wrap(local, layout.replicated()), layout)


def _order(words: Tensor) -> Tensor:
    return torch.sort(words, stable=True).indices


def zeros(
    *size: Any,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """Zeros. A partial axis is replicated: every rank knows the value.

    >>> import shardwise as sw
    >>> zeros(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, Want(numbers=(0,)), _How(mesh, placements, dtype, layout, requires_grad, device_mesh))


def ones(
    *size: Any,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """Ones.

    >>> import shardwise as sw
    >>> ones(6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(0)}).sum().item()
    6.0
    """
    return _new(size, Want(numbers=(1,)), _How(mesh, placements, dtype, layout, requires_grad, device_mesh))


def full(  # noqa: PLR0913  torch's keywords
    size: Any,
    fill_value: Any,
    *,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """One value everywhere.

    >>> import shardwise as sw
    >>> full((2, 3), 7.0, mesh=sw.init_mesh(tp=2)).sum().item()
    42.0
    """
    if not isinstance(fill_value, int | float | complex | SymInt | SymFloat):
        refuse("full: fill_value", "a number", fill_value)
    optional(a_dtype, dtype, "full: dtype")
    return _new(
        (size,),
        Want(numbers=(fill_value,)),
        _How(mesh, placements, dtype or torch.tensor(fill_value).dtype, layout, requires_grad, device_mesh),
    )


def empty(
    *size: Any,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """Uninitialised memory.

    >>> import shardwise as sw
    >>> empty(4, mesh=sw.init_mesh(tp=2), dtype=torch.int64)
    DTensor(i64[4], mesh=(tp=2))
    """
    return _new(size, Want(), _How(mesh, placements, dtype, layout, requires_grad, device_mesh))


def rand(
    *size: Any,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """Numbers from 0 to 1: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> rand(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, Want(*UNIFORM), _How(mesh, placements, dtype, layout, requires_grad, device_mesh))


def randn(
    *size: Any,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """Standard normal numbers: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randn(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, Want(*NORMAL), _How(mesh, placements, dtype, layout, requires_grad, device_mesh))


def randint(  # noqa: PLR0913  torch's keywords
    low: int,
    high: int,
    size: Any,
    *,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """Integers from `low` to less than `high`: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randint(3, 4, (2, 6), mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)}).sum().item()
    36
    """
    for name, bound in (("low", low), ("high", high)):
        integer(bound, f"randint: {name}", -(2**63), 2**63)
    optional(a_dtype, dtype, "randint: dtype")
    return _new(
        (size,),
        Want("integer", (low, high - 1)),
        _How(mesh, placements, dtype or torch.int64, layout, requires_grad, device_mesh),
    )


def randperm(  # noqa: PLR0913  torch's keywords
    n: int,
    *,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
) -> DTensor:
    """The integers from 0 to less than `n` in a random order: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randperm(5, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(0)}).sort().values.full_tensor()
    tensor([0, 1, 2, 3, 4])
    """
    dtype = torch.int64 if dtype is None else a_dtype(dtype, "randperm: dtype")
    integer(n, "randperm: n", 0)
    most = 2 ** DIGITS[dtype] if dtype in DIGITS else bounds(dtype)[1]
    if dtype is torch.bool or not 0 <= n <= most + 1:
        raise OperatorError(
            f"randperm of {n} integers of {dtype}: n is from 0 to {most + 1}, so that the dtype holds every one"
        )
    return _new(((n,),), Want("permutation"), _How(mesh, placements, dtype, layout, requires_grad, device_mesh))
