"""Samples for the rules of shardwise/rules/random.py, with parameters that leave nothing to chance (see test_random)."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

one_hot = torch.eye(5, 3).roll(1, 1) + torch.eye(5, 3).roll(3, 0)
half = torch.full((5, 3), 0.5)


def positive(op: Any) -> Any:
    """Whether all that was drawn is positive, element by element."""
    return lambda x: op(x) > 0


def in_place(name: str, *args: Any) -> list[Sample]:
    return [sample(lambda x: getattr(aten, name)(x, *args), (5, 3), mutates=(0,))]


SAMPLES: dict[str, list[Sample]] = {
    "aten.uniform": [sample(lambda x: aten.uniform(x, 2, 2), (5, 3))],
    "aten.uniform_": in_place("uniform_", 2, 2),
    "aten.exponential": [sample(positive(aten.exponential), (5, 3))],
    "aten.exponential_": [sample(positive(aten.exponential_), (5, 3))],
    "aten.cauchy": [sample(lambda x: aten.cauchy(x, 2, 1e-20), (5, 3))],
    "aten.cauchy_": in_place("cauchy_", 2, 1e-20),
    "aten.log_normal": [sample(lambda x: aten.log_normal(x, 0, 1e-20), (5, 3))],
    "aten.log_normal_": in_place("log_normal_", 0, 1e-20),
    "aten.geometric": [sample(positive(lambda x: aten.geometric(x, 0.5)), (5, 3))],
    "aten.geometric_": [sample(positive(lambda x: aten.geometric_(x, 0.5)), (5, 3))],
    "aten.random": [sample(lambda x: aten.random(x, 3, 4), (5, 3))],
    "aten.random_": in_place("random_", 3, 4),
    "aten.normal_functional": [sample(lambda x: aten.normal_functional(x, 2, 0), (5, 3))],
    "aten.normal_": in_place("normal_", 2, 0),
    "aten.bernoulli.p": [sample(lambda x: aten.bernoulli(x, 1.0), (5, 3))],
    "aten.bernoulli_.float": in_place("bernoulli_", 1.0),
    "aten.bernoulli": [sample(aten.bernoulli, one_hot.clamp(max=1), partial=False)],
    "aten.bernoulli.Tensor": [sample(aten.bernoulli, (5, 3), one_hot.clamp(max=1))],
    "aten.bernoulli_.Tensor": [sample(aten.bernoulli_, (5, 3), one_hot.clamp(max=1), mutates=(0,))],
    "aten.normal.Tensor_float": [sample(lambda mean: aten.normal(mean, 0), (5, 3))],
    "aten.normal.float_Tensor": [sample(lambda std: aten.normal(2.0, std.square() * 0), (5, 3))],
    "aten.normal.Tensor_Tensor": [sample(lambda mean, std: aten.normal(mean, std.square() * 0), (5, 3), (3,))],
    "aten.rand_like": [sample(lambda x: aten.rand_like(x, dtype=torch.float64) >= 0, (5, 3))],
    "aten.randn_like": [sample(lambda x: aten.randn_like(x).isfinite(), (5, 3))],
    "aten.randint_like": [
        sample(lambda x: aten.randint_like(x, 1, dtype=torch.int64), (5, 3)),
        sample(lambda x: aten.randint_like(x, 3, 4), (5, 3)),
    ],
    "aten.native_dropout": [
        sample(lambda x: aten.native_dropout(x, 1.0, True), (5, 3)),
        sample(lambda x: aten.native_dropout(x, 0.5, False), (5, 3)),
        sample(lambda x: aten.native_dropout(x, 0.0, None), (5, 3)),
    ],
    "aten.native_dropout_backward": [
        sample(lambda g, m: aten.native_dropout_backward(g, m, 2.0), (5, 3), one_hot.bool()),
    ],
    "aten.rrelu_with_noise": [
        sample(lambda x, n: aten.rrelu_with_noise(x, n, 0.5, 0.5, True), (5, 3), (5, 3), mutates=(1,)),
        sample(lambda x, n: aten.rrelu_with_noise(x, n), (5, 3), (5, 3)),
    ],
    "aten.rrelu_with_noise_": [
        sample(lambda x, n: aten.rrelu_with_noise_(x, n, 0.5, 0.5, True), (5, 3), (5, 3), mutates=(0, 1)),
    ],
    "aten.multinomial": [
        sample(lambda p: aten.multinomial(p, 1), torch.eye(5, 3).roll(3, 0)[[0, 3, 4]], partial=False),
        sample(lambda p: aten.multinomial(p, 4, True), torch.eye(5, 3).roll(3, 0)[[0, 3, 4]], partial=False),
    ],
    "aten.poisson": [sample(lambda x: aten.poisson(x * 0), (5, 3))],
    "aten.binomial": [sample(lambda n: aten.binomial(n, n * 0 + 1), half * 6, partial=False)],
    "aten._standard_gamma": [sample(lambda x: aten._standard_gamma(x.square() + 1) > 0, (5, 3))],
    "aten._sample_dirichlet": [sample(lambda x: aten._sample_dirichlet(x.square() + 1).sum(-1), (5, 3))],
}
