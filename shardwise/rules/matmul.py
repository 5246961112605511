"""Matrix products: linear in each factor, and in each together with what is added; a dim summed over leaves a pending sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..layout import Layout
from .notation import Call
from .table import rule


def _expanded(call: Call, wants: Sequence[Layout]) -> Any:
    """torch's addmv of an empty matrix gives the shape of what is added, not of the product."""
    if wants[0].shape == wants[1].shape[:1]:
        return None
    op = call.op

    def kernel(added: Tensor, matrix: Tensor, vector: Tensor, **scales: Any) -> Tensor:
        return op(added.expand(matrix.shape[0]), matrix, vector, **scales)

    return kernel


def _whole_scales(call: Call, wants: Sequence[Layout]) -> Any:
    """torch reads the scales of integers as integers, but not where there is nothing to add up."""
    if call.results[0].dtype.is_floating_point or call.results[0].dtype.is_complex:
        return None
    op = call.op
    return lambda *args, **scales: op(*args, **{name: int(scale) for name, scale in scales.items()})


rule("mm", "m k, k n -> m n", linear=((0,), (1,)))
rule("bmm", "b m k, b k n -> b m n", linear=((0,), (1,)))
rule("mv", "m k, k -> m", linear=((0,), (1,)))
rule("dot vdot", "k, k -> ", linear=((0,), (1,)))

SCALED = "max min: a negative beta turns the order round"
rule("addmm", "m n, m k, k n -> m n", linear=((0, 1), (0, 2)), unoffered=SCALED)
rule("baddbmm", "b m n, b m k, b k n -> b m n", linear=((0, 1), (0, 2)), kernel=_whole_scales, unoffered=SCALED)
rule("addbmm", "m n, b m k, b k n -> m n", linear=((0, 1), (0, 2)), kernel=_whole_scales, unoffered=SCALED)
rule("addmv", "m, m k, k -> m", linear=((0, 1), (0, 2)), kernel=_expanded, unoffered=SCALED)
rule("addr", "m n, m, n -> m n", linear=((0, 1), (0, 2)), unoffered=SCALED)
