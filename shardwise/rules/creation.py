"""Tensors made from a shape: `*_like` and `new_*`, whose results do not depend on values."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..layouts.layout import dense_stride, whole
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule


def _like(call: Call) -> Proposal:
    """Shard as the argument is; nothing is partial, since every rank fills in the value itself."""
    layout = call.tensors[0]
    return Proposal((layout,), (call.result(0, layout.dims),))


rule("empty_like zeros_like ones_like full_like", function=_like)


def _new(call: Call) -> Proposal:
    """Replicated; sharded as the argument is where the shape is the same (autograd asks for the memory of gradients so)."""
    layout, one = call.tensors[0], call.results[0]
    if layout.states and one.shape == tuple(layout.shape):
        return Proposal((layout,), (call.result(0, layout.dims),), kernel=partial(_new_local, call.op, one.stride))
    return Proposal((layout,), (call.result(0, [(whole(n),) for n in one.shape]),))


def _new_local(op: Any, stride: tuple[int, ...], x: Tensor, size: Any, *rest: Any, **kwargs: Any) -> Tensor:
    if "stride" not in (argument.name for argument in op._schema.arguments):
        return op(x, x.shape, *rest, **kwargs)
    return op(x, x.shape, dense_stride(x.shape, stride), **kwargs)


rule("new_empty new_zeros new_ones new_full new_empty_strided", function=_new)
