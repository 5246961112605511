"""New DTensors from sizes: `zeros`, `ones`, `full`, `empty`, `rand`, `randn`, `randint`, `randperm`. No rank makes more than
its own shard, except of a permutation; random numbers are those of the whole tensor whatever the mesh."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import SymFloat, SymInt, Tensor

from ..base.argument_checks import a_dtype, flag, integer, optional, refuse, sizes
from ..comm import transport
from ..errors import MeshError, OperatorError
from ..layouts.from_placements import Placements, make_layout
from ..layouts.layout import Layout, PerRank
from ..layouts.mesh import Mesh, chosen
from ..layouts.text import written
from ..propagation.table import LIBRARY
from ..random.bits import DIGITS, Draw, bounds
from .draw import NORMAL, UNIFORM, draw
from .dtensor import DTensor
from .toolbox import Toolbox
from .wrapping import wrap


class Keywords(TypedDict, total=False):
    """What all functions here take beside sizes: torch's keywords, and `mesh`, which is short for `device_mesh`."""

    mesh: Mesh | Any
    placements: Placements | None
    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: Mesh | Any


def _new(  # noqa: PLR0913  torch's keywords
    size: Any,
    want: Draw,
    *,
    mesh: Mesh | Any = None,
    placements: Placements | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | Any = None,
    **unknown: Any,
) -> DTensor:
    if unknown:
        refuse("a keyword of a new tensor", f"one of {', '.join(Keywords.__annotations__)}", next(iter(unknown)))
    shape = sizes(size[0] if len(size) == 1 and not isinstance(size[0], int) else size, "size")
    optional(a_dtype, dtype, "dtype")
    flag(requires_grad, "requires_grad")
    if layout is not torch.strided:
        refuse("layout", "torch.strided, which is how the elements of a DTensor lie (placements say on which rank)", layout)
    if mesh is not None and device_mesh is not None:
        raise MeshError("give one of mesh= and device_mesh=, which are the same")
    on, dtype = chosen(device_mesh if mesh is None else mesh), dtype or torch.get_default_dtype()
    if torch.compiler.is_compiling():
        facts = (on.write(), written(placements), dtype, *want, LIBRARY.key())
        made: DTensor = torch.ops.shardwise.new(shape, *facts)
    else:
        made = made_tensor(shape, on, placements, dtype, want)
    return made.requires_grad_(requires_grad)


def made_tensor(shape: Sequence[int], mesh: Mesh, placements: Any, dtype: torch.dtype, want: Draw) -> DTensor:
    """A new tensor: random numbers of a kind, or "constant", or (what lies in) "memory"."""
    layout = make_layout(shape, mesh, {} if placements is None else placements, dtype).reduced()
    tools = Toolbox(DTensor)
    if want.kind == "permutation":
        return _permutation(tools, layout.replace(dtype=torch.int64)).to(dtype)
    if want.kind not in ("constant", "memory"):
        return draw(tools, layout, want)
    local = transport(mesh).each(_fill, mesh, PerRank(layout.local_shape), want.numbers, dtype, layout.device)
    return wrap(DTensor, local, layout)


def _fill(shape: tuple[int, ...], value: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    make = torch.full if value else torch.empty
    return make(shape, *value, dtype=dtype, device=device)


def _permutation(tools: Toolbox, layout: Layout) -> Any:
    """The order of random words: every rank sorts all of them, which is quicker than a sort that communicates."""
    words = draw(tools, layout.replicated(), Draw("bits"))
    local = tools.each(lambda words: torch.sort(words, stable=True).indices, layout.mesh, words)
    return tools.move(tools.wrap(local, layout.replicated()), layout)


def zeros(*size: Any, **words: Unpack[Keywords]) -> DTensor:
    """Zeros. A partial axis is replicated: every rank knows the value.

    >>> import shardwise as sw
    >>> zeros(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, Draw("constant", (0,)), **words)


def ones(*size: Any, **words: Unpack[Keywords]) -> DTensor:
    """Ones.

    >>> import shardwise as sw
    >>> ones(6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(0)}).sum().item()
    6.0
    """
    return _new(size, Draw("constant", (1,)), **words)


def full(size: Any, fill_value: Any, **words: Unpack[Keywords]) -> DTensor:
    """One value everywhere.

    >>> import shardwise as sw
    >>> full((2, 3), 7.0, mesh=sw.init_mesh(tp=2)).sum().item()
    42.0
    """
    if not isinstance(fill_value, int | float | complex | SymInt | SymFloat):
        refuse("full: fill_value", "a number", fill_value)
    if words.get("dtype") is None:
        words["dtype"] = torch.tensor(fill_value).dtype
    return _new((size,), Draw("constant", (fill_value,)), **words)


def empty(*size: Any, **words: Unpack[Keywords]) -> DTensor:
    """Uninitialised memory.

    >>> import shardwise as sw
    >>> empty(4, mesh=sw.init_mesh(tp=2), dtype=torch.int64)
    DTensor(i64[4], mesh=(tp=2))
    """
    return _new(size, Draw("memory"), **words)


def rand(*size: Any, **words: Unpack[Keywords]) -> DTensor:
    """Numbers from 0 to 1: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> rand(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, UNIFORM, **words)


def randn(*size: Any, **words: Unpack[Keywords]) -> DTensor:
    """Standard normal numbers: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randn(4, 6, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)})
    DTensor(f32[4, 6@tp], mesh=(tp=2))
    """
    return _new(size, NORMAL, **words)


def randint(low: int, high: int, size: Any, **words: Unpack[Keywords]) -> DTensor:
    """Integers from `low` to less than `high`: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randint(3, 4, (2, 6), mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(1)}).sum().item()
    36
    """
    for name, bound in (("low", low), ("high", high)):
        integer(bound, f"randint: {name}", -(2**63), 2**63)
    if words.get("dtype") is None:
        words["dtype"] = torch.int64
    return _new((size,), Draw("integer", (low, high - 1)), **words)


def randperm(n: int, **words: Unpack[Keywords]) -> DTensor:
    """The integers from 0 to less than `n` in a random order: the same for a seed on every mesh and in every layout.

    >>> import shardwise as sw
    >>> randperm(5, mesh=sw.init_mesh(tp=2), placements={"tp": sw.Shard(0)}).sort().values.full_tensor()
    tensor([0, 1, 2, 3, 4])
    """
    dtype = words["dtype"] = optional(a_dtype, words.get("dtype"), "randperm: dtype") or torch.int64
    integer(n, "randperm: n", 0)
    most = 2 ** DIGITS[dtype] if dtype in DIGITS else bounds(dtype)[1]
    if dtype is torch.bool or not 0 <= n <= most + 1:
        raise OperatorError(
            f"randperm of {n} integers of {dtype}: n is from 0 to {most + 1}, so that the dtype holds every one"
        )
    return _new(((n,),), Draw("permutation"), **words)


for _function in (zeros, ones, full, empty, rand, randn, randint, randperm):  # `help` shows their keywords one by one
    _own, _keywords = (inspect.signature(f).parameters.values() for f in (_function, _new))
    _all = [*(x for x in _own if x.kind is not x.VAR_KEYWORD), *(x for x in _keywords if x.kind is x.KEYWORD_ONLY)]
    vars(_function)["__signature__"] = inspect.Signature(_all, return_annotation="DTensor")
