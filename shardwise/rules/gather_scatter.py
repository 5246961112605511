"""Gather and scatter along a dim, and the triangles of matrices.

Reading along a sharded dim, each rank gives what it holds and zero for the rest: a partial sum. Writing along a sharded dim,
each rank writes to a spare row what falls to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layouts.layout import Layout
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import ShardPosition, at_least_one, keep, padded

aten = torch.ops.aten

# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dim(call: Call) -> int:
    return int(call["dim"]) % max(call.tensors[0].ndim, 1)


def _is_sharded(layout: Layout, dim: int) -> bool:
    return dim < layout.ndim and bool(layout.axes_of(dim))


def _read(call: Call, wants: Sequence[Layout]) -> Any:
    """Read what this rank holds; the rest is zero."""
    dim = _dim(call)
    if not _is_sharded(wants[0], dim):
        return None
    shard, op = ShardPosition(wants[0], dim), call.op

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        (x, _, index, *rest), numbers = shard.split(args)
        position, mine = shard.local(index, numbers)
        try:
            found: Tensor = op(at_least_one(x, dim), dim, position, *rest, **kwargs)
        except (IndexError, RuntimeError) as error:
            raise shard.naming(error, index) from None
        if mine.ndim < found.ndim:
            mine = mine.view([-1 if i == dim else 1 for i in range(found.ndim)])
        return keep(found, mine)

    return kernel, *shard.numbers


def _write(call: Call, wants: Sequence[Layout]) -> Any:
    """Write the rows that this rank holds, and the others to a spare row."""
    dim = _dim(call)
    if not _is_sharded(wants[0], dim):
        return None
    shard, op, in_place = ShardPosition(wants[0], dim), call.op, call.written is not None

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        (x, _, index, *rest), numbers = shard.split(args)
        length = x.shape[dim]
        position, _ = shard.local(index, numbers, elsewhere=length)
        try:
            out: Tensor = op(padded(x, dim), dim, position, *rest, **kwargs).narrow(dim, 0, length)
        except (IndexError, RuntimeError) as error:
            raise shard.naming(error, index) from None
        return x.copy_(out) if in_place else out.contiguous()

    return kernel, *shard.numbers


# ── where sizes differ ────────────────────────────────────────────────────────────────────────────────────────────────


def _named(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _corner(x: Any, sizes: Sequence[int], but: int = -1) -> Any:
    """The first `sizes` of each dim, except of dim `but`."""
    for dim, size in enumerate(sizes):
        if dim != but and x.shape[dim] != size:
            x = aten.slice(x, dim, 0, size)
    return x


def _differ(call: Call) -> bool:
    """Whether the index is smaller than the tensor, apart from the dim, or than the source."""
    index, dim = call["index"].shape, _dim(call)
    source = call.arguments.get("src")
    if isinstance(source, Layout) and source.shape != index:
        return True
    return any(a != b for i, (a, b) in enumerate(zip(call["self"].shape, index, strict=False)) if i != dim)


def _gather_corner(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    given = _named(op, args, kwargs)
    x, dim, index = given.pop("self"), given.pop("dim"), given.pop("index")
    return op(_corner(x, index.shape, dim % x.ndim), dim, index, **given)


def _scatter_corner(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    given = _named(op, args, kwargs)
    target = x = given["self"]
    index = given["index"]
    if isinstance(given.get("src"), Tensor):
        given["src"] = _corner(given["src"], index.shape)
    in_place = op._schema.is_mutable
    if not in_place:
        x = x.clone()
    if tools.layout(x).partials:
        x = tools.move(x, tools.layout(x).reduced(), op._schema.name.replace("::", "."))
    corner = given["self"] = _corner(x, index.shape, given["dim"] % max(x.ndim, 1))
    if in_place:
        op(**given)
        return target if x is target else target.copy_(x)
    if corner is x:
        return op(**given)
    corner.copy_(op(**given))
    return x


def _if_sizes_differ(program: Callable[..., Any]) -> Callable[[Call], Proposal | None]:
    return lambda call: Proposal((), (), program=program) if _differ(call) else None


def _with_one_index(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    given = _named(op, args, kwargs)
    return op(**{**given, "index": given["index"].reshape(1)})


def _if_without_dims(call: Call) -> Proposal | None:
    """A tensor without dims is indexed whole: its one row has no dim that could be sharded. An index without dims is one of
    one."""
    if call.tensors[0].ndim:
        return None if call["index"].ndim else Proposal((), (), program=_with_one_index)
    return Proposal(tuple(t.replicated() for t in call.tensors), (call.result(0, ()),))


# ── rows along a dim ──────────────────────────────────────────────────────────────────────────────────────────────────

rule(
    "gather",
    "...[dim=s], ...[dim=t] -> ...[dim=t]",
    linear=((0,),),
    passes="all",
    kernel=_read,
    function=_if_sizes_differ(_gather_corner),
)
_rows = partial(rule, function=_if_without_dims)
_rows("index_select", "...[dim=s], t -> ...[dim=t]", linear=((0,),), passes="all", kernel=_read)

#: Why placements that would do for what is written to are not offered.
WRITTEN = "sum max min product shard: only of some reductions, values or indices, or of several arguments at a time"
_scatter = partial(rule, kernel=_write, function=_if_sizes_differ(_scatter_corner), unoffered=WRITTEN)
_scatter("scatter.src", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", linear=((0, 2),), whole="t", lost=None)
_scatter("scatter.value", "...[dim=s], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter.value_reduce", "...[dim=s], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter.reduce", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter_reduce", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter_add", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", linear=((0, 2),))

_written = partial(_rows, kernel=_write, unoffered=WRITTEN)
_written("index_add", "...[dim=s], t, ...[dim=t] -> ...[dim=s]", linear=((0, 2),))
_written("index_copy", "...[dim=s], t, ...[dim=t] -> ...[dim=s]", linear=((0, 2),), whole="t", lost=None)
_written("index_reduce", "...[dim=s], t, ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_written("index_fill", "...[dim=s], t, v -> ...[dim=s]", whole="t", lost=None)


def _put(tools: Toolbox, op: Any, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if index.numel() != source.numel():
        raise IndexError(
            f"put: an index of {index.numel()} elements and a source of {source.numel()}; it takes as many of both"
        )
    line = aten.index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return line.reshape(x.shape)


rule("put", program=_put)

# ── triangles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _triangle(call: Call, wants: Sequence[Layout]) -> Any:
    layout, diagonal, in_place = wants[0], call["diagonal"], call.written is not None
    if not (layout.axes_of(-2) or layout.axes_of(-1)):
        return None
    rows, columns = ShardPosition(layout, layout.ndim - 2), ShardPosition(layout, layout.ndim - 1)
    lower = "tril" in call.name

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rest, of_columns = columns.split(args)
        _, of_rows = rows.split(rest)
        distance = columns.index(x.shape[-1], of_columns) - rows.index(x.shape[-2], of_rows)[:, None]
        out = keep(x, distance <= diagonal if lower else distance >= diagonal)
        return x.copy_(out) if in_place else out

    return kernel, *rows.numbers, *columns.numbers


rule("tril triu", "... -> ...", linear=((0,),), passes="all", kernel=_triangle)
