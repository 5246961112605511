"""Samples for the rules of shardwise/rules/linalg.py: batches of small matrices that solvers like."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

SQUARE = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]]) * torch.tensor([1.0, 2.0, 0.5]).view(3, 1, 1)
TALL = torch.linspace(-1, 2, 24).view(2, 4, 3).sin()
LOWER = SQUARE.tril()
TAU = torch.tensor([[0.5, 1.0, 0.25]] * 2)
LU, PIVOTS, _ = torch.linalg.lu_factor_ex(SQUARE)
LDL, ORDER, _ = torch.linalg.ldl_factor_ex(SQUARE)


def product(f: Any) -> Any:
    """Factors are unique up to signs; their product is not, and tells whether they fit."""

    def run(x: Any) -> Any:
        first, *rest = f(x)
        return first @ rest[-1] if len(rest) == 1 else (first * rest[0].unsqueeze(-2)) @ rest[1]

    return run


def eigen(x: Any) -> Any:
    values, vectors = torch.linalg.eigh(x)
    return values, (vectors * values.unsqueeze(-2)) @ vectors.mT


def quiet(f: Any) -> Any:
    """An old name, which warns of that."""

    def run(*tensors: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f(*tensors)

    return run


def solved(left: bool) -> Any:
    return lambda a, b: torch.linalg.solve_ex(a, b, left=left)


SAMPLES: dict[str, list[Sample]] = {
    "aten.cholesky": [sample(quiet(torch.cholesky), SQUARE)],
    "aten.cholesky_inverse": [sample(torch.cholesky_inverse, LOWER)],
    "aten.linalg_matrix_exp": [sample(torch.linalg.matrix_exp, SQUARE, atol=1e-3, rtol=1e-4)],
    "aten.linalg_cholesky_ex": [sample(torch.linalg.cholesky, SQUARE)],
    "aten.linalg_inv_ex": [
        sample(torch.linalg.inv, SQUARE),
        sample(lambda x: torch.linalg.inv_ex(x, check_errors=True), SQUARE[0]),
    ],
    "aten.linalg_lu_factor_ex": [sample(torch.linalg.lu_factor_ex, SQUARE)],
    "aten.linalg_ldl_factor_ex": [sample(torch.linalg.ldl_factor_ex, SQUARE)],
    "aten.linalg_lu": [sample(torch.linalg.lu, SQUARE)],
    "aten.linalg_qr": [sample(product(torch.linalg.qr), TALL), sample(lambda x: torch.linalg.qr(x, "r")[1].abs(), TALL)],
    "aten._linalg_svd": [
        sample(product(lambda x: torch.linalg.svd(x, full_matrices=False)), TALL),
        sample(torch.linalg.svdvals, TALL),
    ],
    "aten._linalg_eigh": [sample(eigen, SQUARE), sample(torch.linalg.eigvalsh, SQUARE)],
    "aten.linalg_eig": [sample(lambda x: torch.linalg.eig(x)[0], SQUARE)],
    "aten.linalg_eigvals": [sample(aten.linalg_eigvals, SQUARE)],
    "aten._linalg_det": [sample(torch.linalg.det, SQUARE)],
    "aten._linalg_slogdet": [sample(torch.linalg.slogdet, SQUARE)],
    "aten.linalg_pinv.atol_rtol_tensor": [sample(torch.linalg.pinv, TALL), sample(torch.linalg.pinv, TALL * (1 + 0.5j))],
    "aten.lu_unpack": [
        sample(torch.lu_unpack, LU, PIVOTS),
        sample(lambda a, p: torch.lu_unpack(a, p, unpack_pivots=False)[1:], LU, PIVOTS),
    ],
    "aten.linalg_householder_product": [sample(torch.linalg.householder_product, TALL, TAU)],
    "aten.ormqr": [sample(torch.ormqr, TALL, TAU, (2, 4, 3))],
    "aten.triangular_solve": [sample(quiet(torch.triangular_solve), (3, 3, 5), LOWER.mT.contiguous())],
    "aten._linalg_check_errors": [
        sample(lambda x: aten._linalg_check_errors(x, "linalg.inv", is_matrix=False), torch.zeros(5, dtype=torch.int32))
    ],
    "aten._linalg_solve_ex": [
        sample(solved(True), SQUARE, (3, 3, 5)),
        sample(solved(False), SQUARE, (5, 3)),
        sample(solved(True), SQUARE, (3, 3)),
        sample(solved(True), SQUARE[0], (3,)),
    ],
    "aten.linalg_solve_triangular": [
        sample(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), LOWER, (3, 5)),
        sample(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, left=False), LOWER[0], (2, 5, 3)),
    ],
    "aten.linalg_lu_solve": [sample(torch.linalg.lu_solve, LU, PIVOTS, (3, 3, 5))],
    "aten.linalg_ldl_solve": [sample(torch.linalg.ldl_solve, LDL, ORDER, (3, 3, 5))],
    "aten.cholesky_solve": [sample(torch.cholesky_solve, (3, 3, 5), LOWER)],
    "aten._cdist_forward": [
        sample(torch.cdist, (5, 3), (4, 3), atol=1e-4),
        sample(lambda x, y: torch.cdist(x, y, 1.0), (2, 5, 3), (3, 3)),
    ],
    "aten._euclidean_dist": [sample(aten._euclidean_dist, (5, 3), (4, 3), atol=1e-3)],
    "aten._cdist_backward": [
        sample(lambda g, x, y, d: aten._cdist_backward(g, x, y, 2.0, d), (5, 4), (5, 3), (4, 3), torch.full((5, 4), 2.0))
    ],
}
