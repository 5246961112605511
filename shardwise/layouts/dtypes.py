"""Facts about dtypes: how they are written, their extremes, and what changes no value that it is reduced with."""

from __future__ import annotations

import math
from typing import Any

import torch

#: How a dtype is written in a layout.
DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

#: One device accumulates half precision in single precision; so do programs, which would round between their steps.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

#: What leaves a value as it is, by kind of reduction. A value reduced with itself is itself by the other kinds.
NEUTRAL = {"sum": 0, "product": 1, "bxor": 0}


def lowest(dtype: torch.dtype) -> Any:
    """What no value of a dtype is below."""
    return -math.inf if dtype.is_floating_point else dtype is not torch.bool and torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """What no value of a dtype is above."""
    return math.inf if dtype.is_floating_point else dtype is torch.bool or torch.iinfo(dtype).max


def identity(kind: str, dtype: torch.dtype) -> Any:
    """What changes no value of a dtype that it is reduced with.

    >>> identity("max", torch.float32), identity("min", torch.int8), identity("band", torch.uint8), identity("sum", torch.bool)
    (-inf, 127, 255, 0)
    """
    if kind in ("max", "min"):
        return lowest(dtype) if kind == "max" else highest(dtype)
    return NEUTRAL.get(kind, 0) if kind != "band" else -1 if dtype.is_signed else highest(dtype)
