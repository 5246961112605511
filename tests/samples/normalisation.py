"""Samples for the rules of shardwise/rules/normalisation.py; sizes are odd so that shards are uneven."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise import DTensor
from shardwise._torch.tensors import decompositions
from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

HALF = torch.linspace(-3, 3, 15).view(5, 3).to(torch.bfloat16)
#: A row without any finite value, and one with some.
MASKED = torch.tensor([[-math.inf, -math.inf, -math.inf], [0.5, -math.inf, 1.0]])


def _softmax(name: str) -> list[Sample]:
    op = getattr(aten, name)
    return [
        sample(lambda x: op(x, 1, False), (5, 3)),
        sample(lambda x: op(x, 0, False), (3, 2, 1)),
        sample(lambda x: op(x, -1, False), HALF, atol=0.02, rtol=0.02),
        sample(lambda x: op(x, 0, False), ()),
        sample(lambda x: op(x, 1, False), MASKED, partial=False),
    ]


def _softmax_backward(name: str) -> list[Sample]:
    op, out = getattr(aten, name), torch.randn(5, 3).softmax(1)
    return [
        sample(lambda g, y: op(g, y, 1, torch.float32), (5, 3), out),
        sample(lambda g, y: op(g, y, 0, torch.float32), (5, 3), out),
    ]


def _saved(x: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    _, mean, rstd = aten.native_layer_norm(x, shape, None, None, 1e-5)
    return mean, rstd


DATA = (torch.linspace(-2, 2, 30) * 37).sin().view(5, 2, 3)
GRAD = (torch.linspace(3, -1, 30) * 23).cos().view(5, 2, 3)
WEIGHT = torch.tensor([1.5, -0.5, 0.75])
IMAGE = (torch.linspace(-2, 2, 60) * 37).sin().view(3, 4, 5)
SCALE = torch.tensor([1.5, -0.5, 0.75, 2.0])


def _group(x: Tensor, weight: Any, bias: Any) -> Any:
    return aten.native_group_norm(x, weight, bias, 3, 4, 5, 2, 1e-5)


def _group_backward(mask: list[bool]) -> Sample:
    _, mean, rstd = _group(IMAGE, SCALE, None)
    return sample(
        lambda g, x, m, r, w: aten.native_group_norm_backward(g, x, m, r, w, 3, 4, 5, 2, mask),
        IMAGE.flip(0),
        IMAGE,
        mean,
        rstd,
        SCALE,
    )


def _rms(x: Tensor, weight: Any) -> Any:
    with torch.inference_mode():  # elsewhere the CPU decomposes it before it is seen
        return aten._fused_rms_norm(x, [3], weight, 1e-5)


def _rms_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Any:
    op = aten._fused_rms_norm_backward.default
    run = op if isinstance(grad, DTensor) else decompositions[op]  # the CPU has no kernel
    return run(grad, x, [3], rstd, weight, [True, True])


def _batch_backward(train: bool, mask: list[bool], *weight: Tensor) -> Sample:
    mean, rstd = IMAGE.mean((0, 2)), IMAGE.var((0, 2), correction=0).add(1e-5).rsqrt()
    op = aten.native_batch_norm_backward
    stats = (SCALE, SCALE.abs(), mean, rstd)
    return sample(
        lambda g, x, *w: op(g, x, *(w or (None,)), *stats, train, 1e-5, mask), IMAGE.flip(0), IMAGE, *weight, atol=1e-4
    )


def _miopen(x: Tensor, *rest: Tensor) -> Any:
    op = aten.miopen_batch_norm if isinstance(x, DTensor) else aten.native_batch_norm  # which has a kernel here
    return op(x, *rest, True, 0.1, 1e-5)


SAMPLES: dict[str, list[Sample]] = {
    "aten._softmax": _softmax("_softmax"),
    "aten._log_softmax": _softmax("_log_softmax"),
    "aten._safe_softmax": [
        sample(lambda x: aten._safe_softmax(x, -1), (5, 3)),
        sample(lambda x: aten._safe_softmax(x, 1), MASKED, partial=False),
    ],
    "aten._softmax_backward_data": _softmax_backward("_softmax_backward_data"),
    "aten._log_softmax_backward_data": _softmax_backward("_log_softmax_backward_data"),
    "aten.native_layer_norm": [
        sample(lambda x, w, b: aten.native_layer_norm(x, [3], w, b, 1e-5), (5, 2, 3), WEIGHT, (3,)),
        sample(lambda x: aten.native_layer_norm(x, [2, 3], None, None, 1e-5), (5, 2, 3)),
        sample(lambda x, w: aten.native_layer_norm(x, [3], w, None, 1e-5), HALF, WEIGHT.bfloat16(), atol=0.03, rtol=0.03),
        sample(lambda x: aten.native_layer_norm(x, [3], None, None, 1e-5), (1, 3)),
    ],
    "aten.native_layer_norm_backward": [
        sample(
            lambda g, x, m, r, w, b: aten.native_layer_norm_backward(g, x, [3], m, r, w, b, [True, True, True]),
            GRAD,
            DATA,
            *_saved(DATA, [3]),
            WEIGHT,
            (3,),
            atol=1e-4,
        ),
        sample(
            lambda g, x, m, r: aten.native_layer_norm_backward(g, x, [2, 3], m, r, None, None, [True, False, False]),
            GRAD,
            DATA,
            *_saved(DATA, [2, 3]),
            atol=1e-4,
        ),
        sample(
            lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [3], m, r, w, None, [False, True, False]),
            GRAD[0, :1],
            DATA[0, :1],
            *_saved(DATA[0, :1], [3]),
            WEIGHT,
            atol=1e-4,
        ),
    ],
    "aten._fused_rms_norm": [
        sample(_rms, (5, 2, 3), WEIGHT),
        sample(lambda x: _rms(x, None), (1, 3)),
    ],
    "aten._fused_rms_norm_backward": [
        sample(_rms_backward, GRAD, DATA, DATA.square().mean(-1, keepdim=True).rsqrt(), WEIGHT, atol=1e-4),
    ],
    "aten.native_group_norm": [
        sample(_group, IMAGE, SCALE, (4,)),
        sample(lambda x: _group(x, None, None), IMAGE),
    ],
    "aten.native_group_norm_backward": [_group_backward([True] * 3), _group_backward([False, True, False])],
    "aten.native_batch_norm_backward": [
        _batch_backward(True, [True, True, True], SCALE),
        _batch_backward(False, [True, False, True]),
    ],
    "aten.miopen_batch_norm": [sample(_miopen, IMAGE, SCALE, SCALE, SCALE, SCALE.abs(), mutates=(3, 4))],
    "aten.batch_norm_stats": [],  # it is refused
}
