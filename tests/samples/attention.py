"""Samples for the rules of shardwise/rules/attention.py.

The operators of CUDA do not run here: tests/simulated/rules/test_attention.py checks their shapes, tests/gpu their values.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

forward = aten._scaled_dot_product_flash_attention_for_cpu
backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
mask = torch.ones(3, 5).tril(1).where(torch.ones(3, 5).tril(1) > 0, -torch.inf)


def masked(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    return forward(q, k, v, attn_mask=m, scale=0.5)


def gradients(causal: bool, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out, lse = forward(q, k, v, is_causal=causal)
    return backward(grad, q, k, v, out, lse, 0.0, causal)


def masked_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    out, lse = forward(q, k, v, attn_mask=m)
    return backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=m)


Q, K = (2, 3, 3, 2), (2, 3, 5, 2)

SAMPLES: dict[str, list[Sample]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": [
        sample(partial(forward, is_causal=True), Q, K, K),
        sample(masked, Q, K, K, mask),
        sample(forward, (1, 6, 3, 2), (1, 3, 5, 2), (1, 3, 5, 2)),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": [
        sample(partial(gradients, True), Q, Q, K, K),
        sample(masked_gradients, Q, Q, K, K, (1, 3, 3, 5)),
        sample(partial(gradients, False), (1, 4, 2, 2), (1, 4, 2, 2), (1, 1, 5, 2), (1, 1, 5, 2)),
    ],
}
ON_CUDA = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
SAMPLES |= {f"aten._scaled_dot_product_{name}{end}": [] for name in ON_CUDA for end in ("", "_backward")}
SAMPLES["aten._nested_tensor_from_mask"] = []  # refused: tests/simulated/rules/test_embedding.py
