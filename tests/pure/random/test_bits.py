"""Random bits of a counter, and numbers made of them: 10^7 draws look like chance, and curves are what they stand for."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.random.bits import DIGITS, Draw, Spans, bits, fill, index, recipe
from shardwise.random.curves import LEAST, MOST, Curve, evaluate, exponential, normal, table
from shardwise.random.keys import next_key, triton_kernels

COUNT = 10_000_000
LINE = Spans((0,), (COUNT,), (1,))
#: What a normal number exceeds with a probability of about 10^-9: more is no chance. There are some hundred tests.
LIMIT = 6.0


@lru_cache(maxsize=2)
def draws(seed: int, call: int) -> Tensor:
    """The bits of a call after a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        key = [next_key() for _ in range(call + 1)][-1]
    return torch.cat([bits(torch.arange(start, start + COUNT // 10), *key) for start in range(0, COUNT, COUNT // 10)])


def field(z: Tensor, low: int, width: int) -> Tensor:
    return z >> low & 2**width - 1


def deviation(counts: Tensor, expected: float) -> float:
    """How far counts are from what is expected of each, as a normal number: chi-square, made normal by Wilson and Hilferty."""
    free = counts.numel() - 1
    chi = float((counts.double() - expected).square().sum() / expected)
    return ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


@pytest.mark.parametrize("low", [0, 11, 24, 40, 52])
def test_bits_are_uniform(low: int) -> None:
    counts = torch.bincount(field(draws(0, 0), low, 12), minlength=2**12)
    assert abs(deviation(counts, COUNT / 2**12)) < LIMIT


@pytest.mark.parametrize("lag", [1, 2, 64, 1000, 2**20])
def test_neighbours_are_independent(lag: int) -> None:
    z = draws(0, 0)
    pairs = field(z[:-lag], 56, 6) * 64 + field(z[lag:], 58, 6)
    assert abs(deviation(torch.bincount(pairs, minlength=4096), len(pairs) / 4096)) < LIMIT
    x = z.double()
    assert abs(float(torch.corrcoef(torch.stack([x[:-lag], x[lag:]]))[0, 1])) * math.sqrt(len(pairs)) < LIMIT


@pytest.mark.parametrize(("seed", "call"), [(0, 1), (1, 0)])
def test_calls_and_seeds_are_independent(seed: int, call: int) -> None:
    one, other = draws(0, 0), draws(seed, call)
    pairs = field(one, 58, 6) * 64 + field(other, 58, 6)
    assert abs(deviation(torch.bincount(pairs, minlength=4096), COUNT / 4096)) < LIMIT
    flips = torch.stack([field(one ^ other, bit, 1).sum() for bit in (0, 31, 63)]).double()
    assert (2 * flips - COUNT).abs().max() / math.sqrt(COUNT) < LIMIT


def test_halves_collide_as_often_as_chance_has_it() -> None:
    expected = COUNT**2 / 2**33 * (1 - COUNT / 2**32 / 3)
    found = field(draws(0, 0), 17, 32).sort().values.diff().eq(0).sum()
    assert abs(int(found) - expected) / math.sqrt(expected) < LIMIT


#: Keys as no hash gives them, which a mixer has to bear all the same: few bits set, or all, or both keys alike.
PLAIN_KEYS = [(0, 0), (1, 0), (-1, -1), (2**32, 2**32), (-(2**63), 1)]
FEW = 2**17


@pytest.mark.parametrize("key", PLAIN_KEYS, ids=str)
def test_every_bit_of_an_index_changes_half_of_the_bits(key: tuple[int, int]) -> None:
    start = torch.arange(20_000) * 77
    before = bits(start.clone(), *key)
    for bit in range(0, 63, 3):
        changed = before ^ bits(start ^ 2**bit, *key)
        flips = torch.stack([field(changed, i, 1).sum() for i in range(64)]).double()
        assert (2 * flips - len(start)).abs().max() / math.sqrt(2 * len(start)) < LIMIT, bit  # pairs may count twice


@pytest.mark.parametrize("key", PLAIN_KEYS, ids=str)
def test_indices_in_strides_of_powers_of_two(key: tuple[int, int]) -> None:
    for stride in range(0, 46, 5):
        z = bits(torch.arange(FEW) << stride, *key)
        for low in range(0, 64, 8):
            counts = torch.bincount(field(z, low, 8), minlength=256)
            assert abs(deviation(counts, FEW / 256)) < LIMIT, (stride, low)
        pairs = field(z[:-1], 58, 6) * 64 + field(z[1:], 58, 6)
        assert abs(deviation(torch.bincount(pairs, minlength=4096), len(pairs) / 4096)) < LIMIT, stride


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("key", PLAIN_KEYS, ids=str)
def test_keys_that_differ_in_one_bit_are_independent(key: tuple[int, int], which: int) -> None:
    one = bits(torch.arange(FEW), *key)
    for bit in range(0, 64, 7):
        near = list(key)
        near[which] ^= 2**bit if bit < 63 else -(2**63)
        other = bits(torch.arange(FEW), *near)
        for low in (0, 29, 58):
            pairs = field(one, 58, 6) * 64 + field(other, low, 6)
            assert abs(deviation(torch.bincount(pairs, minlength=4096), FEW / 4096)) < LIMIT, (bit, low)
        flips = torch.stack([field(one ^ other, i, 1).sum() for i in range(0, 64, 3)]).double()
        assert (2 * flips - FEW).abs().max() / math.sqrt(2 * FEW) < LIMIT, bit  # under the first key, pairs may count twice


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(kind: str, *given: Any, dtype: torch.dtype = torch.float32, spans: Spans = LINE) -> Tensor:
    return fill(torch.empty(math.prod(spans.lengths), dtype=dtype), Draw(kind, given), spans, (11, 12))


def fits(x: Tensor, probability: Tensor) -> None:
    """Whether numbers, of which each probability lies below some bounds, are as evenly spread over it as chance has it."""
    counts = torch.histc(probability, 4096, 0, 1)
    assert abs(deviation(counts, x.numel() / 4096)) < LIMIT


def test_distributions() -> None:
    x = numbers("uniform", 0.0, 1.0)
    fits(x, x)
    x = numbers("uniform", -3.0, 3.0)
    fits(x, x / 6 + 0.5)
    x = numbers("normal", 1.0, 2.0)
    fits(x, torch.special.ndtr((x.double() - 1) / 2))
    few = Spans((0,), (10**6,), (1,))
    x = numbers("exponential", 2.0, spans=few)
    fits(x, torch.exp(-2 * x.double()))
    x = numbers("cauchy", 1.0, 2.0, spans=few)
    fits(x, torch.atan((x.double() - 1) / 2) / math.pi + 0.5)
    x = numbers("log_normal", 1.0, 0.5, spans=few)
    fits(x, torch.special.ndtr((x.double().log() - 1) / 0.5))
    counts = torch.bincount(numbers("geometric", 0.25, dtype=torch.int64, spans=few))[1:20]
    expected = 10**6 * 0.25 * 0.75 ** torch.arange(19).double()
    assert ((counts - expected).abs() / expected.sqrt()).max() < LIMIT
    for p in (0.3, 1e-4, 1.0, 0.0):
        found = numbers("bernoulli", p, dtype=torch.bool).sum()
        assert abs(int(found) - COUNT * p) <= LIMIT * math.sqrt(COUNT * p * (1 - p))


@pytest.mark.parametrize(("first", "last"), [(0, 9), (-5, 2**32 - 7), (0, 2**40), (-(2**62), 2**63 - 1), (-(2**63), 2**63 - 1)])
def test_integers_of_every_range(first: int, last: int) -> None:
    found = numbers("integer", first, last, dtype=torch.int64, spans=Spans((0,), (10**6,), (1,)))
    assert first <= int(found.min()) and int(found.max()) <= last
    tenths = torch.tensor([(int(x) - first) * 10 // (last - first + 1) for x in found[:20_000]])
    if last - first < 2**63:  # beyond, a part of the numbers comes twice as often
        assert abs(deviation(torch.bincount(tenths, minlength=10), len(tenths) / 10)) < LIMIT


def test_ranges_are_half_open_and_symmetric_ones_have_no_zero() -> None:
    for dtype in DIGITS:
        x = numbers("uniform", 1.0, 1.5, dtype=dtype, spans=Spans((0,), (10**6,), (1,)))
        assert x.min() >= 1 and x.max() < 1.5 and len(x.unique()) >= 2 ** min(DIGITS[dtype] - 2, 16)
        x = numbers("uniform", -2.0, 2.0, dtype=dtype, spans=Spans((0,), (10**6,), (1,)))
        assert x.abs().min() > 0 and x.abs().max() < 2
    assert numbers("uniform", 2.0, 2.0, spans=Spans((0,), (3,), (1,))).tolist() == [2, 2, 2]


@pytest.mark.parametrize("curve", [normal, exponential])
def test_curves_are_what_they_stand_for(curve: Curve) -> None:
    octaves = torch.arange(LEAST, MOST + 1).repeat_interleave(200)
    drawn = bits(torch.arange(len(octaves)), 1, 2) & 2**62 - 1 | 2**62
    probability = drawn >> MOST - octaves & -2048 | 1024
    want = torch.tensor([curve(int(p) / 2**63) for p in probability], dtype=torch.float64)
    for dtype, most in ((torch.float32, 1.3e-7), (torch.float64, 5e-8)):
        off = (evaluate(curve, probability, dtype).double() - want).abs() / want.clamp(min=1)
        assert off.max() < most
    assert want.max() > 8
    if curve is normal:
        assert abs(want.max() - NormalDist().inv_cdf(1 - 2**-53)) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_curves_have_no_zero(dtype: torch.dtype) -> None:
    for curve in (normal, exponential):
        assert 0 < evaluate(curve, torch.tensor([2**63 - 1024]), dtype) < 2.0**-23


def test_tables_are_the_same_everywhere() -> None:
    text = repr([table(curve, "cpu", torch.float64).tolist() for curve in (normal, exponential)])
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "b7f9e842939d05fd"


def test_spans_go_over_boxes() -> None:
    spans = Spans((1, 2), (3, 4), (10, 1))
    want = torch.arange(100).view(10, 10)[1:4, 2:6]
    assert torch.equal(index(spans, "cpu"), want)
    whole = numbers("normal", 0.0, 1.0, spans=Spans((0,), (100,), (1,)))
    assert torch.equal(numbers("normal", 0.0, 1.0, spans=spans), whole[want.flatten()])


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (Draw("uniform", (2.0, 1.0)), "uniform numbers from 2.0 to 1.0: give the lower bound first"),
        (Draw("normal", (0.0, -1.0)), "standard deviation of -1.0: it cannot be negative"),
        (Draw("exponential", (0.0,)), "rate of 0.0: it must be positive"),
        (Draw("geometric", (0.0,)), "probability of 0.0: it must be more than 0"),
        (Draw("bernoulli", (1.5,)), "probability of 1.5: it must be from 0 to 1"),
        (Draw("integer", (3, 2)), "integers from 3 to less than 3: there are none"),
        (Draw("cauchy", (0.0, 0.0)), "width of 0.0: it must be positive"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Draw, text: str) -> None:
    with pytest.raises(sw.OperatorError, match=text):
        recipe(draw, torch.float32)


def test_floats_are_not_drawn_as_integers() -> None:
    with pytest.raises(sw.OperatorError, match=r"normal numbers of torch.int64: they are floats"):
        recipe(Draw("normal", (0.0, 1.0)), torch.int64)


def test_the_file_of_the_gpu_kernels_is_found() -> None:
    module = triton_kernels()
    assert module is None or module.AVAILABLE
