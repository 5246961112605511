"""Softmax and normalisation layers: the fused operator needs whole the dims that it normalises over; where these are sharded, a
program of smaller operators takes its place, which reduces statistics only and never gathers the data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import OperatorError
from ..layouts.dtypes import WIDER
from ..layouts.layout import Dim, Factor, Layout, whole
from ..propagation.notation import Call, Kernel, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .reduction import cast, moments, reduced, widened

aten = torch.ops.aten
#: What the forward operators of the norms hand to their backward ones.
STATS = ("mean", "rstd")


# ── softmax ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shifted(tools: Toolbox, x: Any, dim: int) -> tuple[Any, Any]:
    """x less its maximum, which exp cannot take out of range, and the maximum."""
    if not x.is_floating_point():
        raise OperatorError(f"{tools.operator} takes floats, got {x.dtype}; convert it first, or give dtype=")
    x = reduced(tools, widened(x))
    top = reduced(tools, aten.amax(x, [dim], True))
    return x - top, top


def _softmax(tools: Toolbox, op: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    exp = torch.exp(_shifted(tools, x, dim)[0])
    return cast(exp / aten.sum.dim_IntList(exp, [dim], True), torch.float32 if half_to_float else x.dtype)


def _safe_softmax(tools: Toolbox, op: Any, x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    shifted, top = _shifted(tools, x if dtype is None else cast(x, dtype), dim)
    exp = torch.exp(shifted)
    out = exp / aten.sum.dim_IntList(exp, [dim], True)
    return cast(out.masked_fill(top == -math.inf, 0.0), dtype or x.dtype)


def _log_softmax(tools: Toolbox, op: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    shifted = _shifted(tools, x, dim)[0]
    total = torch.log(aten.sum.dim_IntList(torch.exp(shifted), [dim], True))
    return cast(shifted - total, torch.float32 if half_to_float else x.dtype)


def _softmax_backward(tools: Toolbox, op: Any, grad: Any, out: Any, dim: int, dtype: torch.dtype) -> Any:
    out = widened(out)
    part = widened(grad) * out
    return cast(part - out * aten.sum.dim_IntList(part, [dim], True), dtype)


def _log_softmax_backward(tools: Toolbox, op: Any, grad: Any, out: Any, dim: int, dtype: torch.dtype) -> Any:
    grad = widened(grad)
    return cast(grad - torch.exp(widened(out)) * aten.sum.dim_IntList(grad, [dim], True), dtype)


_along = partial(rule, whole="[]")
_along("_softmax", "...[dim] -> ...[dim]", program=_softmax)
_along("_safe_softmax", "...[dim] -> ...[dim]", program=_safe_softmax)
_along("_log_softmax", "...[dim] -> ...[dim]", program=_log_softmax)
_along("_softmax_backward_data", "...[dim], ...[dim] -> ...[dim]", linear=((0,),), program=_softmax_backward)
_along("_log_softmax_backward_data", "...[dim], ...[dim] -> ...[dim]", linear=((0,),), program=_log_softmax_backward)


# ── layer norm and rms norm: over the last dims ───────────────────────────────────────────────────────────────────────


def _is_sharded(layout: Layout, dims: range) -> bool:
    return any(layout.mesh.axis_sizes[axis] > 1 for d in dims for axis in layout.axes_of(d))


def _made_whole(layout: Layout, dims: range) -> Layout:
    return layout.reduced().without(axis for d in dims for axis in layout.axes_of(d))


def _stats_dims(layout: Layout, batch: int) -> list[Dim]:
    return [*layout.dims[:batch], *[(whole(1),)] * (layout.ndim - batch)]


def _stats_dtype(x: Any, weight: Any, device: str) -> torch.dtype:
    """The dtype of mean and rstd, where meta kernels and real ones differ: that of the weight, or single precision."""
    dtype: torch.dtype = x.dtype if weight is None else weight.dtype
    return WIDER.get(dtype, dtype) if device == "cuda" else dtype


def _norm(program: Kernel, call: Call) -> Proposal:
    """Any shard of the other dims serves; weight and bias are whole."""
    layout = call["input"]
    last = range(layout.ndim - len(call["normalized_shape"]), layout.ndim)
    if _is_sharded(layout, last):
        return Proposal(call.tensors, (), program=program)
    layout = _made_whole(layout, last)
    dtype = _stats_dtype(layout, call["weight"], layout.device.type)
    stats = _stats_dims(layout, last.start)
    results = [call.result(i, stats).replace(dtype=dtype) for i in range(1, len(call.results))]
    return Proposal((layout, *(t.replicated() for t in call.tensors[1:])), (call.result(0, layout.dims), *results))


def _norm_backward(call: Call) -> Proposal:
    """Weight and bias get a partial sum over the batch. A partial `grad_out` is reduced here, although the operator is linear
    in it: one partial argument would become three partial results, and three collectives."""
    grad, layout = call["grad_out"], call["input"]
    last = range(layout.ndim - len(call["normalized_shape"]), layout.ndim)
    lacks_kernel = layout.device.type == "cpu" and "rms" in call.name
    if lacks_kernel or _is_sharded(layout, last) or _is_sharded(grad, last):
        return Proposal(call.tensors, (), program=_norm_gradients)
    layout = min(_made_whole(layout, last), _made_whole(grad, last), key=lambda one: one.nbytes)
    placed: list[Any] = [layout.dims] * 2 + [_stats_dims(layout, last.start)] * sum(n in call.arguments for n in STATS)
    wants = list(call.tensors)
    for slot, index in enumerate(call.slots):
        if index is not None:
            dims = placed[slot] if slot < len(placed) else [(whole(n),) for n in wants[index].shape]
            wants[index] = wants[index].replace(dims=dims, partials=())
    return Proposal(tuple(wants), _gradient_layouts(call, layout, lambda shape: [(whole(n),) for n in shape], layout.states))


def _gradient_layouts(call: Call, layout: Layout, scales: Kernel, axes: Iterable[str]) -> tuple[Layout, ...]:
    """Those of the gradients that are asked for: of the input as `layout`, of weight and bias partial over some axes."""
    given, summed = call["output_mask"][0], [(axis, "sum") for axis in axes]
    several = [call.result(i, scales(one.shape), summed) for i, one in enumerate(call.results) if i >= given]
    return (call.result(0, layout.dims), *several) if given else tuple(several)


def _scaled(x: Any, weight: Any, bias: Any = None) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(tools: Toolbox, op: Any, x: Any, shape: list[int], weight: Any, *rest: Any) -> tuple[Any, Any, Any]:
    bias, eps = rest
    wide, dims = reduced(tools, widened(x)), list(range(x.ndim - len(shape), x.ndim))
    mean, square = moments(tools, wide, dims)
    rstd = torch.rsqrt(square / math.prod(shape) + eps)
    out = _scaled((wide - mean) * rstd, weight, bias)
    dtype = _stats_dtype(x, weight, x.device.type)
    return cast(out, x.dtype), cast(mean, dtype), cast(rstd, dtype)


def _rms_norm(tools: Toolbox, op: Any, x: Any, shape: list[int], weight: Any, eps: float | None) -> tuple[Any, Any]:
    wide, dims = reduced(tools, widened(x)), list(range(x.ndim - len(shape), x.ndim))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(aten.mean.dim(wide * wide, dims, True) + eps)
    return cast(_scaled(wide * rstd, weight), x.dtype), rstd


def _norm_gradients(tools: Toolbox, op: Any, grad: Any, x: Any, shape: list[int], *rest: Any) -> tuple[Any, ...]:
    """The gradients of input, weight and (of a layer norm) bias."""
    is_layer_norm = len(rest) == 5
    mean, rstd, weight, bias, mask = rest if is_layer_norm else (None, *rest[:2], None, rest[2])
    unit = (widened(x) if mean is None else widened(x) - mean) * rstd
    grad = reduced(tools, widened(grad))
    batch = grad.ndim - len(shape)
    over, dims, results = list(range(batch)), list(range(batch, grad.ndim)), [None] * len(mask)
    if mask[0]:
        scaled = _scaled(grad, weight)
        around = unit * aten.mean.dim(scaled * unit, dims, True)
        if is_layer_norm:  # the mean was taken off, so it gets nothing back
            around = around + reduced(tools, aten.mean.dim(scaled, dims, True))
        results[0] = cast((scaled - around) * rstd, x.dtype)
    if mask[1]:
        results[1] = cast(_sum(grad * unit, over), weight.dtype)
    if is_layer_norm and mask[2]:
        results[2] = cast(_sum(grad, over), bias.dtype)
    return tuple(results)


def _sum(x: Any, dims: list[int]) -> Any:
    return aten.sum.dim_IntList(x, dims) if dims else x


_SCALES = "sum max min product: scales and offsets are not partial"
rule("native_layer_norm", function=partial(_norm, _layer_norm), unoffered=_SCALES)
rule("_fused_rms_norm", function=partial(_norm, _rms_norm))
rule("native_layer_norm_backward _fused_rms_norm_backward", function=_norm_backward)


# ── group norm: over the channels of a group and what comes after them ────────────────────────────────────────────────


def _grouped(call: Call, layout: Layout) -> tuple[Layout, list[Dim]]:
    """The layout wanted of the input, sharded along the batch and between groups, and the dims of (batch, groups) with it."""
    layout, each = _made_whole(layout, range(2, layout.ndim)), call["C"] // call["group"]
    if len(layout.dims[1]) > 1 or any(size % each or not size for size in layout.dims[1][0].sizes):
        layout = _made_whole(layout, range(1, 2))
    channels = layout.dims[1][0]
    groups = Factor(call["group"], channels.axes, tuple(size // each for size in channels.sizes))
    return layout, [layout.dims[0], (groups,)]


def _group_norm(call: Call) -> Proposal:
    layout, stats = _grouped(call, call["input"])
    scales = tuple(t.replace(dims=[layout.dims[1]], partials=()) for t in call.tensors[1:])
    dtype = layout.dtype if layout.device.type == "cuda" else _stats_dtype(layout, call["weight"], "cpu")
    results = [call.result(i, stats).replace(dtype=dtype) for i in range(1, len(call.results))]
    return Proposal((layout, *scales), (call.result(0, layout.dims), *results), kernel=_on_own_groups(call, 3))


def _group_norm_backward(call: Call) -> Proposal:
    layout, stats = _grouped(call, min(call["input"], call["grad_out"], key=lambda one: one.nbytes))
    placed = [layout.dims, layout.dims, stats, stats, [layout.dims[1]]]
    wants = tuple(t.replace(dims=placed[i], partials=()) for i, t in enumerate(call.tensors))
    results = _gradient_layouts(call, layout, lambda _: [layout.dims[1]], layout.axes_of(0))
    return Proposal(wants, results, kernel=_on_own_groups(call, 5))


def _on_own_groups(call: Call, at: int) -> Kernel:
    """The operator with the sizes, from argument `at` on, of the rank's own shard, which it wants contiguous."""
    each, op = call["C"] // call["group"], call.op

    def run(*args: Any) -> Any:
        tensors = [x.contiguous() if isinstance(x, Tensor) else x for x in args[:at]]
        count, channels = tensors[0].shape[:2]
        return op(*tensors, count, channels, args[at + 2], channels // each, *args[at + 4 :])

    return run


rule("native_group_norm", function=_group_norm, unoffered=_SCALES)
_ONCE = "sum: the gradient is reduced once, not its three results"
rule("native_group_norm_backward", function=_group_norm_backward, unoffered=_ONCE)


# ── batch norm: over all but the channels ─────────────────────────────────────────────────────────────────────────────


def _batch_norm_backward(tools: Toolbox, op: Any, grad: Any, x: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    """The sums over the batch that the input needs are the gradients of weight and bias: they are reduced once."""
    running_mean, running_var, mean, rstd, train, eps, mask = rest
    if not train:
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    over, shape = [d for d in range(x.ndim) if d != 1], [1 if d != 1 else x.shape[1] for d in range(x.ndim)]
    wide, rstd = reduced(tools, widened(grad)), rstd.view(shape)
    unit = (widened(x) - mean.view(shape)) * rstd
    shift, scale = (reduced(tools, aten.sum.dim_IntList(part, over)) for part in (wide, wide * unit))
    dtype, results = mean.dtype if weight is None else weight.dtype, [None] * 3
    if mask[0]:
        count = x.numel() // max(x.shape[1], 1)
        rest_of = (shift.view(shape) + unit * scale.view(shape)) / count if train else 0
        results[0] = cast(_scaled((wide - rest_of) * rstd, None if weight is None else weight.view(shape)), x.dtype)
    results[1] = cast(scale, dtype) if mask[1] else None
    results[2] = cast(shift, dtype) if mask[2] else None
    return tuple(results)


rule("native_batch_norm_backward", program=_batch_norm_backward)
rule("miopen_batch_norm", program=lambda tools, op, *args: aten.native_batch_norm(*args))


def _synchronized(tools: Toolbox, op: Any, x: Any, *rest: Any) -> Any:
    raise OperatorError(
        f"SyncBatchNorm of {tools.layout(x)} would share the statistics of local batches; those of a DTensor are of the global "
        "batch already: use BatchNorm, without convert_sync_batchnorm"
    )


rule("batch_norm_stats", program=_synchronized, unoffered="all: batch norm does it")
