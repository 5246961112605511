"""Samples for the rules of shardwise/rules/scan.py; sizes are odd, and smaller than some meshes, so that shards are uneven and
empty."""

from __future__ import annotations

import math

import torch

from tests.laws import Sample, sample

INTS = torch.tensor([[3, -1, 7], [7, 7, -5], [0, 2, 2], [-5, 0, 4], [7, -5, 0]])
BOOLS = INTS > 1
APART = torch.tensor([0.5, -1.5, 2.0, 0.25, -0.75, 1.25, 3.5, -2.5, 4.5, -3.0, 6.0, 5.0, -4.0, 7.0, 9.0]).view(5, 3)
HOLED = APART.clone()
HOLED[1, 1] = math.nan

SAMPLES: dict[str, list[Sample]] = {
    "aten.cumsum": [
        sample(lambda x: x.cumsum(0), (5, 3)),
        sample(lambda x: x.cumsum(-1), (3, 1)),
        sample(lambda x: x.cumsum(0), HOLED, partial=False),
        sample(lambda x: x.cumsum(0), BOOLS),
        sample(lambda x: x.cumsum(0, dtype=torch.int32), INTS),
        sample(lambda x: x.cumsum(1, dtype=torch.float64), (2, 3)),
        sample(lambda x: x.cumsum_(0), (5, 3), mutates=(0,)),
        sample(lambda x: x.cumsum(0), ()),
        sample(lambda x: x.flatten().cumsum(0), (3, 4)),
    ],
    "aten.cumprod": [
        sample(lambda x: x.cumprod(0), APART),
        sample(lambda x: x.cumprod(1), INTS),
        sample(lambda x: x.cumprod_(0), APART, mutates=(0,)),
    ],
    "aten.logcumsumexp": [
        sample(lambda x: x.logcumsumexp(0), (5, 3)),
        sample(lambda x: x.logcumsumexp(0), torch.tensor([-math.inf, -math.inf, 1.0, -math.inf]), partial=False),
    ],
    "aten.cummax": [sample(lambda x: x.cummax(0), APART), sample(lambda x: x.cummax(1), INTS)],
    "aten.cummin": [sample(lambda x: x.cummin(0), APART), sample(lambda x: x.cummin(1), INTS)],
    "aten.sort": [
        sample(lambda x: x.sort(0), APART),
        sample(lambda x: torch.sort(x, dim=1, descending=True, stable=True), INTS),
        sample(lambda x: x.argsort(-1), APART),
        sample(torch.msort, APART),
    ],
    "aten.topk": [sample(lambda x: x.topk(2), APART), sample(lambda x: x.topk(3, 0, largest=False), APART)],
    "aten.kthvalue": [sample(lambda x: x.kthvalue(2), APART), sample(lambda x: x.kthvalue(3, 0, True), APART)],
    "aten.median": [sample(torch.median, APART), sample(lambda x: x.median(0, keepdim=True), APART)],
    "aten.nanmedian": [sample(torch.nanmedian, APART), sample(lambda x: x.nanmedian(0), HOLED, partial=False)],
    "aten.mode": [sample(lambda x: x.mode(0), INTS), sample(lambda x: x.mode(1, True), INTS)],
}
