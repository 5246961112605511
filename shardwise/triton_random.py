# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The numbers of `shardwise.counter` by a Triton kernel: one pass over memory, and bit by bit the same.

A program makes a block of one row of the box of indices. What rounds does so as often and in the same order as there: fusing of
multiplications with additions is turned off. Some sources and dtypes are left to the operators of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .counter import FIRST, SECOND, STEP, Recipe, Spans
from .curves import DEGREE, FIRST_SEGMENT, NEAR, REST, exponential, normal, table

#: Where Triton is not, this module can be read, but not used.
AVAILABLE = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if AVAILABLE else None
tl: Any = importlib.import_module("triton.language") if AVAILABLE else None
_constant: Any = tl.constexpr if AVAILABLE else int
_jit: Any = triton.jit if AVAILABLE else lambda function=None, **words: function or _jit

_SOURCES = {"uniform": 0, "signed": 1, "below": 2, "normal": 3, "exponential": 4}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool)
#: Elements of a block: one for each thread, since Triton moves those of a thread with several through shared memory where a
#: value is used twice. And blocks of a program, and sides of a box, at most.
_BLOCK, _TURNS, _SIDES = 128, 8, 3

_STEP, _FIRST, _SECOND = (_constant(word % 2**64) for word in (STEP, FIRST, SECOND))
_DEGREE, _REST, _FIRST_SEGMENT = _constant(DEGREE), _constant(REST), _constant(FIRST_SEGMENT)
_NEAR, _BELOW = _constant(NEAR[torch.float32]), _constant(-(2 ** NEAR[torch.float32]))


@_jit
def _word(x):
    """A number of the host, or one that lies in memory, as 64 bits."""
    if x.dtype.is_ptr():
        x = tl.load(x)
    return x.to(tl.int64)


@_jit
def _bits(index, key, other):
    z = (index ^ key).to(tl.uint64, bitcast=True) * _STEP
    z = (z ^ (z >> 32)) * _FIRST
    z = (z ^ (z >> 32) ^ other.to(tl.uint64, bitcast=True)) * _SECOND
    z = (z ^ (z >> 32)) * _FIRST
    return z ^ (z >> 32)


@_jit
def _curve(z, curve, SEGMENTS: tl.constexpr):
    """`curves.evaluate`."""
    told = ((z & 0x7FFFFFFFFFFFFC00) | 1024).to(tl.int64, bitcast=True).to(tl.float64).to(tl.uint64, bitcast=True)
    place = curve + ((told >> _REST).to(tl.int32) - _FIRST_SEGMENT)
    distance = ((told >> (_REST - _NEAR)).to(tl.int32) | _BELOW).to(tl.float32)
    value = tl.load(place)
    for degree in tl.static_range(1, _DEGREE + 1):
        value = value * distance + tl.load(place + degree * SEGMENTS)
    return value


@_jit
def _number(z, limit, curve, SOURCE: tl.constexpr, DROPPED: tl.constexpr, SEGMENTS: tl.constexpr):
    """The number of a source as a float, or a truth value."""
    if SOURCE == 0:
        found = (((z >> 32).to(tl.int32) >> (DROPPED - 32)) & ((1 << (64 - DROPPED)) - 1)).to(tl.float32)
    elif SOURCE == 1:
        found = (((z >> 32).to(tl.int32) >> (DROPPED - 32)) * 2 + 1).to(tl.float32)
    elif SOURCE == 2:
        found = (z >> 11).to(tl.int64, bitcast=True) < limit.to(tl.int64)
    elif SOURCE == 3:
        found = _curve(z, curve, SEGMENTS).to(tl.uint32, bitcast=True) | ((z >> 32).to(tl.uint32) & 0x80000000)
        found = found.to(tl.float32, bitcast=True)
    else:
        found = _curve(z, curve, SEGMENTS)
    return found


@_jit(do_not_specialize=["key", "other", "limit", "start", "start_1", "start_2"])
def _kernel(  # noqa: PLR0913  a kernel takes numbers one by one
    out,
    x,
    dropped,
    curve,
    key,
    other,
    limit,
    scale,
    shift,
    most,
    start,
    length,
    stride,
    start_1,
    length_1,
    stride_1,
    start_2,
    stride_2,
    SOURCE: tl.constexpr,
    DROPPED: tl.constexpr,
    SIDES: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    BOUNDED: tl.constexpr,
    DROPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    base, before = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if SIDES > 1:
        blocks = tl.cdiv(length, BLOCK * TURNS)
        row = block // blocks
        block -= row * blocks
        before = row * length
        if SIDES > 2:
            base += (row // length_1 + _word(start_2)) * stride_2
            row = row % length_1
        base += (row + _word(start_1)) * stride_1
    first, lane = block * (BLOCK * TURNS), tl.arange(0, BLOCK)
    step, place = first + _word(start) + lane, before + first + lane
    left = tl.minimum(length - first, BLOCK * TURNS).to(tl.int32)
    for turn in tl.static_range(TURNS):
        mask = lane + turn * BLOCK < left
        z = _bits(base + (step + turn * BLOCK) * stride, key.to(tl.int64), other.to(tl.int64))
        value = _number(z, limit, curve, SOURCE, DROPPED, SEGMENTS)
        if SCALED:
            value = value * scale
        if SHIFTED:
            value = value + shift
        if BOUNDED:
            value = tl.minimum(value, most)
        if DROPS:
            given = tl.load(x + place + turn * BLOCK, mask).to(tl.float32)
            rest = (given * value.to(tl.float32) * scale).to(dropped.dtype.element_ty)
            tl.store(dropped + place + turn * BLOCK, rest, mask)
        if out.dtype.element_ty != tl.int1:
            value = value.to(tl.float32).to(out.dtype.element_ty)
        tl.store(out + place + turn * BLOCK, value, mask)


def fill(out: Tensor, made: Recipe, box: Spans, key: tuple[int, int]) -> bool:
    """Fill a contiguous tensor, and say whether that was possible."""
    if made.source not in _SOURCES or made.last or out.dtype not in _DTYPES or len(box.starts) > _SIDES:
        return False
    _launch(out, None, out, made, made.scale, box, key)
    return True


def drop(x: Tensor, kept: Tensor, scale: float, made: Recipe, box: Spans, key: tuple[int, int]) -> Tensor | None:
    """What is left of a contiguous tensor where some elements are dropped, which is written to `kept`; None: not possible."""
    if x.dtype not in _DTYPES or len(box.starts) > _SIDES:
        return None
    out = torch.empty_like(x)
    _launch(kept, x, out, made, scale, box, key)
    return out


def _launch(out: Tensor, x: Tensor | None, dropped: Tensor, made: Recipe, scale: Any, box: Spans, key: Any) -> None:  # noqa: PLR0913
    if not out.numel():
        return
    length, rows = box.lengths[-1], math.prod(box.lengths[:-1])
    turns = min(triton.next_power_of_2(triton.cdiv(length, _BLOCK)), _TURNS)
    curve = _table(made.source, out.device)
    spare = _SIDES - len(box.starts)
    starts, lengths, strides = ([*reversed(side), *[1] * spare] for side in box)
    with torch.cuda.device_of(out):
        _kernel[(rows * triton.cdiv(length, _BLOCK * turns),)](
            *(out, out if x is None else x, dropped, curve),
            *(*key, made.words[0] if made.source == "below" else 0),
            *(scale or 0.0, made.shift, made.most or 0.0),
            *(starts[0], lengths[0], strides[0], starts[1], lengths[1], strides[1], starts[2], strides[2]),
            SOURCE=_SOURCES[made.source],
            DROPPED=64 - made.words[0] if made.source in ("uniform", "signed") else 0,
            SIDES=len(box.starts),
            SCALED=made.scale is not None,
            SHIFTED=made.shift != 0,
            BOUNDED=made.most is not None,
            DROPS=x is not None,
            SEGMENTS=curve.shape[1],
            BLOCK=_BLOCK,
            TURNS=turns,
            enable_fp_fusion=False,
        )


@cache
def _table(source: str, device: torch.device) -> Tensor:
    return table(exponential if source == "exponential" else normal, device, torch.float32)
