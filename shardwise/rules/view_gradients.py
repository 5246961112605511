"""Gradients of slices, diagonals and windows, and writing to a slice: each rank keeps what it has, in a shard that holds it."""

from __future__ import annotations

from typing import Any

import torch

from .._torch.tensors import decompositions
from ..layouts.layout import Factor, Layout, sharded, whole
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import by_shard, indices
from .views import local_sizes

aten = torch.ops.aten


def _select_backward(call: Call) -> Proposal:
    """A dim comes back, whole; all else is as it was."""
    grad, (dim,) = call.tensors[0], call.dims("dim", len(call["input_sizes"]))
    out = call.result(0, [*grad.dims[:dim], (whole(call.results[0].shape[dim]),), *grad.dims[dim:]], grad.partials)
    return Proposal((grad,), (out,), {"input_sizes": local_sizes(out)})


def _slice_backward(call: Call) -> Proposal:
    """Each rank keeps what it has of the slice, in a shard of the whole that holds it."""
    grad, (dim,), step = call.tensors[0], call.dims("dim"), int(call["step"])
    size = call.results[0].shape[dim]
    start, *_ = indices(call["start"], call["end"], step, size)
    if len(grad.dims[dim]) > 1:
        grad = grad.without(grad.axes_of(dim))
    factor = grad.dims[dim][0]
    around = _around(factor, size, start, step, grad)
    out = call.result(0, [(around,) if i == dim else own for i, own in enumerate(grad.dims)], grad.partials)
    edits: dict[str, Any] = {"input_sizes": local_sizes(out)}
    if factor.axes:
        firsts = [start + begin * step - base for begin, base in zip(factor.starts, around.starts, strict=True)]
        held = list(zip(firsts, factor.sizes, strict=False))
        edits["start"] = by_shard(grad, factor, [low if n else 0 for low, n in held])
        edits["end"] = by_shard(grad, factor, [low + (n - 1) * step + 1 if n else 0 for low, n in held])
    return Proposal((grad,), (out,), edits)


def _around(factor: Factor, size: int, start: int, step: int, layout: Layout) -> Factor:
    """A sharding of the whole in which each shard of the slice lies in its shard: the default one, else with no gap between."""
    if not factor.axes:
        return whole(size)
    first = [start + begin * step for begin in factor.starts[:-1]]
    last = [start + (begin + n - 1) * step for begin, n in zip(factor.starts, factor.sizes, strict=False)]
    default = sharded(size, factor.axes, layout.mesh)
    held = list(zip(default.starts, default.sizes, first, last, factor.sizes, strict=False))
    if all(n == 0 or (begin <= low and high < begin + length) for begin, length, low, high, n in held):
        return default
    sizes, end = [0] * len(factor.sizes), size
    for i in reversed(range(len(factor.sizes))):
        if factor.sizes[i]:
            begin = first[i] if any(factor.sizes[:i]) else 0
            sizes[i], end = end - begin, begin
    return Factor(size, factor.axes, tuple(sizes))


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
    placed = {rows: (around,), columns: (whole(one.shape[columns]),)}
    dims = [placed[d] if d in placed else next(rest) for d in range(ndim)]
    out = call.result(0, dims, grad.partials)
    edits: dict[str, Any] = {"input_sizes": local_sizes(out)}
    if factor.axes:
        edits["offset"] = by_shard(grad, factor, [offset + start for start in around.starts])
    return Proposal((grad,), (out,), edits)


def _unfold_backward(call: Call) -> Proposal:
    """Windows overlap, so the dim that they were taken of is whole, as are they."""
    grad, one = call.tensors[0], call.results[0]
    (dim,) = call.dims("dim", len(one.shape))
    kept = [(axis, kind) for axis, kind in grad.partials if kind in ("sum", "avg")]
    gone = {axis for d in (dim, grad.ndim - 1) for axis in grad.axes_of(d)}
    grad = grad.replace(partials=kept).without(gone)
    size = [whole(one.shape[dim])] if one.shape else []
    dims = [size if d == dim else own for d, own in enumerate(grad.dims[:-1])]
    out = call.result(0, dims, kept)
    return Proposal((grad,), (out,), {"input_sizes": local_sizes(out)})


def _strided_scatter(call: Call) -> Proposal:
    """Strides are those of the whole tensor."""
    wants = tuple(t.replicated() for t in call.tensors)
    return Proposal(wants, (call.result(0, wants[0].dims),))


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
