"""Samples for the rules of shardwise/rules/embedding.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

words = torch.tensor([[4, 0, 1], [2, 4, 4], [0, 3, 1]])

indices = torch.tensor([1, 2, 4, 0, 4, 3, 2])
offsets = torch.tensor([0, 3, 3, 5])
SUM, MEAN, MAX = 0, 1, 2


def bags(operator: Any, mode: int, last: bool = False, padding: int = -1) -> Any:
    """Bags by a mode, with a weight for each sample if one is given."""
    return lambda w, i, o, s=None: operator(w, i, o, False, mode, False, s, last, padding)


def bag_gradient(mode: int, weighted: bool = False) -> Any:
    """The gradient of a table of 5 rows."""

    def call(grad: Tensor, w: Tensor, i: Tensor, o: Tensor, s: Tensor) -> Any:
        samples = s if weighted else None
        _, bag, size, largest = aten._embedding_bag(w, i, o, False, mode, False, samples, False, 3)
        found = aten._embedding_bag_backward(grad, i, o, bag, size, largest, 5, False, mode, False, samples, 3)
        if mode == MAX or weighted:  # on one device this one wants to be given more
            return found
        return found, aten._embedding_bag_dense_backward(grad, i, bag, size, largest, 5, False, mode, samples, 3)

    return call


def of_weights(grad: Tensor, w: Tensor, i: Tensor, o: Tensor) -> Any:
    bag = torch.tensor([0, 0, 0, 2, 2, 3, 3])
    return [aten._embedding_bag_per_sample_weights_backward(grad, w, i, o, bag, SUM, *padding) for padding in ([], [4])]


SAMPLES: dict[str, list[Sample]] = {
    "aten.embedding": [
        sample(lambda w, i: aten.embedding(w, i, 2), (5, 3), words),
        sample(aten.embedding, (2, 3), torch.tensor(1)),
    ],
    "aten.embedding_dense_backward": [
        sample(lambda g, i: aten.embedding_dense_backward(g, i, 5, 4, False), (3, 3, 2), words),
        sample(lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, True), (3, 3, 2), words),
    ],
    "aten._embedding_bag": [
        sample(bags(aten._embedding_bag, SUM), (5, 3), indices, offsets, (7,)),
        *(sample(bags(aten._embedding_bag, mode, padding=4), (5, 3), indices, offsets) for mode in (SUM, MEAN, MAX)),
        sample(bags(aten._embedding_bag, MEAN, last=True), (5, 3), indices, torch.tensor([0, 3, 7])),
    ],
    "aten._embedding_bag_forward_only": [
        sample(bags(aten._embedding_bag_forward_only, mode, last=True), (5, 3), indices, torch.tensor([0, 3, 7]))
        for mode in (SUM, MEAN)
    ],
    "aten._embedding_bag_backward": [
        sample(bag_gradient(SUM, True), (4, 3), (5, 3), indices, offsets, (7,)),
        *(sample(bag_gradient(mode), (4, 3), (5, 3), indices, offsets, (7,)) for mode in (SUM, MEAN, MAX)),
    ],
    "aten._embedding_bag_dense_backward": [sample(bag_gradient(SUM), (4, 3), (5, 3), indices, offsets, (7,))],
    "aten._embedding_bag_per_sample_weights_backward": [sample(of_weights, (4, 3), (5, 3), indices, offsets)],
    "aten._sparse_coo_tensor_with_dims_and_tensors": [],  # refused: tests/simulated/rules/test_embedding.py
}
