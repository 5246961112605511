"""Forward-mode automatic differentiation: what torch asks of a tangent, the derivative that travels beside its primal."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch.compiler import is_traced_whole
from ..errors import OperatorError
from ..layouts.layout import PerRank, dense_stride, whole
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox


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
    out = call.result(0, dims, partials)

    def zeros(x: Tensor, _: Tensor, shape: tuple[int, ...], **kwargs: Any) -> Tensor:
        return x.new_empty_strided(shape, dense_stride(shape, one.stride)).zero_()

    return Proposal(call.tensors, (out,), kernel=zeros, extra=(PerRank(out.local_shape),))


rule("_new_zeros_with_same_feature_meta", function=_zero_tangent)
