"""Reductions: a dim that is lost may be sharded, and what is left is partial; an empty shard contributes the identity.

Those that no collective finishes (var, norms, logsumexp, the index of an extreme) are programs of those that one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layouts.dtypes import WIDER, highest, lowest
from ..layouts.layout import Layout, whole
from ..propagation.notation import Call, Kernel, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten
Dims = int | Sequence[int] | None


def dims_of(dim: Dims, ndim: int) -> list[int]:
    """The dims an argument names, from the front; all where it names none; none of a tensor that has none.

    >>> dims_of(-1, 3), dims_of([], 2)
    ([2], [0, 1])
    """
    several = [dim] if isinstance(dim, int) else list(dim or range(ndim))
    return [d % ndim for d in several] if ndim else []


def reduced(tools: Toolbox, x: Any) -> Any:
    """A DTensor with nothing partial, so that a program that reads it several times reduces it once."""
    return tools.move(x, tools.layout(x).reduced())


def partials(layout: Layout, dims: Sequence[int], keepdim: bool, kind: str, dtype: torch.dtype) -> Layout:
    """What reducing over dims of a layout leaves: partial over the axes that shard them."""
    kept = [(whole(1),) if d in dims else layout.dims[d] for d in range(layout.ndim) if keepdim or d not in dims]
    return Layout.of(layout.mesh, kept, [(axis, kind) for d in dims for axis in layout.axes_of(d)], dtype)


# ── a collective finishes it ──────────────────────────────────────────────────────────────────────────────────────────

rule("sum", "...[dim] -> ...", linear=((0,),))
rule("nansum count_nonzero", "...[dim] -> ...", unoffered="sum: what is nan is left out when it is known")


def _scaled_by_global_count(call: Call, wants: Sequence[Layout]) -> Kernel | None:
    """Shards are uneven: each gives its mean times its part of the elements, and the sum of these is the mean."""
    layout, dims = wants[0], dims_of(call.arguments.get("dim"), wants[0].ndim)
    count = math.prod(layout.shape[d] for d in dims)
    if not count or not any(layout.axes_of(d) for d in dims):
        return None
    keepdim, dtype = bool(call.arguments.get("keepdim")), call.results[0].dtype

    def mean(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        held = math.prod(x.shape[d] for d in dims)
        if not held:
            return x.sum(dims, keepdim=keepdim, dtype=dtype)
        return call.op(x, *args, **kwargs) * (held / count)

    return mean


rule("mean", "...[dim] -> ...", linear=((0,),), kernel=_scaled_by_global_count)


def _or_identity(identity: Callable[[torch.dtype], Any], call: Call, wants: Sequence[Layout]) -> Kernel | None:
    """The operator, or its identity where it meets an empty shard, which it would refuse."""
    layout, dims = wants[0], dims_of(call.arguments.get("dim"), wants[0].ndim)
    if all(min(factor.sizes) for d in dims for factor in layout.dims[d]):
        return None
    keepdim = bool(call.arguments.get("keepdim"))

    def reduce(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if all(x.shape[d] for d in dims):
            return call.op(x, *args, **kwargs)
        return x.new_full(_shape(x, dims, keepdim), identity(x.dtype))

    return reduce


def _shape(x: Tensor, dims: Sequence[int], keepdim: bool) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]


rule("amax max.default", "...[dim] -> ...", lost="max", passes="max", kernel=partial(_or_identity, lowest))
rule("amin min.default", "...[dim] -> ...", lost="min", passes="min", kernel=partial(_or_identity, highest))
rule("prod", "...[dim] -> ...", lost="product", passes="product")
rule("any.default any.dim", "...[dim] -> ...", lost="max")
rule("all.default all.dim", "...[dim] -> ...", lost="min")


def _over_no_dims(call: Call) -> Proposal | None:
    """`any` and `all` alone take an empty list of dims to mean none, not all."""
    if call["dim"] is None or len(call["dim"]):
        return None
    layout = call.tensors[0].reduced()
    return Proposal((layout,), (layout.replace(dtype=call.results[0].dtype, stride=call.results[0].stride),))


rule("any.dims", "...[dim] -> ...", lost="max", function=_over_no_dims)
rule("all.dims", "...[dim] -> ...", lost="min", function=_over_no_dims)


# ── the index of an extreme ───────────────────────────────────────────────────────────────────────────────────────────

#: The index that a shard without elements gives.
NOWHERE = torch.iinfo(torch.int64).max


def _extreme(kind: str, tools: Toolbox, op: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """The extreme along a sharded dim and its first index: of what the shards give, one all-reduce takes the best value and
    another the first index that has it. nan is the best of all, as on one device."""
    x = reduced(tools, x)
    layout, dims = tools.layout(x), dims_of(dim, x.ndim)
    value, index = tools.each(_local_extreme, layout.mesh, x, _indices(tools, layout, dims, x.device), kind, dims, keepdim)
    best = reduced(tools, tools.wrap(value, partials(layout, dims, keepdim, kind, layout.dtype)))
    first = tools.each(_where_best, layout.mesh, value, index, best)
    return best, reduced(tools, tools.wrap(first, partials(layout, dims, keepdim, "min", torch.int64)))


def _indices(tools: Toolbox, layout: Layout, dims: list[int], device: torch.device) -> list[Tensor]:
    """For each dim, what each local position along it adds to a global index into these dims flattened."""
    tables, step = [], 1
    for d in reversed(dims):
        line = Layout.of(layout.mesh, [layout.dims[d]], dtype=torch.int64)
        every = torch.arange(layout.shape[d], device=device) * step
        tables.append(tools.local(tools.distribute(every, line)))
        step *= layout.shape[d]
    return tables[::-1]


def _local_extreme(x: Tensor, tables: list[Tensor], kind: str, dims: list[int], keepdim: bool) -> tuple[Tensor, Tensor]:
    shape = _shape(x, dims, keepdim)
    if not all(x.shape[d] for d in dims):
        identity = (lowest if kind == "max" else highest)(x.dtype)
        return x.new_full(shape, identity), torch.full(shape, NOWHERE, device=x.device)
    flat = len(dims) != 1
    value, position = getattr(torch, kind)(x.flatten() if flat else x, 0 if flat else dims[0])
    index = torch.zeros_like(position)
    for table in reversed(tables):
        index = index + table.take(position % table.shape[0])
        position = position // table.shape[0]
    return value.reshape(shape), index.reshape(shape)


def _where_best(value: Tensor, index: Tensor, best: Tensor) -> Tensor:
    same = (value == best) | ((value != value) & (best != best))
    return torch.where(same, index, NOWHERE)


def _only(result: int, program: Kernel) -> Kernel:
    """A program that gives one of two results."""
    return lambda *args, **kwargs: program(*args, **kwargs)[result]


rule("max.dim", "...[dim] -> ...", whole="[]", program=partial(_extreme, "max"))
rule("min.dim", "...[dim] -> ...", whole="[]", program=partial(_extreme, "min"))
rule("argmax", "...[dim] -> ...", whole="[]", program=_only(1, partial(_extreme, "max")))
rule("argmin", "...[dim] -> ...", whole="[]", program=_only(1, partial(_extreme, "min")))


def _aminmax(tools: Toolbox, op: Any, x: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    x, dims = reduced(tools, x), dims_of(dim, x.ndim)
    return aten.amin(x, dims, keepdim), aten.amax(x, dims, keepdim)


rule("aminmax", program=_aminmax)


# ── sums of something else ────────────────────────────────────────────────────────────────────────────────────────────


def cast(x: Any, dtype: torch.dtype) -> Any:
    """A DTensor in a dtype."""
    return x if x.dtype is dtype else aten._to_copy(x, dtype=dtype)


def widened(x: Any) -> Any:
    """A DTensor in the precision that one device accumulates in."""
    return cast(x, WIDER.get(x.dtype, x.dtype))


def _logsumexp(tools: Toolbox, op: Any, x: Any, dim: Dims, keepdim: bool = False) -> Any:
    if x.is_complex():  # there is no largest to take out first
        layout = tools.layout(x)
        return op(tools.move(x, layout.without(a for d in dims_of(dim, x.ndim) for a in layout.axes_of(d))), dim, keepdim)
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    x, dims = reduced(tools, widened(cast(x, dtype))), dims_of(dim, x.ndim)
    top = reduced(tools, aten.amax(x, dims, True))
    top = top.masked_fill(top.isinf(), 0.0)
    total = torch.log(aten.sum.dim_IntList(torch.exp(x - top), dims, keepdim))
    return cast(total + (top if keepdim else aten.squeeze.dims(top, dims)), dtype)


_OUTWEIGHED = "shard: a max does only where one element outweighs the others"
rule("logsumexp", "...[dim] -> ...", whole="[]", program=_logsumexp, unoffered=_OUTWEIGHED)


def moments(tools: Toolbox, x: Any, dims: list[int]) -> tuple[Any, Any]:
    """The mean over some dims, kept with size 1, and the sum of the squared distances from it, partial. The second pass over
    the data keeps digits that a difference of two sums would lose."""
    mean = reduced(tools, aten.mean.dim(x, dims, True))
    distance = x - mean
    square = distance.abs().square() if x.is_complex() else distance.square()
    return mean, aten.sum.dim_IntList(square, dims, True)


def _var(
    tools: Toolbox, op: Any, x: Any, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    real, dims = x.dtype.to_real(), dims_of(dim, x.ndim)
    mean, square = moments(tools, reduced(tools, widened(x)), dims)
    freedom = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    var = square / max(freedom, 0)
    if not keepdim:
        var, mean = aten.squeeze.dims(var, dims), aten.squeeze.dims(mean, dims)
    return cast(var, real), cast(mean, x.dtype)


def _quiet_on_empty(call: Call, wants: Sequence[Layout]) -> Kernel | None:
    """One device warns of a variance of too few elements; it should not where a rank holds no results at all."""
    if all(min(factor.sizes) for dim in wants[0].dims for factor in dim):
        return None
    dims, keepdim = dims_of(call["dim"], wants[0].ndim), call["keepdim"]

    def var(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel():
            return call.op(x, *args, **kwargs)
        empty = tuple(x.new_full(_shape(x, dims, keepdim), math.nan, dtype=result.dtype) for result in call.results)
        return empty if len(empty) > 1 else empty[0]

    return var


def _std(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    var, mean = _var(*args, **kwargs)
    return torch.sqrt(var), mean


_of_distances = partial(rule, text="...[dim] -> ...", whole="[]", kernel=_quiet_on_empty)
_of_distances("var.correction", program=_only(0, _var))
_of_distances("std.correction", program=_only(0, _std))
_of_distances("var_mean.correction", program=_var)
_of_distances("std_mean.correction", program=_std)


def _vector_norm(tools: Toolbox, op: Any, x: Any, ord: float = 2, dim: Dims = None, keepdim: bool = False, **words: Any) -> Any:
    dtype = words.get("dtype")
    goal, dims = (dtype or x.dtype).to_real(), dims_of(dim, x.ndim)
    x = reduced(tools, x if dtype is None else cast(x, dtype))
    if ord in (math.inf, -math.inf):
        return cast((aten.amax if ord > 0 else aten.amin)(torch.abs(x), dims, keepdim), goal)
    if ord == 0:
        return cast(aten.sum.dim_IntList(x != 0, dims, keepdim), goal)
    layout, wide = tools.layout(x), WIDER.get(goal, goal)
    power = tools.each(_power_sum, layout.mesh, x, ord, dims, keepdim, wide)
    total = tools.wrap(power, partials(layout, dims, keepdim, "sum", wide))
    return cast(torch.sqrt(total) if ord == 2 else torch.pow(total, 1 / ord), goal)


def _power_sum(x: Tensor, ord: float, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    if ord < 0:  # of no elements this would be the inverse of 0
        return torch.abs(x).to(dtype).pow(ord).sum(dims, keepdim=keepdim)
    wide = dtype.to_complex() if x.is_complex() else dtype
    return torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=wide).pow(ord)


_BY_POWERS = "shard: its program reduces the powers, and every order has its own"
rule("linalg_vector_norm", "...[dim] -> ...", whole="[]", program=_vector_norm, unoffered=_BY_POWERS)


rule("norm", program=lambda _, op, x, p=2, *rest, **words: aten.linalg_vector_norm(x, 2 if p is None else p, *rest, **words))
rule("dist", program=lambda tools, op, x, other, p=2: aten.linalg_vector_norm(x - other, p))


# ── one Python number or truth value ──────────────────────────────────────────────────────────────────────────────────

rule("_local_scalar_dense", program=lambda tools, op, x: tools.plain(x, "item").item())
rule("equal", program=lambda tools, op, x, other: x.shape == other.shape and bool((x == other).all()))
rule("allclose", program=lambda tools, op, *args, **words: bool(aten.isclose(*args, **words).all()))
