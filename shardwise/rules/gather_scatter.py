"""Gather and scatter along a dim, and the triangles of matrices.

Reading along a sharded dim, each rank gives what it holds and zero for the rest: a partial sum. Writing along a sharded dim,
each rank writes to a spare row what falls to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.schema import schema_of
from ..layouts.layout import Layout
from ..propagation.notation import Call, Kernel, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import ShardPosition, keep, padded, reading

aten = torch.ops.aten

# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write(call: Call, wants: Sequence[Layout]) -> Any:
    """Write the rows that this rank holds, and the others to a spare row."""
    (dim,) = call.dims("dim")
    if not wants[0].ndim or not wants[0].axes_of(dim):
        return None
    shard, op, in_place = ShardPosition(wants[0], dim), call.op, call.written is not None

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        (x, _, index, *rest), numbers = shard.split(args)
        length = x.shape[dim]
        position, _ = shard.local(index, numbers, elsewhere=length)
        with shard.naming(index):
            out: Tensor = op(padded(x, dim), dim, position, *rest, **kwargs).narrow(dim, 0, length)
        return x.copy_(out) if in_place else out.contiguous()

    return kernel, *shard.numbers


# ── where sizes differ ────────────────────────────────────────────────────────────────────────────────────────────────


def _corner(x: Any, sizes: Sequence[int], but: int = -1) -> Any:
    """The first `sizes` of each dim, except of dim `but`."""
    for dim, size in enumerate(sizes):
        if dim != but and x.shape[dim] != size:
            x = aten.slice(x, dim, 0, size)
    return x


def _if_sizes_differ(program: Kernel, call: Call) -> Proposal | None:
    """The program where the index is smaller than the tensor, apart from the dim, or than the source."""
    index, source, (dim,) = call["index"].shape, call.arguments.get("src"), call.dims("dim")
    differ = isinstance(source, Layout) and source.shape != index
    differ |= any(a != b for i, (a, b) in enumerate(zip(call["self"].shape, index, strict=False)) if i != dim)
    return Proposal((), (), program=program) if differ else None


def _gather_corner(tools: Toolbox, op: Any, x: Any, dim: int, index: Any, **words: Any) -> Any:
    return op(_corner(x, index.shape, dim % x.ndim), dim, index, **words)


def _scatter_corner(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    given, in_place = schema_of(op).named(args, kwargs), bool(schema_of(op).written)
    target, index = given["self"], given["index"]
    if isinstance(given.get("src"), Tensor):
        given["src"] = _corner(given["src"], index.shape)
    x = target if in_place else target.clone()
    x = tools.move(x, tools.layout(x).reduced()) if tools.layout(x).partials else x
    corner = given["self"] = _corner(x, index.shape, given["dim"] % max(x.ndim, 1))
    if in_place:
        op(**given)
        return target if x is target else target.copy_(x)
    if corner is x:
        return op(**given)
    corner.copy_(op(**given))
    return x


def _with_one_index(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    given = schema_of(op).named(args, kwargs)
    return op(**{**given, "index": given["index"].reshape(1)})


def _if_without_dims(call: Call) -> Proposal | None:
    """A tensor without dims is indexed whole: its one row has no dim that could be sharded. An index without dims is a line."""
    if call.tensors[0].ndim:
        return None if call["index"].ndim else Proposal((), (), program=_with_one_index)
    return Proposal(tuple(t.replicated() for t in call.tensors), (call.result(0, ()),))


# ── rows along a dim ──────────────────────────────────────────────────────────────────────────────────────────────────

_reads = partial(
    rule, linear=((0,),), passes="all", kernel=lambda call, wants: reading(wants[0], call.dims("dim")[0], 2, call.op)
)
_reads("gather", "...[dim=s], ...[dim=t] -> ...[dim=t]", function=partial(_if_sizes_differ, _gather_corner))
_reads("index_select", "...[dim=s], t -> ...[dim=t]", function=_if_without_dims)

#: Why placements that would do for what is written to are not offered.
WRITTEN = "sum max min product shard: only of some reductions, values or indices, or of several arguments at a time"
_scatter = partial(rule, kernel=_write, function=partial(_if_sizes_differ, _scatter_corner), unoffered=WRITTEN)
_scatter("scatter.src", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", linear=((0, 2),), whole="t", lost=None)
_scatter("scatter.value", "...[dim=s], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter.value_reduce", "...[dim=s], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter.reduce", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter_reduce", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_scatter("scatter_add", "...[dim=s], ...[dim=t], ...[dim=t] -> ...[dim=s]", linear=((0, 2),))

_written = partial(rule, kernel=_write, function=_if_without_dims, unoffered=WRITTEN)
_written("index_add", "...[dim=s], t, ...[dim=t] -> ...[dim=s]", linear=((0, 2),))
_written("index_copy", "...[dim=s], t, ...[dim=t] -> ...[dim=s]", linear=((0, 2),), whole="t", lost=None)
_written("index_reduce", "...[dim=s], t, ...[dim=t] -> ...[dim=s]", whole="t", lost=None)
_written("index_fill", "...[dim=s], t, v -> ...[dim=s]", whole="t", lost=None)


def _put(tools: Toolbox, op: Any, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if index.numel() != source.numel():
        raise IndexError(f"put: {index.numel()} indices and a source of {source.numel()} elements; it takes as many of both")
    return aten.index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate).reshape(x.shape)


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
