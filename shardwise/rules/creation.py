"""Tensors made from a shape: `*_like` and `new_*`, whose results do not depend on values; and the tangents of forward-mode
automatic differentiation, the derivatives that travel beside their primals."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .._torch.compiler import is_traced_whole
from ..base.schema import schema_of
from ..errors import OperatorError
from ..layouts.layout import PerRank, dense_stride, whole
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox


def _like(call: Call) -> Proposal:
    """Sharded as the argument is; nothing is partial, since every rank fills in the value itself."""
    return Proposal(call.tensors, (call.result(0, call.tensors[0].dims),))


rule("empty_like zeros_like ones_like full_like", function=_like)


def _new(call: Call) -> Proposal:
    """Replicated; sharded as the argument is where the shape is the same (autograd asks for the memory of gradients so)."""
    layout, one = call.tensors[0], call.results[0]
    if layout.states and one.shape == tuple(layout.shape):
        return Proposal((layout,), (call.result(0, layout.dims),), kernel=partial(_new_local, call.op, one.stride))
    return Proposal((layout,), (call.result(0, [(whole(n),) for n in one.shape]),))


def _new_local(op: Any, stride: tuple[int, ...], x: Tensor, size: Any, *rest: Any, **kwargs: Any) -> Tensor:
    if "stride" not in schema_of(op).names:
        return op(x, x.shape, *rest, **kwargs)
    return op(x, x.shape, dense_stride(x.shape, stride), **kwargs)


rule("new_empty new_zeros new_ones new_full new_empty_strided", function=_new)

# ── tangents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fits(tools: Toolbox, op: Any, tangent: Any, primal: Any) -> bool:
    """Whether a tangent may stay as it is: it spans as much memory as its primal. A plain one is spread as its primal is."""
    if is_traced_whole(tangent) or is_traced_whole(primal):
        raise OperatorError(
            f"{tangent!r} is an input of make_fx (which torch.func.linearize uses), and that sees a DTensor's shards as "
            "constants; take torch.func.jvp for each tangent, or trace with shardwise.capture"
        )
    both = (tangent, primal)
    spans = {1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0 for x in both}
    return all(map(tools.is_distributed, both)) and len(spans) == 1


rule("_has_same_storage_numel", program=_fits)


def _zero_tangent(call: Call) -> Proposal:
    """Where the tangent lies, partial or not, if it is not whole; else where the primal does."""
    (tangent, primal), one = call.tensors, call.results[0]
    batch = [(whole(n),) for n in one.shape[: call["self_num_batch_dims"]]]
    dims, partials = (tangent.dims, tangent.partials) if tangent.states else ((*batch, *primal.dims), ())
    out = call.result(0, dims, partials)

    def zeros(x: Tensor, _: Tensor, shape: tuple[int, ...], **kwargs: Any) -> Tensor:
        return x.new_empty_strided(shape, dense_stride(shape, one.stride)).zero_()

    return Proposal(call.tensors, (out,), kernel=zeros, extra=(PerRank(out.local_shape),))


rule("_new_zeros_with_same_feature_meta", function=_zero_tangent)
