"""Scans and orders along a dim: a scan of a cut dim is a local scan plus the carry of the shards before; an order needs the
whole dim."""

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

# ── scans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    # A shard that is no one interval has several totals; a complex logarithm is one of many, which one the order decides.
    if len(layout.dims[dim]) > 1 or (kind == "logsumexp" and x.is_complex()):
        return op(tools.move(x, layout.without(layout.axes_of(dim))), dim, **words)
    own = tools.each(_local_scan, layout.mesh, op, x, dim, words)
    dtype = own.dtype
    rows = _row_per_shard(layout, dim).replace(dtype=dtype, stride=None)
    totals = tools.wrap(tools.each(_last_row, layout.mesh, own, dim), rows)
    every = tools.move(totals, rows.without(layout.axes_of(dim)))
    local = tools.each(_carried, layout.mesh, own, every, tools.offset(rows, dim), dim, kind)
    return tools.wrap(local, layout.replace(dtype=dtype, stride=None))


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
rule("cumprod", "...[dim] -> ...[dim]", whole="[]", passes="product", program=partial(_scan, "product"))
rule("logcumsumexp", "...[dim] -> ...[dim]", whole="[]", program=partial(_scan, "logsumexp"))
rule("cummax cummin", "...[dim] -> ...[dim]", whole="[]")

# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────

rule("sort topk", "...[dim] -> ...[dim]", whole="[]")
rule("kthvalue median nanmedian mode", "...[dim] -> ...", whole="[]")
