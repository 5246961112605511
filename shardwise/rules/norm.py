"""Softmax and the norms: dims that are normalized over are whole in the fused operator; where they are cut, a program of smaller
operators takes its place, which reduces the statistics only and never gathers the data."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layout import Dim, Factor, Layout, whole
from .notation import Call, Kernel, Proposal, Result
from .reduce import WIDER, cast, moments, reduced, widened
from .table import rule

aten = torch.ops.aten


# ── softmax ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shifted(tools: Any, x: Any, dim: int) -> tuple[Any, Any]:
    """x less its maximum, which exp cannot take out of range, and the maximum."""
    x = reduced(tools, widened(x))
    top = reduced(tools, aten.amax(x, [dim], True))
    return x - top, top


def _softmax(tools: Any, op: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    exp = torch.exp(_shifted(tools, x, dim)[0])
    return cast(exp / aten.sum.dim_IntList(exp, [dim], True), torch.float32 if half_to_float else x.dtype)


def _safe_softmax(tools: Any, op: Any, x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    shifted, top = _shifted(tools, x if dtype is None else cast(x, dtype), dim)
    exp = torch.exp(shifted)
    out = exp / aten.sum.dim_IntList(exp, [dim], True)
    return cast(out.masked_fill(top == -math.inf, 0.0), dtype or x.dtype)


def _log_softmax(tools: Any, op: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    shifted = _shifted(tools, x, dim)[0]
    total = torch.log(aten.sum.dim_IntList(torch.exp(shifted), [dim], True))
    return cast(shifted - total, torch.float32 if half_to_float else x.dtype)


def _softmax_backward(tools: Any, op: Any, grad: Any, out: Any, dim: int, dtype: torch.dtype) -> Any:
    out = widened(out)
    part = widened(grad) * out
    return cast(part - out * aten.sum.dim_IntList(part, [dim], True), dtype)


def _log_softmax_backward(tools: Any, op: Any, grad: Any, out: Any, dim: int, dtype: torch.dtype) -> Any:
    grad = widened(grad)
    return cast(grad - torch.exp(widened(out)) * aten.sum.dim_IntList(grad, [dim], True), dtype)


_along = partial(rule, whole="[]")
_along("_softmax", "...[dim] -> ...[dim]", program=_softmax)
_along("_safe_softmax", "...[dim] -> ...[dim]", program=_safe_softmax)
_along("_log_softmax", "...[dim] -> ...[dim]", program=_log_softmax)
_along("_softmax_backward_data", "...[dim], ...[dim] -> ...[dim]", linear=((0,),), program=_softmax_backward)
_along("_log_softmax_backward_data", "...[dim], ...[dim] -> ...[dim]", linear=((0,),), program=_log_softmax_backward)


# ── layer norm and rms norm: over the last dims ───────────────────────────────────────────────────────────────────────


def _cut(layout: Layout, dims: range) -> bool:
    return any(layout.mesh.shape[axis] > 1 for d in dims for axis in layout.axes_of(d))


def _stats_dtype(dtype: torch.dtype, layout: Layout) -> torch.dtype:
    # Meta kernels give what the CPU gives; a GPU keeps the statistics of half precision in single precision.
    return WIDER.get(dtype, dtype) if layout.device.type == "cuda" else dtype


def _stats_dims(layout: Layout, batch: int) -> list[Dim]:
    return [*layout.dims[:batch], *[(whole(1),)] * (layout.ndim - batch)]


def _result(layout: Layout, dims: Any, result: Result, axes: Any = ()) -> Layout:
    return Layout.of(layout.mesh, dims, [(axis, "sum") for axis in axes], result.dtype, result.stride)


def _last_dims(call: Call, layout: Layout) -> range:
    return range(layout.ndim - len(call["normalized_shape"]), layout.ndim)


def _norm(program: Kernel, call: Call) -> Proposal:
    """Any cut of the other dims serves; weight and bias are whole."""
    layout = call["input"].reduced()
    last = _last_dims(call, layout)
    if _cut(layout, last):
        return Proposal(call.tensors, (), program=program)
    layout = layout.without(axis for d in last for axis in layout.axes_of(d))
    out, *stats = call.results
    wants = (layout, *(t.replicated() for t in call.tensors[1:]))
    results = [_result(layout, layout.dims, out)]
    for one in stats:
        stat = _result(layout, _stats_dims(layout, last.start), one)
        results.append(stat.replace(dtype=_stats_dtype(one.dtype, layout)))
    return Proposal(wants, tuple(results))


def _norm_backward(program: Kernel, call: Call) -> Proposal:
    """Weight and bias get a pending sum over the batch. A pending `grad_out` is reduced here, although the operator is linear in
    it: one pending argument would become three pending results, and three collectives."""
    grad, layout = call["grad_out"].reduced(), call["input"].reduced()
    last = _last_dims(call, layout)
    if _cut(layout, last) or _cut(grad, last):
        return Proposal(call.tensors, (), program=program)
    layout = min(layout, grad, key=lambda one: one.nbytes)
    dims = layout.without(axis for d in last for axis in layout.axes_of(d)).dims
    stats = [call.arguments[name] for name in ("mean", "rstd") if name in call.arguments]
    wants = []
    for tensor in call.tensors:
        if tensor.shape == layout.shape and len(wants) < 2:
            wants.append(tensor.replace(dims=dims, partials=()))
        elif tensor in stats and len(wants) < 2 + len(stats):
            wants.append(tensor.replace(dims=_stats_dims(layout, last.start), partials=()))
        else:
            wants.append(tensor.replicated())
    axes = [axis for dim in dims for factor in dim for axis in factor.axes]
    given = call["output_mask"][0]
    results = [_result(layout, dims, call.results[0])] if given else []
    for one in call.results[given:]:
        results.append(_result(layout, [(whole(n),) for n in one.shape], one, axes))
    return Proposal(tuple(wants), tuple(results))
