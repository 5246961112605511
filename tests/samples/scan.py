"""Samples for the scans of shardwise/rules/sorting.py; sizes are odd, and smaller than some meshes, so that shards are uneven
and empty."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from tests.helpers.one_device import Sample, sample

INTS = torch.tensor([[3, -1, 7], [7, 7, -5], [0, 2, 2], [-5, 0, 4], [7, -5, 0]])
BOOLS = INTS > 1
APART = torch.tensor([0.5, -1.5, 2.0, 0.25, -0.75, 1.25, 3.5, -2.5, 4.5, -3.0, 6.0, 5.0, -4.0, 7.0, 9.0]).view(5, 3)
HOLED = APART.clone()
HOLED[1, 1] = math.nan
#: Of equal values the last is the extreme, also one in another shard.
TIES = torch.tensor([[1.0, 3.0], [2.0, 3.0], [2.0, 1.0], [0.0, 3.0], [2.0, 1.0]])


def slope(x: Any, f: Any) -> Any:
    """The gradient of a weighted sum of running extremes."""
    leaf = x.detach().requires_grad_()
    (f(leaf, 0)[0] * torch.arange(1.0, 6.0).view(5, 1)).sum().backward()
    return leaf.grad


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
}
for name in ("cummax", "cummin"):
    f = getattr(torch, name)
    SAMPLES[f"aten.{name}"] = [
        sample(partial(f, dim=0), APART),
        sample(partial(f, dim=1), INTS),
        sample(partial(f, dim=0), TIES, partial=False),
        sample(partial(f, dim=0), HOLED, partial=False),
        sample(partial(f, dim=-1), BOOLS),
        sample(partial(f, dim=0), ()),
        sample(lambda x, f=f: f(x.flatten(), 0), (3, 4)),
        sample(lambda x, f=f: slope(x, f), TIES, partial=False),
    ]
