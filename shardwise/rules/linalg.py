"""Linear algebra: matrices are whole, their batch may be sharded; and distances between the rows of two matrices.

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
    return op(*(tools.replicated(x, mesh, tools.operator) if isinstance(x, torch.Tensor) else x for x in args), **kwargs)


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


def _check(tools: Toolbox, op: Any, info: Any, name: str, *, is_matrix: bool) -> None:
    """Every rank looks at the codes of all matrices, so that all raise alike."""
    op(tools.plain(info, tools.operator), name, is_matrix=is_matrix)


rule("_linalg_check_errors", program=_check)

# ── right sides, which a solver takes column by column ────────────────────────────────────────────────────────────────


def _sides(text: str, linear: int, call: Call, kernel: KernelMaker | None = None) -> Rule | Proposal | None:
    """A right side on the left side is solved row by row."""
    raised = _raised_alike(call)
    if raised is not None:
        return raised
    free = "k" if call.arguments.get("left", True) else "r"
    inputs, outputs = parse(text)
    whole = frozenset({*MATRICES.split(), "k"} - {free})
    return Rule(inputs, outputs, lost=None, linear=((linear,),), whole=whole, kernel=kernel)


def _solve(call: Call) -> Rule | Proposal | None:
    matrix, right = call.tensors
    if right.ndim == 1 or (right.ndim == matrix.ndim - 1 and right.shape == matrix.shape[:-1]):  # vectors, not matrices
        return _sides("... m n, ... r -> ... r, ... m n, ... p, ...", 1, call, _as_shown)
    return _sides("... m n, ... r k -> ... r k, ... m n, ... p, ...", 1, call, _as_shown)


rule("_linalg_solve_ex", function=_solve)
rule("linalg_solve_triangular", function=partial(_sides, "... m n, ... r k -> ... r k", 1))
rule("linalg_lu_solve linalg_ldl_solve", function=partial(_sides, "... m n, ... p, ... r k -> ... r k", 2))
rule("cholesky_solve", function=partial(_sides, "... r k, ... m n -> ... r k", 0))

# ── distances ─────────────────────────────────────────────────────────────────────────────────────────────────────────

rule("_cdist_forward _euclidean_dist", "... i n, ... j n -> ... i j", whole="n", lost=None, unoffered="shard: of one norm only")
_ALIKE = "shard: the distances are sharded like their gradient"
rule("_cdist_backward", "... i j, ... i n, ... j n, ... i j -> ... i n", linear=((0,),), unoffered=_ALIKE)
