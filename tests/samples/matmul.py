"""Samples for the rules of shardwise/rules/matmul.py; sizes are odd so that cuts are uneven."""

from __future__ import annotations

import torch

from tests.laws import Sample, sample

aten = torch.ops.aten

SAMPLES: dict[str, list[Sample]] = {
    "aten.mm": [sample(aten.mm, (5, 3), (3, 4)), sample(aten.mm, (1, 3), (3, 2))],
}
