"""Samples for the rules of shardwise/rules/ring_attention.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample


def forward(causal: bool, *given: Tensor) -> Any:
    return torch.ops.shardwise.ring_attention(*given, causal, 0.5)


def backward(causal: bool, grad: Tensor, *given: Tensor) -> Any:
    return torch.ops.shardwise.ring_attention_backward(grad, *given, *forward(causal, *given), causal, 0.5)


Q, K, V, G = (2, 4, 5, 2), (2, 4, 3, 2), (2, 4, 3, 4), (2, 2, 5, 2)

SAMPLES: dict[str, list[Sample]] = {
    "shardwise.ring_attention": [
        sample(partial(forward, False), Q, K, V),
        sample(partial(forward, True), Q, G, G),
        sample(partial(forward, True), (3, 2), (3, 2), (3, 2)),
    ],
    "shardwise.ring_attention_backward": [
        sample(partial(backward, False), (2, 4, 5, 4), Q, K, V),
        sample(partial(backward, True), Q, Q, G, G),
    ],
}
