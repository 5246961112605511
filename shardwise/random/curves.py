"""Quantile functions: the normal and the exponential number of a tail probability, alike to the bit on every device.

A probability is given as an odd multiple of 1024, in units of 2^-63. Those of one octave (from a power of two to the next) fall
into 64 segments, on each of which a parabola stands for the curve: segments get finer towards zero as the curve gets steeper.
Which segment, and how far from its upper end, are integers; after that come two products and two sums, each rounded by itself
and in this order, so no device can do that otherwise. Results are off by 1.3·10^-7 at most (doubles by
5·10^-8; measured at 20 million probabilities), above 1 in proportion to them.

>>> half = torch.tensor([2**62 + 1024])
>>> f"{evaluate(exponential, half, torch.float64).item():.6f}"  # minus its logarithm
'0.693147'
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

#: An octave has 2^6 segments; polynomials have this degree.
SPLIT, DEGREE = 6, 2
#: Probabilities lie in the octaves of 2^10 to 2^62; doubles tell the octave by their exponent, which starts at 1023.
LEAST, MOST = 10, 62
SEGMENTS = (MOST - LEAST + 1) << SPLIT
#: Bits of a double behind those that tell the segment, and what those say of the least likely segment.
REST, FIRST_SEGMENT = 52 - SPLIT, (1023 + LEAST) << SPLIT
#: How many of them tell how far it is from the upper end of a segment: as many as a float takes without rounding.
NEAR = {torch.float32: 24, torch.float64: REST}
#: Binary digits after the point of coefficients, few enough for machines whose logarithms differ in the last place.
_DIGITS = 28


Curve = Callable[[float], float]


def normal(probability: float) -> float:
    """What a normal number exceeds in size with a probability."""
    return -NormalDist().inv_cdf(probability / 2)


def exponential(probability: float) -> float:
    """What an exponential number exceeds with a probability."""
    return -math.log(probability)


def evaluate(curve: Curve, probability: Tensor, dtype: torch.dtype) -> Tensor:
    """A curve at probabilities, never zero; doubles tell more numbers apart, but are no nearer to the curve."""
    squares, slopes, ends = table(curve, probability.device, dtype)
    pattern = probability.to(torch.float64).view(torch.int64)  # exact: 53 bits
    segment = (pattern >> REST).sub_(FIRST_SEGMENT)
    distance = (pattern >> (REST - NEAR[dtype])).bitwise_or_(-(2 ** NEAR[dtype])).to(dtype)  # from the upper end, below zero
    value = squares.index_select(0, segment).mul_(distance).add_(slopes.index_select(0, segment))
    return value.mul_(distance).add_(ends.index_select(0, segment))


@cache
def table(curve: Curve, device: Any, dtype: torch.dtype) -> Tensor:
    """The coefficients of a curve for distances below zero, highest first, by segment."""
    columns = []
    for octave in range(LEAST, MOST + 1):
        for part in range(2**SPLIT):
            upper, width = math.ldexp(1 + (part + 1) / 2**SPLIT, octave - 63), math.ldexp(1, octave - 63 - SPLIT)
            square, slope, end = _polynomial(curve, upper, width)
            columns.append([round(math.ldexp(c, _DIGITS)) for c in (square, -slope, end)])
    near = torch.tensor([-_DIGITS - NEAR[dtype] * power for power in range(DEGREE, -1, -1)])
    return torch.ldexp(torch.tensor(columns, dtype=torch.float64), near).T.to(device, dtype).contiguous()


def _polynomial(function: Curve, upper: float, width: float) -> list[float]:
    """The polynomial through a function at the Chebyshev points of an interval, of the distance from its upper end. Plain sums
    and products: every machine gives the same."""
    differences = [function(upper - width * point) for point in _POINTS]
    for order in range(1, DEGREE + 1):
        for i in range(DEGREE, order - 1, -1):
            differences[i] = (differences[i] - differences[i - 1]) / (_POINTS[i] - _POINTS[i - order])
    polynomial = [differences[DEGREE]]
    for i in range(DEGREE - 1, -1, -1):  # times the distance from a point, plus the next difference
        shifted = [*polynomial, differences[i]]
        for j, coefficient in enumerate(polynomial):
            shifted[j + 1] -= coefficient * _POINTS[i]
        polynomial = shifted
    return polynomial


#: 1/2 - 1/2 cos(π (2i + 1) / 6).
_POINTS = (0.0669872981077807, 0.5, 0.9330127018922193)
