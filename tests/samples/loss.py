"""Samples for the rules of shardwise/rules/loss.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

NONE, MEAN, SUM = range(3)
targets = torch.tensor([4, 0, -100, 2, 4])
targets2d = torch.tensor([[[1, 0, 2]], [[2, 2, 1]], [[0, 1, 1]]])
weights = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25])
zero_to_one = torch.linspace(0.1, 0.9, 15).view(5, 3)
signs = torch.tensor([[1.0, -1, 1], [-1, -1, 1], [1, 1, 1], [-1, 1, -1], [1, -1, -1]])


def forward(op: Any, *inputs: Any, reductions: Iterable[int] = (MEAN, NONE), **words: Any) -> list[Sample]:
    """One sample for each reduction."""
    return [sample(lambda *tensors, r=r: op(*tensors, reduction=r), *inputs, **words) for r in reductions]


def backward(op: Any, *inputs: Any, **more: Any) -> list[Sample]:
    """A mean with a scalar gradient, and no reduction with a gradient of full shape."""
    return [
        sample(lambda *tensors: op(*tensors, reduction=MEAN, **more), (), *inputs),
        sample(lambda *tensors: op(*tensors, reduction=NONE, **more), (5, 3), *inputs),
    ]


def nll(op: Any, reduction: int, ignored: int = -100, weight: bool = True) -> Callable[..., Any]:
    """A call of the forward, or of the backward with the target's weight after the rest."""

    def call(*tensors: Tensor) -> Any:
        if op in (aten.nll_loss_backward, aten.nll_loss2d_backward):
            *tensors, total = tensors  # type: ignore[assignment]
            return op(*tensors, *(() if weight else (None,)), reduction, ignored, total)
        return op(*tensors, *(() if weight else (None,)), reduction, ignored)

    return call


def margin_gradient(reduction: int, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor) -> Any:
    return aten.multi_margin_loss_backward(grad, x, target, 1, 0.5, weight, reduction)


def label_gradient(reduction: int, grad: Tensor, x: Tensor, target: Tensor) -> Any:
    hit = aten.multilabel_margin_loss_forward(x, target, reduction)[1]
    return aten.multilabel_margin_loss_backward(grad, x, target, reduction, hit)


total = torch.tensor(3.5)
classes = torch.tensor([2, 0, 1, 1, 2])
labels = torch.tensor([[0, 2, -1], [1, -1, -1], [2, 1, 0], [-1, -1, -1], [0, -1, 1]])

SAMPLES: dict[str, list[Sample]] = {
    "aten.mse_loss": [
        *forward(aten.mse_loss, (5, 3), (5, 3), reductions=[SUM, NONE]),
        *forward(aten.mse_loss, (5, 3), (3,), reductions=[MEAN]),
    ],
    "aten.smooth_l1_loss": forward(aten.smooth_l1_loss, (5, 3), (5, 3)),
    "aten.huber_loss": forward(aten.huber_loss, (5, 3), (5, 3)),
    "aten.soft_margin_loss": forward(aten.soft_margin_loss, (5, 3), signs),
    "aten.binary_cross_entropy": forward(aten.binary_cross_entropy, zero_to_one, zero_to_one.flip(0), (3,)),
    "aten.binary_cross_entropy_with_logits": forward(aten.binary_cross_entropy_with_logits, (5, 3), zero_to_one, (5, 1), (3,)),
    "aten.mse_loss_backward": backward(aten.mse_loss_backward, (5, 3), (5, 3)),
    "aten.smooth_l1_loss_backward": backward(aten.smooth_l1_loss_backward, (5, 3), (5, 3), beta=0.7),
    "aten.huber_loss_backward": backward(aten.huber_loss_backward, (5, 3), (5, 3), delta=0.7),
    "aten.soft_margin_loss_backward": backward(aten.soft_margin_loss_backward, (5, 3), signs),
    "aten.binary_cross_entropy_backward": backward(
        aten.binary_cross_entropy_backward, zero_to_one, zero_to_one.flip(0), (5, 3)
    ),
    "aten.nll_loss_forward": [
        sample(nll(aten.nll_loss_forward, MEAN), (5, 5), targets, weights),
        sample(nll(aten.nll_loss_forward, NONE), (5, 5), targets, weights),
        sample(nll(aten.nll_loss_forward, MEAN, 2, weight=False), (5, 5), targets.abs() % 5),
        sample(nll(aten.nll_loss_forward, SUM, weight=False), (3,), torch.tensor(2)),
    ],
    "aten.nll_loss_backward": [
        sample(nll(aten.nll_loss_backward, MEAN), (), (5, 5), targets, weights, total),
        sample(nll(aten.nll_loss_backward, NONE, 0, weight=False), (5,), (5, 5), targets.abs() % 5, total),
    ],
    "aten.nll_loss2d_forward": [
        sample(nll(aten.nll_loss2d_forward, MEAN), (3, 3, 1, 3), targets2d, weights[:3]),
        sample(nll(aten.nll_loss2d_forward, NONE, 1, weight=False), (3, 3, 1, 3), targets2d),
    ],
    "aten.nll_loss2d_backward": [
        sample(nll(aten.nll_loss2d_backward, MEAN), (), (3, 3, 1, 3), targets2d, weights[:3], total),
        sample(nll(aten.nll_loss2d_backward, NONE, 1, weight=False), (3, 1, 3), (3, 3, 1, 3), targets2d, total),
    ],
    "aten.multi_margin_loss": [
        sample(lambda x, y, w: aten.multi_margin_loss(x, y, 1, 0.5, w, MEAN), (5, 3), classes, weights[:3]),
        sample(lambda x, y: aten.multi_margin_loss(x, y, 2, 1.0, None, NONE), (5, 3), classes),
    ],
    "aten.multilabel_margin_loss_forward": [
        sample(lambda x, y: aten.multilabel_margin_loss_forward(x, y, MEAN), (5, 3), labels),
        sample(lambda x, y: aten.multilabel_margin_loss_forward(x, y, NONE), (5, 3), labels),
    ],
    "aten.multi_margin_loss_backward": [
        sample(partial(margin_gradient, MEAN), (), (5, 3), classes, weights[:3]),
        sample(partial(margin_gradient, NONE), (5,), (5, 3), classes, weights[:3]),
        sample(partial(margin_gradient, MEAN), (), (3,), classes[:1], weights[:3]),
    ],
    "aten.multilabel_margin_loss_backward": [
        sample(partial(label_gradient, MEAN), (), (5, 3), labels),
        sample(partial(label_gradient, NONE), (5,), (5, 3), labels),
    ],
}
