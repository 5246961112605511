# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The numbers of `shardwise.random.bits` by a Triton kernel: one pass over memory, and bit by bit the same.

A program makes a block of one row of the box of indices. What rounds does so as often and in the same order as there: fusing of
multiplications with additions is turned off. Some sources and dtypes are left to the operators of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .bits import FIRST, SECOND, STEP, Recipe, Spans
from .curves import DEGREE, FIRST_SEGMENT, NEAR, REST, SEGMENTS, exponential, normal, table

#: Where Triton is not, this module can be read, but not used.
AVAILABLE = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if AVAILABLE else None
tl: Any = importlib.import_module("triton.language") if AVAILABLE else None
_constant: Any = tl.constexpr if AVAILABLE else tuple
_jit: Any = triton.jit if AVAILABLE else lambda function=None, **words: function or _jit

_SOURCES = {"uniform": 0, "signed": 1, "below": 2, "normal": 3, "exponential": 4}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool)
#: Elements of a block, and blocks of a program, at most, as measured on an H200. What is looked up on a curve has one element
#: for each of 128 threads: Triton moves those of a thread with several through shared memory where a value is used twice.
_CURVED, _STRAIGHT = (128, 16), (512, 4)
#: Sides of a box, at most.
_SIDES = 3

#: Multipliers; and of curves: degree, rest, first segment, segments, near, below. Few names: each is compared at every launch.
_MIX = _constant(tuple(word % 2**64 for word in (STEP, FIRST, SECOND)))
_CURVES = _constant((DEGREE, REST, FIRST_SEGMENT, SEGMENTS, NEAR[torch.float32], -(2 ** NEAR[torch.float32])))


@_jit
def _word(x):
    """A number of the host, or one that lies in memory, as 64 bits."""
    if x.dtype.is_ptr():
        x = tl.load(x)
    return x.to(tl.int64)


@_jit
def _bits(index, key, other):
    z = (index ^ key).to(tl.uint64, bitcast=True) * _MIX[0]
    z = (z ^ (z >> 32) ^ other.to(tl.uint64, bitcast=True)) * _MIX[1]
    z = (z ^ (z >> 32)) * _MIX[2]
    z = (z ^ (z >> 32)) * _MIX[1]
    return z ^ (z >> 32)


@_jit
def _curve(z, curve):
    """`curves.evaluate`."""
    DEGREE: tl.constexpr = _CURVES[0]
    REST: tl.constexpr = _CURVES[1]
    FIRST: tl.constexpr = _CURVES[2]
    SEGMENTS: tl.constexpr = _CURVES[3]
    NEAR: tl.constexpr = _CURVES[4]
    BELOW: tl.constexpr = _CURVES[5]
    told = ((z & 0x7FFFFFFFFFFFFC00) | 1024).to(tl.int64, bitcast=True).to(tl.float64).to(tl.uint64, bitcast=True)
    place = curve + ((told >> REST).to(tl.int32) - FIRST)
    distance = ((told >> (REST - NEAR)).to(tl.int32) | BELOW).to(tl.float32)
    value = tl.load(place)
    for degree in tl.static_range(1, DEGREE + 1):
        value = value * distance + tl.load(place + degree * SEGMENTS)
    return value


@_jit
def _number(z, limit, curve, SOURCE: tl.constexpr, DROPPED: tl.constexpr):
    """The number of a source as a float, or a truth value."""
    if SOURCE == 0:
        found = (((z >> 32).to(tl.int32) >> (DROPPED - 32)) & ((1 << (64 - DROPPED)) - 1)).to(tl.float32)
    elif SOURCE == 1:
        found = (((z >> 32).to(tl.int32) >> (DROPPED - 32)) * 2 + 1).to(tl.float32)
    elif SOURCE == 2:
        found = (z >> 11).to(tl.int64, bitcast=True) < limit.to(tl.int64)
    elif SOURCE == 3:
        found = _curve(z, curve).to(tl.uint32, bitcast=True) | ((z >> 32).to(tl.uint32) & 0x80000000)
        found = found.to(tl.float32, bitcast=True)
    else:
        found = _curve(z, curve)
    return found


@_jit(do_not_specialize=["key", "other", "limit", "start", "start_1", "start_2"])
def _kernel(  # noqa: PLR0913  a kernel takes numbers one by one
    out,
    x,
    dropped,
    curve,
    key,
    other,
    start,
    start_1,
    start_2,
    limit,
    scale,
    shift,
    most,
    length,
    length_1,
    stride,
    stride_1,
    stride_2,
    SOURCE: tl.constexpr,
    DROPPED: tl.constexpr,
    SIDES: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    BOUNDED: tl.constexpr,
    DROPS: tl.constexpr,
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
        value = _number(z, limit, curve, SOURCE, DROPPED)
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
    _launch((out, out, out), made, made.scale, box, key)
    return True


def drop(x: Tensor, kept: Tensor, scale: float, made: Recipe, box: Spans, key: tuple[int, int]) -> Tensor | None:
    """What is left of a contiguous tensor where some elements are dropped, which is written to `kept`; None: not possible."""
    if x.dtype not in _DTYPES or len(box.starts) > _SIDES:
        return None
    out = torch.empty_like(x)
    _launch((kept, x, out), made, scale, box, key)
    return out


def _launch(tensors: tuple[Tensor, Tensor, Tensor], made: Recipe, scale: Any, box: Spans, key: Any) -> None:
    """Run the kernel on what it writes, what it drops elements of and what is left of that: three times one where none are."""
    out, x, _ = tensors
    if not out.numel():
        return
    programs, numbers, constants = _facts(made, scale, box.lengths, box.strides, x is not out)
    curve, starts = _table(made.source, out.device), (*reversed(box.starts), 0, 0)
    with torch.cuda.device_of(out):
        _kernel[programs](*tensors, curve, *key, *starts[:_SIDES], *numbers, **constants)


@lru_cache(maxsize=1024)
def _facts(
    made: Recipe, scale: float | None, lengths: tuple[int, ...], strides: tuple[int, ...], drops: bool
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """How many programs fill a box, and what the kernel takes beside tensors, keys and starts: numbers, and constants."""
    length, inner, _ = (*reversed(lengths), 1, 1)[:_SIDES]
    steps = (*reversed(strides), 1, 1)[:_SIDES]
    lanes, most = _CURVED if made.source in ("normal", "exponential") else _STRAIGHT
    block = min(max(_power(length), _CURVED[0]), lanes)
    turns = min(_power(-(-length // block)), most)
    limit = made.words[0] if made.source == "below" else 0
    numbers = (limit, scale or 0.0, made.shift, made.most or 0.0, length, inner, *steps)
    constants = {
        "SOURCE": _SOURCES[made.source],
        "DROPPED": 64 - made.words[0] if made.source in ("uniform", "signed") else 0,
        "SIDES": len(lengths),
        "SCALED": made.scale is not None,
        "SHIFTED": made.shift != 0,
        "BOUNDED": made.most is not None,
        "DROPS": drops,
        "BLOCK": block,
        "TURNS": turns,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    return (math.prod(lengths[:-1]) * -(-length // (block * turns)),), numbers, constants


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


@cache
def _table(source: str, device: torch.device) -> Tensor:
    return table(exponential if source == "exponential" else normal, device, torch.float32)
