"""Scans, sorting, searching and counting. A scan of a sharded dim is a local scan plus the carry of the shards before; sorting
needs the whole dim; counts of each shard's elements are a partial sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import NotTraced, tracing_context
from ..layouts.layout import Factor, Layout, whole
from ..propagation.notation import Call, Proposal, Rule, parse
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .reduction import reduced

aten = torch.ops.aten

# ── scans: sums and products ──────────────────────────────────────────────────────────────────────────────────────────

#: How a scan continues: what a shard that is not before contributes, the total of some shards, a scan plus a carry.
SCANS: dict[str, tuple[float, Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (0, lambda x, dim: x.sum(dim, keepdim=True, dtype=x.dtype), torch.add),
    "product": (1, lambda x, dim: x.prod(dim, keepdim=True, dtype=x.dtype), torch.mul),
    "logsumexp": (-torch.inf, lambda x, dim: x.logsumexp(dim, keepdim=True), torch.logaddexp),
}


def _scan(kind: str, tools: Toolbox, op: Any, x: Any, dim: int, **words: Any) -> Any:
    """Every shard scans its own and gives its last row, the total; all get all totals, and carry those before their own."""
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    # A shard that is no one interval has several totals; a complex logarithm is one of many, which one the order decides.
    if len(layout.dims[dim]) > 1 or (kind == "logsumexp" and x.is_complex()):
        return op(tools.move(x, layout.without(layout.axes_of(dim))), dim, **words)
    own = tools.each(lambda x: op(x, dim, **words).contiguous(), layout.mesh, x)
    rows = _at_most(1, layout, dim).replace(dtype=own.dtype)
    totals = tools.wrap(tools.each(_last_row, layout.mesh, own, dim), rows)
    every = tools.move(totals, rows.without(layout.axes_of(dim)))
    local = tools.each(_carried, layout.mesh, own, every, tools.offset(rows, dim), dim, kind)
    return tools.wrap(local, layout.replace(dtype=own.dtype, stride=None))


def _at_most(count: int, layout: Layout, dim: int) -> Layout:
    """A layout of so many rows of each shard along a dim, or of all where it has fewer."""
    factor = layout.dims[dim][0]
    sizes = tuple(min(size, count) for size in factor.sizes)
    rows = Factor(sum(sizes), factor.axes, sizes)
    return layout.replace(dims=[(rows,) if d == dim else own for d, own in enumerate(layout.dims)], stride=None)


def _last_row(x: Tensor, dim: int) -> Tensor:
    held = x.shape[dim]
    return x.narrow(dim, max(held - 1, 0), min(held, 1)).contiguous()


def _carried(own: Tensor, every: Tensor, mine: Tensor, dim: int, kind: str) -> Tensor:
    identity, total, carry = SCANS[kind]
    place = torch.arange(every.shape[dim], device=own.device).view([-1 if d == dim else 1 for d in range(own.ndim)])
    return carry(own, total(torch.where(place < mine, every, identity), dim))


rule("cumsum", "...[dim] -> ...[dim]", whole="[]", linear=((0,),), program=partial(_scan, "sum"))
rule("cumprod", "...[dim] -> ...[dim]", whole="[]", passes="product", program=partial(_scan, "product"))
rule("logcumsumexp", "...[dim] -> ...[dim]", whole="[]", program=partial(_scan, "logsumexp"))

# ── scans: extremes ───────────────────────────────────────────────────────────────────────────────────────────────────


def _gathered_pair(tools: Toolbox, pair: Sequence[Tensor], layout: Layout, axes: Iterable[str]) -> tuple[Tensor, Tensor]:
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
    value, index = tools.each(_numbered, layout.mesh, lambda x: op(x, dim), x, tools.offset(layout, dim))
    rows = _at_most(1, layout, dim)
    last = [tools.each(_last_row, layout.mesh, own, dim) for own in (value, index)]
    every = _gathered_pair(tools, last, rows, layout.axes_of(dim))
    pairs = [value, index, *every, tools.offset(rows, dim)]
    value, index = tools.each(_carried_extremes, layout.mesh, op, no_worse, dim, *pairs)
    return tools.wrap(value, layout.replace(stride=None)), tools.wrap(index, layout.replace(dtype=torch.int64, stride=None))


def _numbered(op: Any, x: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The values that an operator finds, and their global indices."""
    value, index = op(x)
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

# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────

rule("sort", "...[dim] -> ...[dim]", whole="[]")
rule("kthvalue median nanmedian mode", "...[dim] -> ...", whole="[]")


def _few(call: Call) -> Proposal | None:
    """Of a sharded dim every shard gives its own best, if these are few beside the whole dim."""
    layout, (dim,) = call.tensors[0].reduced(), call.dims("dim")
    if not (layout.ndim and layout.axes_of(dim) and len(layout.dims[dim]) == 1):
        return None
    worth = 4 * _at_most(call["k"], layout, dim).shape[dim] <= layout.shape[dim]  # an index goes with each of them
    return Proposal((), (), program=_topk) if worth else None


def _topk(tools: Toolbox, op: Any, x: Any, k: int, dim: int = -1, *words: bool) -> tuple[Any, Any]:
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    few, offset = _at_most(k, layout, dim), tools.offset(layout, dim)
    best = tools.each(_numbered, layout.mesh, lambda x: op(x, min(k, x.shape[dim]), dim, *words), x, offset)
    every = few.without(layout.axes_of(dim))
    values, indices = _gathered_pair(tools, best, few, layout.axes_of(dim))
    best, place = op(tools.wrap(values, every), k, dim, *words)
    return best, aten.gather(tools.wrap(indices, every.replace(dtype=torch.int64)), dim, place)


rule("topk", "...[dim] -> ...[dim]", whole="[]", function=_few)

# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _searchsorted(call: Call) -> Rule:
    """The rank of a value is the number of elements before it: that of a sharded sequence is the sum of those in its shards."""
    line = call["sorted_sequence"].ndim == 1
    sequence, values = ("s", "...") if line else ("... s", "... t")
    middle = [values] if isinstance(call["self"], Layout) else []
    behind = [sequence] if call["sorter"] is not None else []
    inputs, outputs = parse(f"{', '.join([sequence, *middle, *behind])} -> {values if middle else ''}")
    return Rule(inputs, outputs, whole=frozenset("s" if behind else ()))


rule("searchsorted", function=_searchsorted)
rule("bucketize", program=lambda tools, op, x, boundaries, **words: aten.searchsorted(boundaries, x, **words))

# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _range(tools: Toolbox, x: Any) -> tuple[Any, Any]:
    """The least and the greatest element as numbers, the same on every rank, by one reduction."""
    layout = tools.layout(x)
    ends = tools.each(_ends, layout.mesh, x)
    partials = [(axis, "max") for axis in layout.states]
    low, high = tools.plain(tools.wrap(ends, Layout.of(layout.mesh, [(whole(2),)], partials, ends.dtype))).tolist()
    return -low, high


def _ends(x: Tensor) -> Tensor:
    """Minus the least element and the greatest, in a dtype that holds them."""
    x = x.to(torch.float64 if x.is_floating_point() else torch.int64)
    nothing = -torch.inf if x.is_floating_point() else torch.iinfo(torch.int64).min + 1
    return torch.stack([-x.amin(), x.amax()]) if x.numel() else x.new_full((2,), nothing)


def _histc(tools: Toolbox, op: Any, x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Without limits those of the data are taken: where it is sharded, every rank needs the same."""
    x = reduced(tools, x)
    if tracing_context() is not None:
        return op(tools.replicated(x, tools.mesh(x), tools.operator), bins, min, max)
    low, high = _range(tools, x)
    return op(x, bins, *((low, high) if low < high else (low - 1, high + 1)))


def _without_limits(call: Call) -> Proposal | None:
    layout = call.tensors[0]
    if call["min"] != call["max"] or not layout.states or not all(layout.shape):
        return None
    return Proposal((), (), program=_histc)


rule("histc", "... -> h", function=_without_limits, static="min max")


def _weighted(op: Any, x: Tensor, weights: Tensor, minlength: int) -> Tensor:
    """Of no numbers torch counts no weights, but ones."""
    counts: Tensor = op(x, weights, minlength)
    return counts if x.numel() else counts.to(torch.float32 if weights.dtype is torch.float32 else torch.float64)


def _bincount(tools: Toolbox, op: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """The greatest number tells how many there are to count; every rank counts its own."""
    if tracing_context() is not None:
        raise NotTraced(
            "bincount in a compiled function: the length of its result depends on data; call it outside of compiled functions, "
            "or add ones to a tensor of fixed length with index_add or scatter_add"
        )
    mesh = tools.mesh(x, weights)
    x, weights = (t if t is None or tools.is_distributed(t) else tools.replicated(t, mesh) for t in (x, weights))
    if minlength < 0 or not x.numel() or (weights is not None and weights.shape != x.shape):  # whole: it raises what it raises
        x, weights = (None if t is None else tools.replicated(t, mesh) for t in (x, weights))
    layout = tools.layout(x).reduced()
    x = tools.move(x, layout)
    if weights is not None:
        own = tools.layout(weights)
        weights = tools.move(weights, own.replace(dims=layout.dims, partials=()) if layout.states else own.replicated())
    if layout.states:
        low, high = _range(tools, x)
        if low < 0:
            raise RuntimeError(f"bincount takes numbers that are not negative, got {low} in {layout}")
        minlength = max(minlength, high + 1)
    local = tools.each(op if weights is None or not layout.states else partial(_weighted, op), mesh, x, weights, minlength)
    partials = [(axis, "sum") for axis in layout.states]
    return tools.wrap(local, Layout.of(layout.mesh, [(whole(local.shape[0]),)], partials, local.dtype))


rule("bincount", program=_bincount)
