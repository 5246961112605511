"""Gather and scatter along a dim, triangles, and the gradients of slices.

Reading along a sharded dim, each rank gives what it holds and zero for the rest: a partial sum. Writing along a sharded dim,
each rank writes to a spare row what falls to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import decompositions
from ..layouts.layout import Factor, Layout, PerRank, sharded
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import ShardPosition, at_least_one, indices, keep, padded

aten = torch.ops.aten

# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dim(call: Call) -> int:
    return int(call["dim"]) % max(call.tensors[0].ndim, 1)


def _is_cut(layout: Layout, dim: int) -> bool:
    return dim < layout.ndim and bool(layout.axes_of(dim))


def _read(call: Call, wants: Sequence[Layout]) -> Any:
    """Read what this rank holds; the rest is zero."""
    dim = _dim(call)
    if not _is_cut(wants[0], dim):
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
    if not _is_cut(wants[0], dim):
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
    first, one = call.tensors[0], call.results[0]
    if first.ndim:
        return None if call["index"].ndim else Proposal((), (), program=_with_one_index)
    result = Layout.of(first.mesh, (), (), one.dtype, one.stride)
    return Proposal(tuple(t.replicated() for t in call.tensors), (result,))


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

# ── gradients of slices ───────────────────────────────────────────────────────────────────────────────────────────────


def _local_shape(layout: Layout) -> list[int] | PerRank:
    return list(layout.local_shape(0)) if layout.even else PerRank(lambda place: list(layout.local_shape(place)))


def _select_backward(call: Call) -> Proposal:
    """A dim comes back, whole; all else is as it was."""
    grad, one, dim = call.tensors[0], call.results[0], int(call["dim"]) % len(call["input_sizes"])
    size = Factor(one.shape[dim], (), (one.shape[dim],))
    dims = [*grad.dims[:dim], (size,), *grad.dims[dim:]]
    out = Layout.of(grad.mesh, dims, grad.partials, one.dtype, one.stride)
    return Proposal((grad,), (out,), {"input_sizes": _local_shape(out)})


def _slice_backward(call: Call) -> Proposal:
    """Each rank keeps what it has of the slice, in a shard of the whole that holds it."""
    grad, one, dim = call.tensors[0], call.results[0], int(call["dim"]) % call.tensors[0].ndim
    size, step = one.shape[dim], int(call["step"])
    start, *_ = indices(call["start"], call["end"], step, size)
    if len(grad.dims[dim]) > 1:
        grad = grad.without(grad.axes_of(dim))
    factor = grad.dims[dim][0]
    around = _around(factor, size, start, step, grad)
    dims = [(around,) if i == dim else own for i, own in enumerate(grad.dims)]
    out = Layout.of(grad.mesh, dims, grad.partials, one.dtype, one.stride)
    edits: dict[str, Any] = {"input_sizes": _local_shape(out)}
    if factor.axes:
        spans = _spans(factor, around, start, step)
        here = PerRank(lambda place: spans[grad.shard(factor, place)])
        edits |= {"start": PerRank(lambda place: here.at(place)[0]), "end": PerRank(lambda place: here.at(place)[1])}
    return Proposal((grad,), (out,), edits)


def _starts(factor: Factor) -> list[int]:
    return [sum(factor.sizes[:i]) for i in range(len(factor.sizes))]


def _around(factor: Factor, size: int, start: int, step: int, layout: Layout) -> Factor:
    """A sharding of the whole in which each shard of the slice lies in its shard: the default one, else with no gap between."""
    if not factor.axes:
        return Factor(size, (), (size,))
    first = [start + begin * step for begin in _starts(factor)]
    last = [start + (begin + n - 1) * step for begin, n in zip(_starts(factor), factor.sizes, strict=True)]
    default = sharded(size, factor.axes, layout.mesh)
    held = list(zip(_starts(default), default.sizes, first, last, factor.sizes, strict=True))
    if all(n == 0 or (begin <= low and high < begin + length) for begin, length, low, high, n in held):
        return default
    sizes, end = [0] * len(factor.sizes), size
    for i in reversed(range(len(factor.sizes))):
        if factor.sizes[i]:
            begin = first[i] if any(factor.sizes[:i]) else 0
            sizes[i], end = end - begin, begin
    return Factor(size, factor.axes, tuple(sizes))


def _spans(factor: Factor, around: Factor, start: int, step: int) -> list[tuple[int, int]]:
    """For each shard, where its part of the slice begins and ends in its part of the whole."""
    spans = []
    for begin, base, n in zip(_starts(factor), _starts(around), factor.sizes, strict=True):
        low = start + begin * step - base
        spans.append((low, low + (n - 1) * step + 1) if n else (0, 0))
    return spans


def _diagonal_backward(call: Call) -> Proposal:
    """The diagonal is a slice of the rows, and each rank keeps its part of it in rows that hold that part."""
    grad, one, offset = call.tensors[0], call.results[0], int(call["offset"])
    ndim = len(one.shape)
    rows, columns = int(call["dim1"]) % ndim, int(call["dim2"]) % ndim
    if len(grad.dims[-1]) > 1:
        grad = grad.without(grad.axes_of(-1))
    factor = grad.dims[-1][0]
    around = _around(factor, one.shape[rows], max(0, -offset), 1, grad)
    rest = iter(grad.dims)
    placed = {rows: (around,), columns: (Factor(one.shape[columns], (), (one.shape[columns],)),)}
    dims = [placed[d] if d in placed else next(rest) for d in range(ndim)]
    out = Layout.of(grad.mesh, dims, grad.partials, one.dtype, one.stride)
    edits: dict[str, Any] = {"input_sizes": _local_shape(out)}
    if factor.axes:
        starts = _starts(around)
        edits["offset"] = PerRank(lambda place: offset + starts[grad.shard(factor, place)])
    return Proposal((grad,), (out,), edits)


def _unfold_backward(call: Call) -> Proposal:
    """Windows overlap, so the dim that they were taken of is whole, as are they."""
    grad, one = call.tensors[0], call.results[0]
    dim = int(call["dim"]) % max(len(one.shape), 1)
    kept = [(axis, kind) for axis, kind in grad.partials if kind in ("sum", "avg")]
    gone = {axis for d in (dim, grad.ndim - 1) for axis in grad.axes_of(d)}
    grad = grad.replace(partials=kept).without(gone)
    size = [Factor(one.shape[dim], (), (one.shape[dim],))] if one.shape else []
    dims = [size if d == dim else own for d, own in enumerate(grad.dims[:-1])]
    out = Layout.of(grad.mesh, dims, kept, one.dtype, one.stride)
    return Proposal((grad,), (out,), {"input_sizes": _local_shape(out)})


def _strided_scatter(call: Call) -> Proposal:
    """Strides are those of the whole tensor."""
    one, wants = call.results[0], tuple(t.replicated() for t in call.tensors)
    return Proposal(wants, (wants[0].replace(stride=one.stride),))


def _in_own_dtype(tools: Toolbox, op: Any, x: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch's decomposition gives, in the dtype of what is written to; it takes sources and indices that do not fit."""
    view = aten.select.int if op is aten.select_scatter.default else aten.slice.Tensor
    part = view(torch.empty(x.shape, device="meta"), *args, **kwargs)
    if part.shape != source.shape:
        raise RuntimeError(f"{tools.operator}: a source of shape {list(source.shape)} for a part of shape {list(part.shape)}")
    return decompositions[op](x, source.to(x.dtype), *args, **kwargs)


rule("select_scatter slice_scatter", program=_in_own_dtype)
rule("as_strided_scatter", function=_strided_scatter)
rule("slice_backward", function=_slice_backward)
rule("diagonal_backward", function=_diagonal_backward)
rule("unfold_backward", function=_unfold_backward)
rule("select_backward", function=_select_backward)

# ── to one truth value ────────────────────────────────────────────────────────────────────────────────────────────────


def _equal(tools: Toolbox, op: Any, self: Any, other: Any) -> bool:
    return self.shape == other.shape and bool((self == other).all())


def _allclose(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(aten.isclose(*args, **kwargs).all())


rule("equal", program=_equal)
rule("allclose", program=_allclose)
