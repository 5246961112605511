"""Operators whose result does not depend on values: `*_like` and `new_*`, and the ways from a tensor to a Python number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .._torch.compiler import is_traced_whole
from ..errors import OperatorError
from ..layouts.from_placements import make_layout
from ..layouts.layout import Layout, PerRank, contiguous_stride, whole
from ..layouts.placement import Replicate
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox


def _like(call: Call) -> Proposal:
    """Shard as the argument is; nothing is partial, since every rank fills in the value itself."""
    layout, one = call.tensors[0], call.results[0]
    return Proposal((layout,), (Layout.of(layout.mesh, layout.dims, (), one.dtype, one.stride),))


rule("empty_like zeros_like ones_like full_like", function=_like)


def _new(call: Call) -> Proposal:
    """Replicated; sharded as the argument is where the shape is the same (autograd asks for the memory of gradients so)."""
    layout, one = call.tensors[0], call.results[0]
    if layout.states and one.shape == tuple(layout.shape):
        out = Layout.of(layout.mesh, layout.dims, (), one.dtype, one.stride)
        return Proposal((layout,), (out,), kernel=partial(_new_local, call.op, one.stride))
    placements = [Replicate()] * layout.mesh.ndim
    return Proposal((layout,), (make_layout(one.shape, layout.mesh, placements, one.dtype, one.stride),))


def _new_local(op: Any, stride: tuple[int, ...], x: Tensor, size: Any, *rest: Any, **kwargs: Any) -> Tensor:
    if "stride" not in (argument.name for argument in op._schema.arguments):
        return op(x, x.shape, *rest, **kwargs)
    return op(x, x.shape, _dense(x.shape, stride), **kwargs)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides of a tensor without gaps whose dims lie in memory in the order of these strides."""
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    steps = contiguous_stride([shape[dim] for dim in order])
    return [steps[order.index(dim)] for dim in range(len(shape))]


rule("new_empty new_zeros new_ones new_full new_empty_strided", function=_new)

# ── tangents of forward-mode AD ───────────────────────────────────────────────────────────────────────────────────────


def _fits(tools: Toolbox, op: Any, tangent: Any, primal: Any) -> bool:
    """Whether a tangent may stay as it is: a plain one is spread as its primal is."""
    if is_traced_whole(tangent) or is_traced_whole(primal):
        raise OperatorError(
            f"{tangent!r} is an input of make_fx (which torch.func.linearize uses), and that sees a DTensor's shards as "
            "constants; take torch.func.jvp for each tangent, or trace with shardwise.capture"
        )
    both = tools.is_distributed(tangent) and tools.is_distributed(primal)
    return both and _extent(tangent) == _extent(primal)


def _extent(x: Tensor) -> int:
    """How many elements of memory a tensor would span on one device."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


rule("_has_same_storage_numel", program=_fits)


def _zero_tangent(call: Call) -> Proposal:
    """Where the tangent lies, partial or not, if it is not whole; else where the primal does."""
    (tangent, primal), one = call.tensors, call.results[0]
    batch = [(whole(n),) for n in one.shape[: call["self_num_batch_dims"]]]
    dims, partials = (tangent.dims, tangent.partials) if tangent.states else ((*batch, *primal.dims), ())
    out = Layout.of(primal.mesh, dims, partials, one.dtype, one.stride)
    return Proposal(call.tensors, (out,), kernel=partial(_zeros, one.stride), extra=(PerRank(out.local_shape),))


def _zeros(stride: tuple[int, ...], x: Tensor, _: Tensor, shape: tuple[int, ...], **kwargs: Any) -> Tensor:
    return x.new_empty_strided(shape, _dense(shape, stride)).zero_()


rule("_new_zeros_with_same_feature_meta", function=_zero_tangent)

# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _number(tools: Toolbox, op: Any, x: Any) -> Any:
    return tools.plain(x, "item").item()


rule("_local_scalar_dense", program=_number)
