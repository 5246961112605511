"""Curves in fixed point: the normal and the exponential number of a tail probability, by integer operations only.

A probability is given as an odd multiple of 1024, in units of 2^-63. Those of one octave (from a power of two to the next) fall
into 8 segments, on each of which a polynomial stands for the curve: segments get finer towards zero as the curve gets steeper.
Both curves fall ever faster towards zero: seen from the upper end of a segment all coefficients are positive, and 32 bits hold
each of them and every sum. Results are off by less than 2^-23, normal ones by less than 2^-25; nothing is rounded on the way,
so no device can do that otherwise.

>>> half = torch.tensor([2**62 + 1024])
>>> f"{int(evaluate(EXPONENTIAL, half)) / 2**EXPONENTIAL.digits:.6f}"  # minus its logarithm
'0.693147'
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: An octave has 2^3 segments; polynomials have this degree.
SPLIT, DEGREE = 3, 4
#: Probabilities lie in the octaves of 2^10 to 2^62; doubles tell the octave by their exponent, which starts at 1023.
LEAST, MOST = 10, 62
#: Bits of a double behind those that tell the segment, of which 32 tell where in it; and the number of the likeliest segment.
REST, FIRST_SEGMENT = 52 - SPLIT, ((1023 + MOST + 1) << SPLIT) - 1
_WORD = 2**32 - 1
#: Bits that are given beyond those of a result where they are asked for.
FINE = 24


class Curve(NamedTuple):
    """A function of a probability, and the binary digits after the point of a result: as many as 32 bits have room for."""

    function: Callable[[float], float]
    digits: int


#: What a normal number exceeds in size with a probability, and what an exponential one exceeds.
NORMAL = Curve(lambda probability: -NormalDist().inv_cdf(probability / 2), 28)
EXPONENTIAL = Curve(lambda probability: -math.log(probability), 26)


def evaluate(curve: Curve, probability: Tensor, fine: bool = False) -> Tensor:
    """A curve at probabilities; `fine`, with more digits, which the curve does not have but which tell more numbers apart."""
    steps = table(curve, probability.device)
    told = probability.to(torch.float64).view(torch.int64)  # exact: 53 bits
    segment = (told >> REST).neg_().add_(FIRST_SEGMENT)
    distance = (told >> (REST - 32)).bitwise_and_(_WORD).bitwise_xor_(_WORD)
    value = steps[0].index_select(0, segment)
    for coefficients in steps[1:-1].unbind():
        value.mul_(distance).bitwise_right_shift_(32).add_(coefficients.index_select(0, segment))
    last = steps[-1].index_select(0, segment)
    if fine:
        return value.mul_(distance).bitwise_right_shift_(32 - FINE).add_(last.mul_(2**FINE))
    return value.mul_(distance).bitwise_right_shift_(32).add_(last)


@cache
def table(curve: Curve, device: Any) -> Tensor:
    """The coefficients of a curve, highest first, by segment; the likeliest segments come first, as a cache would have it."""
    columns = []
    for octave in range(MOST, LEAST - 1, -1):
        for part in range(2**SPLIT, 0, -1):
            upper, width = math.ldexp(1 + part / 2**SPLIT, octave - 63), math.ldexp(1, octave - 63 - SPLIT)
            rounded = [max(0, round(math.ldexp(c, curve.digits))) for c in _polynomial(curve.function, upper, width)]
            columns.append([*rounded[:-1], rounded[-1] + 1])  # what is cut off on the way is one on average
    return torch.tensor(columns, device=device).T.contiguous()


def _polynomial(function: Callable[[float], float], upper: float, width: float) -> list[float]:
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


#: 1/2 - 1/2 cos(π (2i + 1) / 10).
_POINTS = (0.024471741852423234, 0.20610737385376343, 0.5, 0.7938926261462366, 0.9755282581475768)
