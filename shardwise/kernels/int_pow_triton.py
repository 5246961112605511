# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Powers of `shardwise.kernels.int_pow` by Triton kernels: one pass over memory. They take contiguous tensors of one dim."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

#: Where Triton is not, this module can be read, but not used.
AVAILABLE = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if AVAILABLE else None
tl: Any = importlib.import_module("triton.language") if AVAILABLE else None
_jit: Any = triton.jit if AVAILABLE else lambda function=None, **words: function or _jit

#: Elements of a program.
_BLOCK = 1024


@_jit
def _load(x, place, mask, STEP: tl.constexpr, WIDE: tl.constexpr):
    """A block of integers, in the least type that a GPU multiplies; the tensor may be one number (STEP 0)."""
    found = tl.load(x + place * STEP, mask, other=0)
    return found.to(tl.int64) if WIDE else found.to(tl.int32)


@_jit(do_not_specialize=["exponent", "bits"])
def _power(out, base, exponent, bits, length, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: PLR0913  a kernel
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    x = _load(base, place, mask, 1, WIDE)
    value = x
    while bits > 1:  # from the highest on
        bits -= 1
        value = value * value
        if (exponent >> (bits - 1)) & 1:
            value = value * x
    tl.store(out + place, value.to(out.dtype.element_ty), mask)


@_jit
def _powers(  # noqa: PLR0913  a kernel
    out, base, exponent, length, STEP: tl.constexpr, EXPONENT_STEP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    x = _load(base, place, mask, STEP, WIDE)
    e = _load(exponent, place, mask, EXPONENT_STEP, WIDE)
    value = tl.full((BLOCK,), 1, x.dtype)
    square, rest = x, tl.maximum(e, 0)
    left = tl.max(rest, 0)
    while left > 0:
        value = tl.where((rest & 1) != 0, value * square, value)
        square = square * square
        rest = rest >> 1
        left = left >> 1
    unit = tl.where(x == 1, 1, tl.where(x == -1, 1 - 2 * (e & 1), 0))
    tl.store(out + place, tl.where(e < 0, unit, value).to(out.dtype.element_ty), mask)


def power(base: Tensor, exponent: int, out: Tensor) -> None:
    """A power that is a number, above 0."""
    if out.numel():
        with torch.cuda.device_of(out):
            _power[_programs(out)](out, base, exponent, exponent.bit_length(), out.numel(), **_facts(out))


def powers(base: Tensor, exponent: Tensor, out: Tensor) -> None:
    """Powers that differ from element to element; a tensor of stride 0 is one number."""
    if out.numel():
        steps = {"STEP": min(base.stride(0), 1), "EXPONENT_STEP": min(exponent.stride(0), 1)}
        with torch.cuda.device_of(out):
            _powers[_programs(out)](out, base, exponent, out.numel(), **steps, **_facts(out))


def _programs(out: Tensor) -> tuple[int]:
    return (-(-out.numel() // _BLOCK),)


def _facts(out: Tensor) -> dict[str, Any]:
    return {"WIDE": out.dtype.itemsize == 8, "BLOCK": _BLOCK, "num_warps": 4}
