"""Samples for the rules of shardwise/rules/matmul.py; sizes are odd so that shards are uneven."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten
scaled = {"beta": 0.5, "alpha": 2}


def matrices(*inputs: tuple[int, ...]) -> list[torch.Tensor]:
    """Complex values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(i, generator=generator, dtype=torch.complex64) for i in inputs]


def grouped(transpose: bool = False) -> Any:
    """A grouped product; of columns where `transpose`."""
    return lambda x, w, o: aten._grouped_mm(x.t() if transpose else x, w, o)


def bytes_(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)

SAMPLES: dict[str, list[Sample]] = {
    "aten.mm": [sample(aten.mm, (5, 3), (3, 4)), sample(aten.mm, (1, 3), (3, 2)), sample(aten.mm, (2, 0), (0, 3))],
    "aten.bmm": [sample(aten.bmm, (3, 2, 5), (3, 5, 3)), sample(aten.bmm, (1, 3, 1), (1, 1, 2))],
    "aten.mv": [sample(aten.mv, (5, 3), (3,)), sample(aten.mv, (1, 7), (7,))],
    "aten.dot": [sample(aten.dot, (5,), (5,)), sample(aten.dot, (1,), (1,))],
    "aten.vdot": [sample(aten.vdot, (5,), (5,)), sample(aten.vdot, *matrices((3,), (3,)))],
    "aten.addmm": [
        sample(partial(aten.addmm, **scaled), (4,), (5, 3), (3, 4)),
        sample(partial(aten.addmm, beta=0), (5, 1), (5, 1), (1, 4)),
        sample(partial(aten.addmm_, **scaled), (5, 4), (5, 3), (3, 4), mutates=(0,)),
    ],
    "aten.baddbmm": [
        sample(aten.baddbmm, (3, 2, 5), (3, 2, 1), (3, 1, 5)),
        sample(partial(aten.baddbmm, **scaled), (2, 1), (3, 2, 3), (3, 3, 5)),
    ],
    "aten.addbmm": [
        sample(aten.addbmm, (2, 5), (3, 2, 3), (3, 3, 5)),
        sample(partial(aten.addbmm, **scaled), (5,), (3, 2, 1), (3, 1, 5)),
    ],
    "aten.addmv": [
        sample(partial(aten.addmv, **scaled), (1,), (5, 3), (3,)),
        sample(partial(aten.addmv_, **scaled), (5,), (5, 3), (3,), mutates=(0,)),
    ],
    "aten.addr": [
        sample(aten.addr, (5, 3), (5,), (3,)),
        sample(partial(aten.addr, **scaled), (3,), (5,), (3,)),
    ],
    "aten._int_mm": [sample(aten._int_mm, bytes_(5, 3), bytes_(3, 4))],
    "aten._grouped_mm": [
        sample(grouped(), (7, 8), (4, 8, 4), ends),
        sample(lambda x, w, o: aten._grouped_mm(x, w, o)[:5], (7, 4), (3, 4, 4), ends[:3]),
        sample(grouped(), (4, 4, 8), (8, 8), torch.tensor([2, 2, 5, 8], dtype=torch.int32)),
        sample(grouped(transpose=True), (7, 4), (7, 8), ends),
        sample(aten._grouped_mm, (3, 5, 4), (3, 4, 4)),
    ],
    "shardwise.grouped_mm": [
        sample(torch.ops.shardwise.grouped_mm, (7, 3), (4, 3, 5), ends),
        sample(torch.ops.shardwise.grouped_mm, (4, 5, 3), (3, 7), ends),
        sample(torch.ops.shardwise.grouped_mm, (5, 7), (7, 3), ends),
        sample(torch.ops.shardwise.grouped_mm, (3, 5, 7), (3, 7, 1)),
    ],
}
