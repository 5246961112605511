"""Operators that torch takes apart before they reach DTensors, and that read values on the way: `one_hot`, `tensor_split`,
packed sequences; and some that lose what they would write to `out=`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import tracing_context
from .._torch.replacements import HOOKS
from ..errors import OperatorError
from ..tensor.dtensor import DTensor
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten


def _one_hot(go_on: Callable[..., Any], x: Tensor, num_classes: int = -1) -> Any:
    """What is left of it compares with every class: a value that is none of them would be a row of zeros."""
    if isinstance(x, DTensor) and tracing_context() is None:
        x = x.redistribute(placements=x._layout.reduced())
        if not x.numel() and num_classes < 1:
            raise OperatorError(f"one_hot of {x._layout}: without elements it does not tell how many classes there are")
        Toolbox(DTensor).look(partial(_check_classes, num_classes), x)
    return go_on(x, num_classes)


def _check_classes(num_classes: int, x: Tensor) -> None:
    wrong = x[(x < 0) | (x >= num_classes)] if num_classes != -1 else x[x < 0]
    if wrong.numel():
        most = "" if num_classes == -1 else f" and less than num_classes={num_classes}"
        raise OperatorError(f"one_hot of class {wrong[0].item()}: classes are not negative{most}")


def _tensor_split(go_on: Callable[..., Any], x: Tensor, indices_or_sections: Tensor, dim: int = 0) -> Any:
    """Its indices are read as they lie in memory."""
    if not isinstance(indices_or_sections, DTensor):
        return go_on(x, indices_or_sections, dim)
    if tracing_context() is not None:
        raise OperatorError(
            "tensor_split by a tensor in a compiled function: the shapes of its parts depend on data; give integers, or call "
            "it outside of compiled functions"
        )
    return torch.tensor_split(x, _plain(indices_or_sections), dim)


# ── sequences of different lengths ────────────────────────────────────────────────────────────────────────────────────
#
# How many sequences each step has is read on the host: an ordinary tensor, as on one device.


def _pack(go_on: Callable[..., Any], x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    lengths = _plain(lengths)
    if not isinstance(x, DTensor):
        return go_on(x, lengths, batch_first)
    by_step = x.transpose(0, 1) if batch_first else x
    _, counts = aten._pack_padded_sequence(torch.zeros(*by_step.shape[:2], 1), lengths, False)  # it also checks the lengths
    steps = torch.arange(len(counts)).repeat_interleave(counts)
    rows = torch.arange(len(steps)) - (counts.cumsum(0) - counts)[steps]
    return by_step[steps.to(x.device), rows.to(x.device)], counts


def _pad(go_on: Callable[..., Any], data: Tensor, counts: Tensor, batch_first: bool, value: float, length: int) -> Any:
    counts = _plain(counts)
    if not isinstance(data, DTensor):
        return go_on(data, counts, batch_first, value, length)
    if 0 < length < len(counts):
        raise OperatorError(f"pad_packed_sequence: total_length={length} is less than the {len(counts)} steps of the longest")
    counts = torch.cat([counts, counts.new_zeros(max(length - len(counts), 0))])
    rows = torch.arange(int(counts[0]))
    there = rows < counts[:, None]
    index = ((counts.cumsum(0) - counts)[:, None] + rows) * there
    mask = ~there.to(data.device)
    padded = data[index.to(data.device)].masked_fill(mask[(..., *[None] * (data.ndim - 1))], value)
    return padded.transpose(0, 1) if batch_first else padded, there.sum(0)


# ── out= ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_RANK = aten.linalg_matrix_rank
#: Given any tensor subclass, they take another way, on which nothing is written.
LOSE_OUT = (aten.kron.out, _RANK.out, _RANK.atol_rtol_tensor_out, _RANK.atol_rtol_float_out, _RANK.out_tol_tensor)


def _into_out(op: Any, go_on: Callable[..., Any], *args: Any, out: Tensor, **kwargs: Any) -> Any:
    if not any(isinstance(value, DTensor) for value in (*args, *kwargs.values(), out)):
        return go_on(*args, **kwargs, out=out)
    value = op.overloadpacket(*args, **kwargs)
    return aten.alias_copy.out(value.to(out.dtype) if torch.can_cast(value.dtype, out.dtype) else value, out=out)


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor().cpu() if isinstance(x, DTensor) else x


HOOKS.composites |= {
    aten._pack_padded_sequence.default: _pack,
    aten._pad_packed_sequence.default: _pad,
    aten.one_hot.default: _one_hot,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
    **{op: partial(_into_out, op) for op in LOSE_OUT},
}
