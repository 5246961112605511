"""Integers and their powers, by Python's own integers: what `int_pow` must give."""

from __future__ import annotations

import random
import sys
from functools import cache

import torch
from torch import Tensor

import shardwise  # noqa: F401  loads the module below

module = sys.modules["shardwise.kernels.int_pow"]
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
EXPONENTS = (*range(71), *random.Random(0).sample(range(71, 2**31), 8), 2**31, 2**63 - 1)


@cache
def bases() -> list[int]:
    return [*range(-200, 201), *(random.Random(1).randrange(-(2**63), 2**63) for _ in range(10_000))]


def wrapped(numbers: list[int], dtype: torch.dtype) -> Tensor:
    """Integers of Python modulo two to the width of a type."""
    bits = torch.tensor([(n + 2**63) % 2**64 - 2**63 for n in numbers])
    return bits.to(module.SIGNED.get(dtype, dtype)).view(dtype)


@cache
def truths() -> dict[int, Tensor]:
    """The powers of all bases, by Python's integers; those of narrower types are their lowest bits."""
    return {e: wrapped([pow(b, e, 2**64) for b in bases()], torch.int64) for e in EXPONENTS}


def truth(exponent: int, dtype: torch.dtype) -> Tensor:
    return truths()[exponent].to(module.SIGNED.get(dtype, dtype)).view(dtype)


@cache
def some(highest: int) -> tuple[list[int], Tensor]:
    """A power for each base, and what it gives."""
    powers = [random.Random(highest + i).randint(0, highest) for i in range(len(bases()))]
    return powers, wrapped([pow(b, e, 2**64) for b, e in zip(bases(), powers, strict=True)], torch.int64)
