"""Fourier transforms: the dims that are transformed are whole, the others may be sharded; all are linear.

A transform of several dims is one of some of them and then of the rest, so that only some have to be whole at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layouts.layout import Layout
from ..propagation.notation import Call, Kernel, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten


def _stepwise(call: Call) -> Proposal | None:
    """In two steps where some, but not all, of the dims are sharded; the last dim is the one that is real on one side."""
    layout, dims = call.tensors[0], call.dims("dim")
    sharded = [d for d in dims if layout.axes_of(d)]
    return Proposal((), (), program=_STEPS[call.name]) if sharded and len(dims) > 1 and call["dim"] else None


def _apart(tools: Toolbox, x: Any, dims: list[int]) -> tuple[list[int], list[int]]:
    """The dims that are not sharded and those that are; one and the rest where all are."""
    layout = tools.layout(x)
    here = [d for d in dims if not layout.axes_of(d % x.ndim)] or dims[:1]
    return here, [d for d in dims if d not in here]


def _c2c(tools: Toolbox, op: Any, x: Any, dims: list[int], normalization: int, forward: bool) -> Any:
    here, rest = _apart(tools, x, dims)
    x = op(x, here, normalization, forward)
    return op(x, rest, normalization, forward) if rest else x


def _r2c(tools: Toolbox, op: Any, x: Any, dims: list[int], normalization: int, onesided: bool) -> Any:
    return aten._fft_c2c(op(x, dims[-1:], normalization, onesided), dims[:-1], normalization, True)


def _c2r(tools: Toolbox, op: Any, x: Any, dims: list[int], normalization: int, size: int) -> Any:
    return op(aten._fft_c2c(x, dims[:-1], normalization, False), dims[-1:], normalization, size)


_STEPS = {"aten._fft_c2c": _c2c, "aten._fft_r2c": _r2c, "aten._fft_c2r": _c2r}


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
