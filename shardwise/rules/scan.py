"""Scans along a dim: a scan of a cut dim is a local scan plus the carry of the shards before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import Factor, Layout
from .reduce import reduced
from .table import rule

aten = torch.ops.aten

# ── sums and products ─────────────────────────────────────────────────────────────────────────────────────────────────


class Scan(NamedTuple):
    """How a scan continues: what a shard that is not before contributes, the total of some shards, a scan plus a carry."""

    identity: float
    total: Callable[[Tensor, int], Tensor]
    carry: Callable[[Tensor, Tensor], Tensor]


SCANS = {
    "sum": Scan(0, lambda x, dim: x.sum(dim, keepdim=True, dtype=x.dtype), torch.add),
    "product": Scan(1, lambda x, dim: x.prod(dim, keepdim=True, dtype=x.dtype), torch.mul),
    "logsumexp": Scan(-torch.inf, lambda x, dim: x.logsumexp(dim, keepdim=True), torch.logaddexp),
}


def _scan(kind: str, tools: Any, op: Any, x: Any, dim: int, **words: Any) -> Any:
    """Every shard scans its own and gives its last row, the total; all get all totals, and carry those before their own."""
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    if len(layout.dims[dim]) > 1:
        return op(tools.move(x, layout.without(layout.axes_of(dim))), dim, **words)
    own = tools.each(_local_scan, layout.mesh, op, x, dim, words)
    every, mine = _last_rows(tools, own, layout, dim)
    local = tools.each(_carried, layout.mesh, own, every, mine, dim, kind)
    return tools.wrap(local, layout.replace(dtype=own.dtype, stride=None))


def _last_rows(tools: Any, own: Tensor, layout: Layout, dim: int) -> tuple[Any, Tensor]:
    """The last row of every shard that has one, on every rank, and how many of them are before its own. The dim is one factor:
    of several, a shard would be no one interval and have several last rows."""
    rows = _row_per_shard(layout, dim).replace(dtype=own.dtype, stride=None)
    last = tools.wrap(tools.each(_last_row, layout.mesh, own, dim), rows)
    return tools.move(last, rows.without(layout.axes_of(dim))), tools.offset(rows, dim)


def _row_per_shard(layout: Layout, dim: int) -> Layout:
    factor = layout.dims[dim][0]
    sizes = tuple(min(size, 1) for size in factor.sizes)
    rows = Factor(sum(sizes), factor.axes, sizes)
    return layout.replace(dims=[(rows,) if d == dim else layout.dims[d] for d in range(layout.ndim)], stride=None)


def _local_scan(op: Any, x: Tensor, dim: int, words: dict[str, Any]) -> Tensor:
    return op(x, dim, **words).contiguous()


def _last_row(x: Tensor, dim: int) -> Tensor:
    held = x.shape[dim]
    return x.narrow(dim, max(held - 1, 0), min(held, 1)).contiguous()


def _carried(own: Tensor, every: Tensor, mine: Tensor, dim: int, kind: str) -> Tensor:
    scan = SCANS[kind]
    place = torch.arange(every.shape[dim], device=own.device).view([-1 if d == dim else 1 for d in range(own.ndim)])
    return scan.carry(own, scan.total(torch.where(place < mine, every, scan.identity), dim))


rule("cumsum", "...[dim] -> ...[dim]", whole="[]", linear=((0,),), program=partial(_scan, "sum"))
rule("cumprod", "...[dim] -> ...[dim]", whole="[]", program=partial(_scan, "product"))
rule("logcumsumexp", "...[dim] -> ...[dim]", whole="[]", program=partial(_scan, "logsumexp"))

# ── extremes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _extremes(no_worse: Callable[[Tensor, Tensor], Tensor], tools: Any, op: Any, x: Any, dim: int) -> tuple[Any, Any]:
    """The same with the index of each extreme: of equal values the last is taken, and nan is the best of all."""
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    if len(layout.dims[dim]) > 1:
        return op(tools.move(x, layout.without(layout.axes_of(dim))), dim)
    value, index = tools.each(_local_extremes, layout.mesh, op, x, dim, tools.offset(layout, dim))
    values, mine = _last_rows(tools, value, layout, dim)
    indices, _ = _last_rows(tools, index, layout, dim)
    pairs = [value, index, values, indices, mine]
    value, index = tools.each(_carried_extremes, layout.mesh, op, no_worse, dim, *pairs)
    return tools.wrap(value, layout.replace(stride=None)), tools.wrap(index, layout.replace(dtype=torch.int64, stride=None))


def _local_extremes(op: Any, x: Tensor, dim: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    value, index = op(x, dim)
    return value.contiguous(), (index + offset).contiguous()


def _carried_extremes(op: Any, no_worse: Any, dim: int, *pairs: Tensor) -> tuple[Tensor, Tensor]:
    value, index, values, indices, mine = pairs
    best, row = op(values, dim)
    before = (mine - 1).clamp(min=0).view(1)
    carry, place = best.index_select(dim, before), indices.gather(dim, row).index_select(dim, before)
    own = (mine == 0) | (value != value) | ((carry == carry) & no_worse(value, carry))
    return torch.where(own, value, carry), torch.where(own, index, place)


rule("cummax", "...[dim] -> ...[dim]", whole="[]", program=partial(_extremes, torch.ge))
rule("cummin", "...[dim] -> ...[dim]", whole="[]", program=partial(_extremes, torch.le))
