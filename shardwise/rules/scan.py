"""Scans along a dim: a scan of a sharded dim is a local scan plus the carry of the shards before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import Factor, Layout, whole
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .reduction import reduced

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


def _scan(kind: str, tools: Toolbox, op: Any, x: Any, dim: int, **words: Any) -> Any:
    """Every shard scans its own and gives its last row, the total; all get all totals, and carry those before their own."""
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    # A shard that is no one interval has several totals; a complex logarithm is one of many, which one the order decides.
    if len(layout.dims[dim]) > 1 or (kind == "logsumexp" and x.is_complex()):
        return op(tools.move(x, layout.without(layout.axes_of(dim))), dim, **words)
    own = tools.each(lambda x: op(x, dim, **words).contiguous(), layout.mesh, x)
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

# ── extremes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gathered_pair(tools: Toolbox, pair: Sequence[Tensor], layout: Layout, axes: Iterable[str]) -> tuple[Tensor, Tensor]:
    """Two local values of a layout, whatever their dtypes, with some axes gathered by one collective: as bytes side by side."""
    dtypes = [x.dtype for x in pair]
    rows = Layout.of(layout.mesh, [*layout.dims, (whole(sum(dtype.itemsize for dtype in dtypes)),)], (), torch.uint8)
    local = tools.wrap(tools.each(_as_bytes, layout.mesh, *pair), rows)
    return tools.each(_of_bytes, layout.mesh, tools.move(local, rows.without(axes)), dtypes)


def _as_bytes(*several: Tensor) -> Tensor:
    return torch.cat([x.contiguous().unsqueeze(-1).view(torch.uint8) for x in several], -1)


def _of_bytes(x: Tensor, dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
    parts = x.split([dtype.itemsize for dtype in dtypes], -1)
    own = [part.clone(memory_format=torch.contiguous_format) for part in parts]  # a view of other dtype has to be aligned
    return tuple(part.view(dtype).squeeze(-1) for part, dtype in zip(own, dtypes, strict=True))


def _extremes(no_worse: Callable[[Tensor, Tensor], Tensor], tools: Toolbox, op: Any, x: Any, dim: int) -> tuple[Any, Any]:
    """The same with the index of each extreme: of equal values the last is taken, and nan is the best of all."""
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    if len(layout.dims[dim]) > 1:
        return op(tools.move(x, layout.without(layout.axes_of(dim))), dim)
    value, index = tools.each(_local_extremes, layout.mesh, op, x, dim, tools.offset(layout, dim))
    rows = _row_per_shard(layout, dim)
    last = [tools.each(_last_row, layout.mesh, own, dim) for own in (value, index)]
    every = gathered_pair(tools, last, rows, layout.axes_of(dim))
    pairs = [value, index, *every, tools.offset(rows, dim)]
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
