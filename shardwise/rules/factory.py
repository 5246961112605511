"""Operators whose result does not depend on values: `*_like` and `new_*`, and the ways from a tensor to a Python number."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..layout import Layout, contiguous_stride, make_layout
from ..placement import Replicate
from .notation import Call, Proposal
from .table import rule


def _like(call: Call) -> Proposal:
    """Cut as the argument is; nothing is pending, since every rank fills in the value itself."""
    layout, one = call.tensors[0], call.results[0]
    return Proposal((layout,), (Layout.of(layout.mesh, layout.dims, (), one.dtype, one.stride),))


rule("empty_like zeros_like ones_like full_like", function=_like)


def _new(call: Call) -> Proposal:
    """Replicated; cut as the argument is where the shape is the same (autograd asks for the memory of gradients so)."""
    layout, one = call.tensors[0], call.results[0]
    if layout.states and one.shape == tuple(layout.shape):
        out = Layout.of(layout.mesh, layout.dims, (), one.dtype, one.stride)
        return Proposal((layout,), (out,), kernel=partial(_new_local, call.op, one.stride))
    placements = [Replicate()] * layout.mesh.ndim
    return Proposal((layout,), (make_layout(one.shape, layout.mesh, placements, one.dtype, one.stride),))


def _new_local(op: Any, stride: tuple[int, ...], x: Tensor, size: Any, *rest: Any, **kwargs: Any) -> Tensor:
    if "stride" not in (argument.name for argument in op._schema.arguments):
        return op(x, x.shape, *rest, **kwargs)
    order = sorted(range(x.ndim), key=lambda dim: (-stride[dim], dim))
    return op(x, [x.shape[dim] for dim in order], contiguous_stride([x.shape[dim] for dim in order]), **kwargs).permute(
        [order.index(dim) for dim in range(x.ndim)]
    )


rule("new_empty new_zeros new_ones new_full new_empty_strided", function=_new)


def _number(tools: Any, op: Any, x: Any) -> Any:
    return tools.plain(x, "item").item()


rule("_local_scalar_dense", program=_number)
