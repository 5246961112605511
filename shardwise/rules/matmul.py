"""Matrix products: linear in each factor, and in each together with what is added; a dim summed over leaves a partial sum.

Grouped products, too: each rank takes the rows of its own experts, of which the others' are zero there, or those of its own
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.grouped_mm import GROUPED, product, shape
from ..layouts.layout import Layout
from ..propagation.notation import Call, Rule, parse
from ..propagation.table import rule
from .shard_position import ShardPosition, at_least_one, keep


def _expanded(call: Call, wants: Sequence[Layout]) -> Any:
    """torch's addmv of an empty matrix gives the shape of what is added, not of the product."""
    if wants[0].shape == wants[1].shape[:1]:
        return None
    op = call.op
    return lambda added, matrix, vector, **scales: op(added.expand(matrix.shape[0]), matrix, vector, **scales)


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
rule("_int_mm", "m k, k n -> m n")

# ── grouped: rows of one factor belong to matrices of the other, by offsets ───────────────────────────────────────────


def _grouped(call: Call) -> Rule:
    dims = call["self"].ndim, call["mat2"].ndim
    row = Rule(*parse(GROUPED[dims]), linear=((0,), (1,)), whole=frozenset("o"), kernel=lambda call, wants: product)
    return row if dims == (3, 3) else replace(row, kernel=partial(_products, dims))


def _products(dims: tuple[int, int], call: Call, wants: Sequence[Layout]) -> Any:
    """The product with the offsets of this rank's tokens, and with its own experts."""
    tokens = ShardPosition(wants[dims == (3, 2)], 0 if dims == (2, 3) else 1)
    by_expert = dims != (2, 2) and bool(wants[dims == (2, 3)].axes_of(0))
    experts = ShardPosition(wants[dims == (2, 3)], 0) if by_expert else None

    def kernel(*args: Any) -> Tensor:
        given, theirs = experts.split(args) if experts is not None else (args, [])
        (x, w, offsets, *rest), mine = tokens.split(given)
        if dims == (3, 2):
            x, w = w.t(), x.transpose(1, 2)
        index = tokens.index(x.shape[dims == (2, 2)], mine)
        if experts is None:
            out = product(x, w, torch.searchsorted(index, offsets, out_int32=True), *rest)
        else:
            expert = torch.searchsorted(offsets, index, right=True)
            out = _of_experts(x, w, experts.local(expert, theirs), rest)
        return out.t() if dims == (3, 2) else out

    return kernel, *tokens.numbers, *(experts.numbers if experts is not None else ())


def _of_experts(x: Tensor, w: Tensor, expert: tuple[Tensor, Tensor], rest: Sequence[Any]) -> Tensor:
    """The product of the rows whose expert is here, in its place; zero in the other rows, which come last meanwhile."""
    w = at_least_one(w, 0)
    position, mine = expert
    key = torch.where(mine, position, len(w))
    order = key.argsort(stable=True)
    ends = torch.searchsorted(key[order], torch.arange(len(w), device=key.device), right=True, out_int32=True)
    out = product(x[order], w, ends, *rest)
    return keep(out[order.argsort()], mine[:, None])


rule(
    "_grouped_mm shardwise::grouped_mm",
    function=_grouped,
    gives=lambda a: [(shape(a["self"], a["mat2"], a["offs"]), a["out_dtype"] or a["self"].dtype)],
)
