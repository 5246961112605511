"""`grouped_mm`: the products of groups of rows with a matrix each, of every size and memory layout, as an operator that traces.

torch's own operator wants rows, or columns, to begin at multiples of 16 bytes, which those of a shard need not, and its tracer
takes bfloat16 alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.argument_checks import a_dtype, a_tensor, optional, refuse
from ..errors import OperatorError

#: By the dims of the factors: t tokens in the order of their e experts, o the offsets.
GROUPED = {
    (2, 3): "t k, e k n, o -> t n",
    (3, 2): "e m k, k t, o -> m t",
    (2, 2): "m t, t n, o -> o m n",
    (3, 3): "e m k, e k n -> e m n",
}
#: Rows, or columns, begin at multiples of so many bytes.
_ALIGNMENT = 16


def grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`torch.nn.functional.grouped_mm` of all sizes and strides, in every compiled program and package.

    A factor of two dims falls into groups that end at `offs`; the other has a matrix for each. There may be groups without
    rows, and no groups at all.

    >>> x, w = torch.arange(6.0).view(3, 2), torch.stack([torch.eye(2), 10 * torch.eye(2)])
    >>> grouped_mm(x, w, offs=torch.tensor([1, 3], dtype=torch.int32))
    tensor([[ 0.,  1.],
            [20., 30.],
            [40., 50.]])
    """
    _check(mat_a, mat_b, offs, out_dtype)
    if _is_known(mat_a, mat_b):
        return F.grouped_mm(mat_a, mat_b, offs=offs, out_dtype=out_dtype)
    return torch.ops.shardwise.grouped_mm(mat_a, mat_b, offs, None, out_dtype)


def _check(mat_a: Any, mat_b: Any, offs: Any, out_dtype: Any) -> None:
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b)):
        a_tensor(x, f"grouped_mm: {name}")
        if x.ndim not in (2, 3):
            refuse(f"grouped_mm: {name}", "a tensor of two or three dims", x)
    if mat_a.dtype != mat_b.dtype or optional(a_dtype, out_dtype, "grouped_mm: out_dtype") not in (None, mat_a.dtype):
        kinds = f"{mat_a.dtype}, {mat_b.dtype}, {out_dtype}"
        raise OperatorError(f"grouped_mm: mat_a, mat_b and out_dtype are of one dtype, got {kinds}")
    if (mat_a.ndim, mat_b.ndim) != (2, 2) and mat_a.shape[-1] != mat_b.shape[-2]:
        raise OperatorError(
            f"grouped_mm of mat_a {list(mat_a.shape)} and mat_b {list(mat_b.shape)}: the size that is summed over is not one"
        )
    ends = None if mat_a.ndim == mat_b.ndim == 3 else "a tensor of int32 with the end of each group"
    if (offs is None) != (ends is None) or (ends and (not isinstance(offs, Tensor) or offs.dtype != torch.int32)):
        refuse("grouped_mm: offs", f"{ends} for {mat_a.ndim} and {mat_b.ndim} dims", offs)


def _is_known(x: Tensor, w: Tensor) -> bool:
    """Whether torch's operator takes the factors, and the gradient of what it gives; compilers have a kernel for it."""
    if x.dtype != torch.bfloat16 or not (x.is_contiguous() and w.is_contiguous()):
        return False
    return not x.shape[-1] * x.itemsize % _ALIGNMENT and not w.shape[-1] * w.itemsize % _ALIGNMENT


def product(x: Tensor, w: Tensor, offs: Tensor | None = None, *rest: Any) -> Tensor:
    """The same below autograd, by the operator that compilers know best."""
    if x.dtype == torch.bfloat16:
        return torch.ops.aten._grouped_mm(_aligned(x), _aligned(w), offs, *rest)
    return torch.ops.shardwise.grouped_mm(x, w, offs, *rest)


def shape(x: Any, w: Any, offs: Any) -> tuple[int, ...]:
    """The shape of a product."""
    first = {(3, 3): x.shape[:1], (2, 2): offs.shape if offs is not None else ()}.get((x.ndim, w.ndim), ())
    return (*first, x.shape[-2], w.shape[-1])


def _aligned(x: Tensor) -> Tensor:
    """A tensor in memory that torch's operator takes."""
    for dim, other in ((-2, -1), (-1, -2)):
        if x.stride(dim) == 1 and x.stride(other) >= max(x.shape[dim], 1) and not x.stride(other) * x.itemsize % _ALIGNMENT:
            return x
    return F.pad(x, (0, _ALIGNMENT - x.shape[-1] % _ALIGNMENT))[..., : x.shape[-1]]


# ── the operator ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _now(x: Tensor, w: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.ops.aten._grouped_mm(_aligned(x), _aligned(w), offs, bias, out_dtype).contiguous()


def _fake(x: Tensor, w: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None) -> Tensor:
    _check(x, w, offs, out_dtype)
    return x.new_empty(shape(x, w, offs), dtype=out_dtype or x.dtype)


def _gradients(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, ends = context.saved_tensors
    left = grouped_mm(grad.to(x.dtype), w.transpose(-2, -1), offs=ends) if context.needs_input_grad[0] else None
    right = grouped_mm(x.transpose(-2, -1), grad.to(x.dtype), offs=ends) if context.needs_input_grad[1] else None
    return left, right, None, None, None


torch.library.define(
    "shardwise::grouped_mm",
    "(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
)
torch.library.impl("shardwise::grouped_mm", "CompositeExplicitAutograd", _now)
torch.library.register_fake("shardwise::grouped_mm", _fake)
torch.library.register_autograd(
    "shardwise::grouped_mm", _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3])
)
