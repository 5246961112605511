"""Counter-based random numbers: what an element gets is a function of two keys and of its index, and of nothing else.

Bits are mixed out of keys and index by multiplications modulo 2^64, numbers are made of bits by integer operations, and the
last steps are few products and sums of floats, each rounded by itself. So the same numbers come out on every device, eager and
compiled.

>>> index(Spans((4,), (2,), (1,)), "cpu")
tensor([4, 5])
>>> values(recipe(Draw("uniform", (0.0, 1.0)), torch.float32), bits(index(Spans((0,), (3,), (1,)), "cpu"), 1, 2), torch.float32)
tensor([0.7274, 0.5729, 0.6525])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OperatorError
from .curves import evaluate, exponential, normal


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


#: Odd multipliers known to mix well: the golden ratio, that of D. Lea's mixer, and one of G. Steele's and S. Vigna's.
STEP, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xDABA0B6EB09322E3, 0xD1342543DE82EF95))
_HALF, _POSITIVE = 2**32 - 1, 2**63 - 1
#: Bits of a number from 0 to 1.
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# ── bits ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bits(z: Tensor, key: Any, other: Any) -> Tensor:
    """64 random bits for each index, in place. Every step can be undone, so other indices have other bits; the second key
    enters after a product, so the bits under one pair of keys are no part of those under another, and before three more, so
    that each of its bits changes half of the result."""
    high = torch.empty_like(z)
    z.bitwise_xor_(key).mul_(STEP)  # a compiler that follows sums and products of indices in exact arithmetic stops here
    _fold(z, high).bitwise_xor_(other).mul_(FIRST)
    _fold(z, high).mul_(SECOND)
    _fold(z, high).mul_(FIRST)
    return _fold(z, high)


def _fold(z: Tensor, high: Tensor) -> Tensor:
    """The upper half onto the lower: for a GPU, which has words of 32 bits, this is one operation."""
    torch.bitwise_right_shift(z, 32, out=high).bitwise_and_(_HALF)
    return z.bitwise_xor_(high)


# ── indices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Spans(NamedTuple):
    """The global indices of a rank's elements, in their order: a box of which each side starts somewhere, has a length, and
    goes on in strides."""

    starts: tuple[Any, ...]
    lengths: tuple[Any, ...]
    strides: tuple[Any, ...]


def index(spans: Spans, device: Any) -> Tensor:
    """All indices, in the shape of the box."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start, length, stride in zip(*spans, strict=True):
        total = total.unsqueeze(-1) + (torch.arange(length, device=device) + start) * stride
    return total


def _blocks(spans: Spans, device: Any, most: int) -> Iterator[Tensor]:
    """The same, a block of at most so many indices after the other: rows of the last side, or parts of a row."""
    outer = Spans(*(side[:-1] for side in spans))
    start, length, stride = (side[-1] for side in spans)
    first, step = start * stride, min(most, length)
    if not outer.starts and isinstance(start, int):
        for column in range(0, length, step):
            yield torch.arange(first + column * stride, first + min(column + step, length) * stride, stride, device=device)
        return
    rows, several = index(outer, device).reshape(-1, 1) + first, most // step
    for row in range(0, len(rows), several):
        for column in range(0, length, step):
            inner = torch.arange(column * stride, min(column + step, length) * stride, stride, device=device)
            yield (rows[row : row + several] + inner).view(-1)


# ── what to make of bits ──────────────────────────────────────────────────────────────────────────────────────────────


class Draw(NamedTuple):
    """A distribution and its numbers."""

    kind: str
    numbers: tuple[Any, ...] = ()


class Recipe(NamedTuple):
    """How bits become numbers: those of a source, as floats times a scale (None: they stay integers), plus a shift, at the most
    so much, and through a last function."""

    source: str
    words: tuple[Any, ...] = ()
    scale: float | None = None
    shift: float = 0.0
    most: float | None = None
    last: str = ""

    @property
    def fuses(self) -> bool:
        """Whether a compiler may take it apart: it has no sum of a product, which one may round once and another twice."""
        return self.source in ("uniform", "signed", "below", "integer", "bits") and not self.shift and not self.last


def values(made: Recipe, z: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that random bits stand for."""
    found = _SOURCES[made.source](z, *made.words)
    if made.scale is None:
        return found.to(dtype)
    found = found.to(dtype if dtype == torch.float64 else torch.float32).mul_(made.scale)
    found = found.add_(made.shift) if made.shift else found
    found = found.clamp_(max=made.most) if made.most is not None else found
    return _LAST[made.last](found).to(dtype)


def _uniform(z: Tensor, digits: int) -> Tensor:
    """So many bits."""
    return (z >> (64 - digits)).bitwise_and_(2**digits - 1)


def _probability(z: Tensor) -> Tensor:
    return (z & (2**63 - 1024)).bitwise_or_(1024)


def _normal(z: Tensor, dtype: torch.dtype) -> Tensor:
    """A standard normal number; the highest bit is its sign."""
    return evaluate(normal, _probability(z), dtype).copysign_(z.to(dtype))


def _ratio(z: Tensor) -> Tensor:
    """The ratio of two normal numbers."""
    other = bits(z.clone(), STEP, FIRST)
    return _normal(z, torch.float64).div_(_normal(other, torch.float64))


def _integer(z: Tensor, first: int, count: int) -> Tensor:
    """One of `count` integers: the upper half of a product of 128 bits, or a remainder where that does not fit."""
    if count <= 2**32:
        low = (z & _HALF).mul_(count).bitwise_right_shift_(32).bitwise_and_(_HALF)
        found = low.add_((z >> 32).bitwise_and_(_HALF).mul_(count)).bitwise_right_shift_(32).bitwise_and_(_HALF)
    elif count < 2**63:
        found = (z >> 1).bitwise_and_(_POSITIVE).remainder_(count)
    elif count < 2**64:  # as unsigned numbers: those beyond `count` start over
        found = torch.where((z ^ -(2**63)) < count - 2**63, z, z - _signed(count))
    else:
        found = z.clone()
    return found.add_(first)


_SOURCES: dict[str, Callable[..., Tensor]] = {
    "bits": torch.clone,
    "uniform": _uniform,
    "signed": lambda z, digits: (z >> (64 - digits)).mul_(2).add_(1),  # odd numbers around zero, less than 2^digits
    "below": lambda z, limit: _uniform(z, 53) < limit,
    "normal": _normal,
    "exponential": lambda z, dtype: evaluate(exponential, _probability(z), dtype),  # never zero
    "ratio": _ratio,
    "integer": _integer,
}
_LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "ceil": lambda x: x.ceil_().clamp_(min=1),
    "exp": lambda x: x.to(torch.float64).exp_(),  # the device's own function; rounded to floats it hardly ever shows
}


# ── distributions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=256)
def recipe(draw: Draw, dtype: torch.dtype) -> Recipe:
    """How the numbers of a distribution are made in a dtype.

    >>> recipe(Draw("bernoulli", (0.5,)), torch.bool)
    Recipe(source='below', words=(4503599627370496,), scale=None, shift=0.0, most=None, last='')
    """
    if dtype not in DIGITS and draw.kind in ("uniform", "normal", "exponential", "cauchy", "log_normal"):
        raise OperatorError(f"{draw.kind} numbers of {dtype}: they are floats; use a dtype of floats")
    return _RECIPES[draw.kind](dtype, *draw.numbers)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise OperatorError(text)


def _of_uniform(dtype: torch.dtype, low: float, high: float) -> Recipe:
    _require(low <= high, f"uniform numbers from {low} to {high}: give the lower bound first")
    largest, digits = torch.finfo(dtype).max, DIGITS[dtype]
    text = f"uniform numbers from {low} to {high} of {dtype}: bounds, and what is between them, are {largest} at the most"
    _require(max(-low, high, high - low) <= largest, text)
    if low == -high:
        return Recipe("signed", (digits,), math.ldexp(high, -digits))
    below = torch.tensor(high, dtype=dtype)
    most = below.nextafter(below - math.inf).item() if low and low < high else None
    return Recipe("uniform", (digits,), math.ldexp(high - low, -digits), low, most)


def _on_curve(source: str, dtype: torch.dtype, scale: float) -> Recipe:
    return Recipe(source, (torch.float64 if dtype == torch.float64 else torch.float32,), scale)


def _of_normal(dtype: torch.dtype, mean: float, std: float, last: str = "") -> Recipe:
    _require(std >= 0, f"normal numbers with a standard deviation of {std}: it cannot be negative")
    _require(std > 0 or not last, "log-normal numbers with a standard deviation of 0: it must be positive")
    return _on_curve("normal", dtype, std)._replace(shift=mean, last=last)


def _of_exponential(dtype: torch.dtype, rate: float) -> Recipe:
    _require(rate > 0, f"exponential numbers with a rate of {rate}: it must be positive")
    return _on_curve("exponential", dtype, 1 / rate)


def _of_geometric(dtype: torch.dtype, p: float) -> Recipe:
    _require(0 < p < 1, f"geometric numbers with a probability of {p}: it must be more than 0 and less than 1")
    return _on_curve("exponential", dtype, -1 / math.log1p(-p))._replace(last="ceil")


def _of_bernoulli(dtype: torch.dtype, p: float) -> Recipe:
    _require(0 <= p <= 1, f"bernoulli numbers with a probability of {p}: it must be from 0 to 1")
    return Recipe("below", (int(math.ldexp(p, 53)),))


def _of_integer(dtype: torch.dtype, first: int, last: int) -> Recipe:
    _require(first <= last, f"integers from {first} to less than {last + 1}: there are none; give the lower bound first")
    least, most = bounds(dtype)
    text = f"integers from {first} to less than {last + 1} of {dtype}, which holds those from {least} to {most}"
    _require(least <= first and last <= most, text)
    return Recipe("integer", (int(first), int(last) - int(first) + 1))


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest integer of a dtype.

    >>> bounds(torch.uint8), bounds(torch.bool)
    ((0, 255), (0, 1))
    """
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _of_cauchy(dtype: torch.dtype, median: float, sigma: float) -> Recipe:
    _require(sigma > 0, f"cauchy numbers with a width of {sigma}: it must be positive")
    return Recipe("ratio", (), sigma, median)


_RECIPES: dict[str, Callable[..., Recipe]] = {
    "bits": lambda dtype: Recipe("bits"),
    "uniform": _of_uniform,
    "normal": _of_normal,
    "log_normal": lambda dtype, mean, std: _of_normal(dtype, mean, std, "exp"),
    "exponential": _of_exponential,
    "geometric": _of_geometric,
    "bernoulli": _of_bernoulli,
    "integer": _of_integer,
    "cauchy": _of_cauchy,
}


# ── filling memory ────────────────────────────────────────────────────────────────────────────────────────────────────

#: How many elements are made at a time for each thread of a host, so that they stay in its cache, and on another device.
_AT_ONCE, _AT_ONCE_ELSEWHERE = 2**15, 2**24


def fill(out: Tensor, draw: Draw, spans: Spans, key: tuple[Any, Any]) -> Tensor:
    """Fill a contiguous tensor with the numbers of the indices that it holds."""
    made, flat, done = recipe(draw, out.dtype), out.view(-1), 0
    most = _AT_ONCE * torch.get_num_threads() if out.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    for block in _blocks(spans, out.device, most) if out.numel() else ():
        count = block.numel()
        flat.narrow(0, done, count).copy_(values(made, bits(block, *key), out.dtype))
        done += count
    return out
