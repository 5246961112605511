"""Interpolation, padding, sampling and columns: batch and channels may be sharded, planes are whole; but padding with a
constant is done by the ranks at the ends, wherever a tensor is sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layouts.layout import Factor, Layout, PerRank, whole
from ..propagation.notation import Call, Kernel, Proposal, Rule, parse
from ..propagation.table import rule
from .convolution import linear_sentence
from .pooling import Patterns, by_shape, planes, some, spatial
from .views import Misfit, local_sizes, reshape

aten = torch.ops.aten

# ── interpolation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _own_size(patterns: Patterns, call: Call, wants: Sequence[Layout]) -> Kernel | None:
    """The operator with the batch and the channels of the rank in `input_size`."""
    op = call.op

    def run(grad: Tensor, output_size: list[int], input_size: list[int], *rest: Any) -> Any:
        return op(grad, output_size, [*grad.shape[:2], *input_size[2:]], *rest)

    return (some(patterns, replace(call, op=run), wants) or run) if wants[0].states else None


_PLANES = "n c ... -> n c ..."
_interpolation = partial(spatial, text=_PLANES, whole="...", linear=((0,),), rounds=True)
_gradient = partial(rule, text=_PLANES, whole="...", linear=((0,),), kernel=partial(_own_size, parse(_PLANES)))
_NEAREST = "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
_NEAREST += "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
_LINEAR = "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
_LINEAR += "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
# (torch's own account of their shapes refuses a batch without elements.)
_interpolation(_NEAREST, passes="all", gives=lambda a: [((*a["self"].shape[:2], *a["output_size"]), a["self"].dtype)])
_interpolation(_LINEAR)
_gradient(" ".join(f"{name}_backward" for name in (_NEAREST + " " + _LINEAR).split()))

# ── padding ───────────────────────────────────────────────────────────────────────────────────────────────────────────

planes("reflection_pad#d replication_pad#d", "x -> y", "123", linear=((0,),), passes="all")
planes("reflection_pad#d_backward replication_pad#d_backward", "y, x -> x", "123", linear=((0,),), function=by_shape)

#: Kinds of Partial that leave a constant as it is on every rank, whatever it is; and for others, which constants they leave.
_KEEPS = {"sum": (0,), "product": (0, 1)}


def _constant_pad(call: Call) -> Proposal:
    """The first shard grows at the beginning and the last at the end; what is taken off is taken off those who have it."""
    layout, pad, value = call["self"], call["pad"], call["value"]
    layout = layout.replace(partials=[(axis, kind) for axis, kind in layout.partials if value in _KEEPS.get(kind, (value,))])
    ends = {layout.ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    ends = {dim: both for dim, both in ends.items() if any(both)}
    layout = layout.without(axis for dim in ends if len(layout.dims[dim]) > 1 for axis in layout.axes_of(dim))
    dims, own = list(layout.dims), {}
    for dim, (low, high) in ends.items():
        grown, own[dim] = _grown(layout.dims[dim][0], low, high)
        dims[dim] = (grown,)
    out = call.result(0, dims, layout.partials)
    if not any(layout.axes_of(dim) for dim in ends):
        return Proposal((layout,), (out,))

    def local_pad(place: int) -> list[int]:
        here = {dim: own[dim][layout.shard(layout.dims[dim][0], place)] for dim in own}
        return [n for dim in range(layout.ndim - 1, layout.ndim - 1 - len(pad) // 2, -1) for n in here.get(dim, (0, 0))]

    return Proposal((layout,), (out,), {"pad": PerRank(local_pad)})


def _grown(factor: Factor, low: int, high: int) -> tuple[Factor, list[tuple[int, int]]]:
    """A factor with `low` and `high` more elements at its ends, and what this is for each shard."""
    size = factor.size + low + high
    stops = [*(min(max(stop + low, 0), size) for stop in factor.starts[1:-1]), size]
    starts = [0, *stops[:-1]]
    firsts = [first + low for first in factor.starts]
    own = []
    for i, held in enumerate(factor.sizes):
        before, after = firsts[i] - starts[i], stops[i] - firsts[i] - held
        gone = min(before, after) <= -held
        own.append((-held, stops[i] - starts[i]) if gone else (before, after))
    return Factor(size, factor.axes, tuple(b - a for a, b in zip(starts, stops, strict=True))), own


rule("constant_pad_nd", function=_constant_pad, static="value")

# ── columns: the windows of a plane as rows of a dim of their own ─────────────────────────────────────────────────────


def _im2col(call: Call) -> Proposal:
    """Columns hold values of the plane, or zeros, so anything partial could pass; where windows overlap they hold many of them
    several times, and it is reduced before."""
    layout, (rows, count) = call["self"], call.results[0].shape[-2:]
    layout = layout.without(axis for dim in (-2, -1) for axis in layout.axes_of(dim))
    layout = layout.reduced() if rows * count > math.prod(layout.shape[-3:]) else layout
    dims = [*layout.dims[:-3], [*layout.dims[-3], whole(rows // layout.shape[-3])], [whole(count)]]
    return _unless_empty(call, layout, call.result(0, dims, layout.partials))


def _col2im(call: Call) -> Proposal:
    layout, result = call["self"], call.results[0].shape
    layout = layout.without([*layout.axes_of(-1), *(axis for axis, kind in layout.partials if kind not in ("sum", "avg"))])
    window = layout.shape[-2] // result[-3]
    while True:
        try:
            split = reshape(layout, [*layout.shape[:-2], result[-3], window, layout.shape[-1]])
            across = [axis for factor in split[-2] for axis in factor.axes]
        except Misfit as misfit:
            across = list(misfit.axes)
        if not across:
            dims = [*split[:-2], [whole(result[-2])], [whole(result[-1])]]
            return _unless_empty(call, layout, call.result(0, dims, layout.partials))
        layout = layout.without(across)


def _unless_empty(call: Call, want: Layout, out: Layout) -> Proposal:
    """The operator, which refuses tensors without channels."""
    op = call.op

    def run(x: Tensor, *args: Any) -> Tensor:
        return op(x, *args[:-1]) if x.numel() else x.new_empty(args[-1])

    return Proposal((want,), (out,), kernel=run, extra=(local_sizes(out),))


rule("im2col", function=_im2col)
rule("col2im", function=_col2im)

# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _grid_backward(inputs: str, call: Call) -> Rule:
    """The gradient of the grid is always given, that of the input where it is asked for."""
    given = inputs.split(", ")[1 if call["output_mask"][0] else 2 :]
    return linear_sentence(f"{inputs} -> {', '.join(given)}", ((0,),))


spatial("grid_sampler_2d", "n c H W, n p q Z -> n c p q", whole="H W Z", linear=((0,),))
spatial("grid_sampler_3d", "n c D H W, n o p q Z -> n c o p q", whole="D H W Z", linear=((0,),))
_ONE = "sum: in one of the results only"
rule("grid_sampler_2d_backward", function=partial(_grid_backward, "n c p q, n c H W, n p q Z"), unoffered=_ONE)
rule("grid_sampler_3d_backward", function=partial(_grid_backward, "n c o p q, n c D H W, n o p q Z"), unoffered=_ONE)
#: torch cannot tell the shapes of these without data; on a device they stand for bilinear sampling between aligned corners.
rule("cudnn_grid_sampler", program=lambda tools, op, x, grid: aten.grid_sampler_2d(x, grid, 0, 0, True))
rule(
    "cudnn_grid_sampler_backward",
    program=lambda tools, op, x, grid, grad: aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, True, [True, True]),
)
