"""Sorting, searching and counting: sorting needs the whole dim; counts of each shard's elements are a partial sum."""

from __future__ import annotations

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
from .scan import gathered_pair

aten = torch.ops.aten

# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────

rule("sort", "...[dim] -> ...[dim]", whole="[]")
rule("kthvalue median nanmedian mode", "...[dim] -> ...", whole="[]")


def _few(call: Call) -> Proposal | None:
    """Of a sharded dim every shard gives its own best, if these are few beside the whole dim."""
    layout = call.tensors[0].reduced()
    dim = int(call["dim"]) % max(layout.ndim, 1)
    if not (layout.ndim and layout.axes_of(dim) and len(layout.dims[dim]) == 1):
        return None
    candidates = sum(_at_most(layout.dims[dim][0], call["k"]).sizes)
    worth = 4 * candidates <= layout.shape[dim]  # an index goes with each of them
    return Proposal((), (), program=_topk) if worth else None


def _at_most(factor: Factor, count: int) -> Factor:
    sizes = tuple(min(size, count) for size in factor.sizes)
    return Factor(sum(sizes), factor.axes, sizes)


def _topk(tools: Toolbox, op: Any, x: Any, k: int, dim: int = -1, *words: bool) -> tuple[Any, Any]:
    x = reduced(tools, x)
    layout, dim = tools.layout(x), dim % x.ndim
    few = layout.replace(dims=[(_at_most(own[0], k),) if d == dim else own for d, own in enumerate(layout.dims)], stride=None)
    best = tools.each(_local_topk, layout.mesh, op, x, k, dim, words, tools.offset(layout, dim))
    every = few.without(layout.axes_of(dim))
    values, indices = gathered_pair(tools, best, few, layout.axes_of(dim))
    best, place = op(tools.wrap(values, every), k, dim, *words)
    return best, aten.gather(tools.wrap(indices, every.replace(dtype=torch.int64)), dim, place)


def _local_topk(op: Any, x: Tensor, k: int, dim: int, words: Any, offset: Tensor) -> tuple[Tensor, Tensor]:
    value, index = op(x, min(k, x.shape[dim]), dim, *words)
    return value.contiguous(), (index + offset).contiguous()


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
