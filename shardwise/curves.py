"""Curves in fixed point: the normal and the exponential number of a tail probability, by integer operations only.

A curve is a function of a probability, given as the odd multiple of 1024 below 2^63 that it is of 2^63. The probabilities of one
octave (from a power of two to the next) fall into 8 segments, on each of which a polynomial of degree 4 stands for the function:
segments get finer towards zero as the function gets steeper. Results are multiples of 2^-32. They are off by less than 2^-26,
and no rounding of a device and no fused multiplication can change them.

>>> half = torch.tensor([2**62 + 1024])
>>> f"{int(evaluate(exponential_table('cpu'), half)) / ONE:.7f}"  # minus its logarithm
'0.6931472'
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

#: What stands for 1 in a result.
ONE = 2**32
#: An octave has 2^3 segments; polynomials have this degree, of a position in the segment that is less than 2^31.
SPLIT, DEGREE, POSITION = 3, 4, 31
#: Probabilities lie in the octaves of 2^10 to 2^62; doubles tell the octave by their exponent, which starts at 1023.
LEAST, MOST = 10, 62
_SHIFT = 52 - SPLIT
_FIRST = ((1023 + MOST + 1) << SPLIT) - 1


def evaluate(table: Tensor, probability: Tensor) -> Tensor:
    """The curve of a table at probabilities of the form 1024·(2k + 1) < 2^63."""
    told = probability.to(torch.float64).view(torch.int64)  # exact: 53 bits
    segment = (told >> _SHIFT).neg_().add_(_FIRST)
    position = (told >> (_SHIFT - POSITION)).bitwise_and_(2**POSITION - 1)
    value = table[0][segment]
    for coefficients in table[1:].unbind():
        value.mul_(position).bitwise_right_shift_(POSITION).add_(coefficients[segment])
    return value


@cache
def normal_table(device: Any) -> Tensor:
    """The positive number that a normal one exceeds with half the probability: coefficients, highest first, by segment."""
    below = NormalDist().inv_cdf
    return _table(lambda probability: -below(probability / 2)).to(device)


@cache
def exponential_table(device: Any) -> Tensor:
    """The number that an exponential one exceeds with the probability."""
    return _table(lambda probability: -math.log(probability)).to(device)


def _table(function: Callable[[float], float]) -> Tensor:
    """The likeliest segments come first: on a GPU they share a line of its cache."""
    columns = []
    for octave in range(MOST, LEAST - 1, -1):
        for part in range(2**SPLIT - 1, -1, -1):
            start, width = math.ldexp(1 + part / 2**SPLIT, octave - 63), math.ldexp(1, octave - 63 - SPLIT)
            columns.append([round(c * ONE) for c in _polynomial(function, start, width)])
    return torch.tensor(columns).T.contiguous()


def _polynomial(function: Callable[[float], float], start: float, width: float) -> list[float]:
    """The polynomial through a function at the Chebyshev points of an interval, of the position in it from 0 to 1. Plain sums
    and products: every machine gives the same."""
    points = [0.5 - 0.5 * x for x in _CHEBYSHEV]
    differences = [function(start + width * x) for x in points]
    for order in range(1, DEGREE + 1):
        for i in range(DEGREE, order - 1, -1):
            differences[i] = (differences[i] - differences[i - 1]) / (points[i] - points[i - order])
    polynomial = [differences[DEGREE]]
    for i in range(DEGREE - 1, -1, -1):  # times (x - point), plus the next difference
        shifted = [*polynomial, differences[i]]
        for j, coefficient in enumerate(polynomial):
            shifted[j + 1] -= coefficient * points[i]
        polynomial = shifted
    return polynomial


#: cos(π (2i + 1) / 10).
_CHEBYSHEV = (0.9510565162951535, 0.5877852522924731, 0.0, -0.5877852522924731, -0.9510565162951535)
