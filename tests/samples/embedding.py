"""Samples for the rules of shardwise/rules/embedding.py."""

from __future__ import annotations

import torch

from tests.laws import Sample, sample

aten = torch.ops.aten

words = torch.tensor([[4, 0, 1], [2, 4, 4], [0, 3, 1]])

SAMPLES: dict[str, list[Sample]] = {
    "aten.embedding": [
        sample(lambda w, i: aten.embedding(w, i, 2), (5, 3), words),
        sample(aten.embedding, (2, 3), torch.tensor(1)),
    ],
    "aten.embedding_dense_backward": [
        sample(lambda g, i: aten.embedding_dense_backward(g, i, 5, 4, False), (3, 3, 2), words),
        sample(lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, True), (3, 3, 2), words),
    ],
}
