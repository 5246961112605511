"""Samples for the rules of shardwise/rules/sorting.py; sizes are odd, and smaller than some meshes, so that shards are uneven
and empty."""

from __future__ import annotations

import torch

from tests.helpers.one_device import Sample, sample
from tests.samples.scan import APART, HOLED, INTS

LONG = torch.tensor([float((7 * i) % 41) for i in range(41)])
SORTED = torch.tensor([-2.0, -1.0, 0.0, 0.5, 0.5, 2.0, 7.0])
ROWS = SORTED[:6].view(2, 3)
SORTER = torch.tensor([2, 0, 1])

SAMPLES: dict[str, list[Sample]] = {
    "aten.sort": [
        sample(lambda x: x.sort(0), APART),
        sample(lambda x: torch.sort(x, dim=1, descending=True, stable=True), INTS),
        sample(lambda x: x.argsort(-1), APART),
        sample(torch.msort, APART),
    ],
    "aten.topk": [
        sample(lambda x: x.topk(2), APART),
        sample(lambda x: x.topk(3, 0, largest=False), APART),
        sample(lambda x: x.topk(2), LONG),
        sample(lambda x: x.topk(1, 0, False), LONG.view(41, 1)),
    ],
    "aten.kthvalue": [sample(lambda x: x.kthvalue(2), APART), sample(lambda x: x.kthvalue(3, 0, True), APART)],
    "aten.median": [
        sample(torch.median, APART),
        sample(lambda x: x.median(0, keepdim=True), APART),
        sample(lambda x: x.median(1), (5, 3, 4)),
    ],
    "aten.nanmedian": [sample(torch.nanmedian, APART), sample(lambda x: x.nanmedian(0), HOLED, partial=False)],
    "aten.mode": [sample(lambda x: x.mode(0), INTS), sample(lambda x: x.mode(1, True), INTS)],
    "aten.bucketize": [
        sample(lambda x, b: torch.bucketize(x, b), APART, SORTED, partial=False),
        sample(lambda x, b: torch.bucketize(x, b, right=True, out_int32=True), APART, SORTED, partial=False),
    ],
    "aten.searchsorted": [
        sample(torch.searchsorted, SORTED, APART, partial=False),
        sample(lambda s, v: torch.searchsorted(s, v, right=True, out_int32=True), ROWS, APART[:2, :2].clone(), partial=False),
        sample(lambda s, v, i: torch.searchsorted(s, v, sorter=i), SORTED[[1, 2, 0]], APART, SORTER, partial=False),
        sample(lambda s: torch.searchsorted(s, 0.5), SORTED, partial=False),
        sample(torch.bucketize, APART, SORTED, partial=False),
    ],
    "aten.histc": [
        sample(lambda x: x.histc(4, -2, 3), APART),
        sample(lambda x: x.histc(5), APART, partial=False),
        sample(lambda x: x.histc(3, 2, 2), torch.full((5,), 2.0)),
        sample(lambda x: x.histc(3), (0,)),
    ],
    "aten.bincount": [
        sample(torch.bincount, INTS.abs().flatten()),
        sample(lambda x, w: torch.bincount(x, w, 10), torch.tensor([1, 4, 4, 0, 2]), (5,)),
        sample(torch.bincount, torch.tensor([2]), torch.tensor([0.5], dtype=torch.float64)),
        sample(torch.bincount, torch.tensor([2, 1]), torch.tensor([3, 4])),
        sample(torch.bincount, torch.tensor([], dtype=torch.int64)),
    ],
}
