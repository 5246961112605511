"""Linear algebra: matrices are whole, their batch may be sharded; distances between the rows of two matrices; and Fourier
transforms, of which the dims that are transformed are whole.

A number of columns that a solver treats one by one may be sharded as well. Letters: `m n` for the dims of a matrix, `p` for the
length of its pivots or scales, `r k` for those of a right side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import knows_conjugates
from ..layouts.layout import Layout, contiguous_stride
from ..propagation.notation import Call, Kernel, KernelMaker, Proposal, Rule, parse
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten

# ── one matrix ────────────────────────────────────────────────────────────────────────────────────────────────────────

MATRICES = "m n p r"


def _raised_alike(call: Call) -> Proposal | None:
    """Where the operator itself refuses a matrix, every rank has to see all matrices to refuse it too."""
    return Proposal((), (), program=_on_all) if call.arguments.get("check_errors") and call.tensors[0].states else None


def _as_shown(call: Call, wants: Sequence[Layout]) -> Kernel:
    """The operator on a matrix that lies by rows just where the DTensor's does: gradients ask that what was factored, the
    matrix or, if it lies by rows, its transpose."""
    shape, op = wants[0].shape, call.op
    by_rows = all(n == 1 or a == b for n, a, b in zip(shape, wants[0].stride, contiguous_stride(shape), strict=True))

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x.contiguous() if by_rows else x.mT.contiguous().mT, *args, **kwargs)

    return run


def _with_conjugates(call: Call, wants: Sequence[Layout]) -> Kernel:
    """The operator, which takes conjugates on its way."""
    op = call.op

    def run(*args: Any, **kwargs: Any) -> Any:
        with knows_conjugates():
            return op(*args, **kwargs).resolve_conj()

    return run


def _on_all(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    mesh = tools.mesh(*args)
    return op(*(tools.replicated(x, mesh, tools.operator) if isinstance(x, Tensor) else x for x in args), **kwargs)


_of_matrix = partial(rule, whole=f"{MATRICES} k", lost=None, function=_raised_alike)
_of_matrix("cholesky cholesky_inverse linalg_matrix_exp", "... m n -> ... m n")
_of_matrix("linalg_cholesky_ex linalg_inv_ex", "... m n -> ... m n, ...")
_of_matrix("linalg_lu_factor_ex linalg_ldl_factor_ex", "... m n -> ... m n, ... p, ...")
_of_matrix("linalg_lu linalg_qr", "... m n -> ... m r, ... r k, ... k n")
_of_matrix("_linalg_svd", "... m n -> ... m r, ... p, ... r n")
_of_matrix("_linalg_eigh", "... m n -> ... p, ... m n")
_of_matrix("linalg_eig", "... m n -> ... p, ... m n")
_of_matrix("linalg_eigvals", "... m n -> ... p")
_of_matrix("_linalg_det", "... m n -> ..., ... m n, ... p", kernel=_as_shown)
_of_matrix("_linalg_slogdet", "... m n -> ..., ..., ... m n, ... p", kernel=_as_shown)
_of_matrix("linalg_pinv.atol_rtol_tensor", "... m n, ..., ... -> ... n m", kernel=_with_conjugates)
_of_matrix("lu_unpack", "... m n, ... p -> ... m r, ... r k, ... k n")
_of_matrix("linalg_householder_product", "... m n, ... p -> ... m n")
_of_matrix("ormqr", "... m n, ... p, ... r k -> ... r k")
_of_matrix("triangular_solve", "... r k, ... m n -> ... r k, ... m n")


# Every rank looks at the codes of all matrices, so that all raise alike.
rule("_linalg_check_errors", program=lambda tools, op, x, *name, **kind: op(tools.plain(x, tools.operator), *name, **kind))

# ── right sides, which a solver takes column by column ────────────────────────────────────────────────────────────────


def _sides(text: str, linear: int, call: Call, kernel: KernelMaker | None = None) -> Rule | Proposal | None:
    """A right side on the left side is solved row by row."""
    if raised := _raised_alike(call):
        return raised
    free = "k" if call.arguments.get("left", True) else "r"
    return Rule(*parse(text), lost=None, linear=((linear,),), whole=frozenset({*MATRICES.split(), "k"} - {free}), kernel=kernel)


def _solve(call: Call) -> Rule | Proposal | None:
    matrix, right = call.tensors
    is_vector = right.ndim == 1 or (right.ndim == matrix.ndim - 1 and right.shape == matrix.shape[:-1])
    side = "r" if is_vector else "r k"
    return _sides(f"... m n, ... {side} -> ... {side}, ... m n, ... p, ...", 1, call, _as_shown)


rule("_linalg_solve_ex", function=_solve)
rule("linalg_solve_triangular", function=partial(_sides, "... m n, ... r k -> ... r k", 1))
rule("linalg_lu_solve linalg_ldl_solve", function=partial(_sides, "... m n, ... p, ... r k -> ... r k", 2))
rule("cholesky_solve", function=partial(_sides, "... r k, ... m n -> ... r k", 0))

# ── distances ─────────────────────────────────────────────────────────────────────────────────────────────────────────

rule("_cdist_forward _euclidean_dist", "... i n, ... j n -> ... i j", whole="n", lost=None, unoffered="shard: of one norm only")
_ALIKE = "shard: the distances are sharded like their gradient"
rule("_cdist_backward", "... i j, ... i n, ... j n, ... i j -> ... i n", linear=((0,),), unoffered=_ALIKE)

# ── Fourier transforms ────────────────────────────────────────────────────────────────────────────────────────────────
#
# A transform of several dims is one of some of them and then of the rest, so that only some have to be whole at a time.


def _stepwise(call: Call) -> Proposal | None:
    """In two steps where some, but not all, of the dims are sharded; the last dim is the one that is real on one side."""
    layout, dims = call.tensors[0], call.dims("dim")
    apart = any(layout.axes_of(d) for d in dims) and len(dims) > 1 and call["dim"]
    return Proposal((), (), program=_STEPS[call.name]) if apart else None


def _c2c(tools: Toolbox, op: Any, x: Any, dims: list[int], norm: int, forward: bool) -> Any:
    """First the dims that are not sharded, then those that are; one and then the rest where all are."""
    layout = tools.layout(x)
    here = [d for d in dims if not layout.axes_of(d % x.ndim)] or dims[:1]
    rest = [d for d in dims if d not in here]
    x = op(x, here, norm, forward)
    return op(x, rest, norm, forward) if rest else x


_STEPS: dict[str, Kernel] = {
    "aten._fft_c2c": _c2c,
    "aten._fft_r2c": lambda _, op, x, dims, norm, half: aten._fft_c2c(op(x, dims[-1:], norm, half), dims[:-1], norm, True),
    "aten._fft_c2r": lambda _, op, x, dims, norm, size: op(aten._fft_c2c(x, dims[:-1], norm, False), dims[-1:], norm, size),
}


def _of_something(call: Call, wants: Sequence[Layout]) -> Kernel | None:
    """The operator, which refuses to transform nothing, or nothing."""
    if all(min(factor.sizes) for dim in wants[0].dims for factor in dim):
        return None
    op, one, dims = call.op, call.results[0], call.dims("dim")

    def transform(x: Tensor, *args: Any) -> Tensor:
        shape = [one.shape[d] if d in dims else n for d, n in enumerate(x.shape)]
        return op(x, *args) if x.numel() else x.new_empty(shape, dtype=one.dtype)

    return transform


_transform = partial(rule, whole="[]", linear=((0,),), function=_stepwise, kernel=_of_something)
_transform("_fft_c2c _fft_r2c _fft_c2r", "...[dim] -> ...[dim]")
rule("_conj_physical", "... -> ...", linear=((0,),), passes="product")
