"""Samples for the rules of shardwise/rules/matmul.py; sizes are odd so that cuts are uneven."""

from __future__ import annotations

from functools import partial

import torch

from tests.laws import Sample, sample

aten = torch.ops.aten
scaled = {"beta": 0.5, "alpha": 2}


def matrices(*inputs: tuple[int, ...]) -> list[torch.Tensor]:
    """Complex values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(i, generator=generator, dtype=torch.complex64) for i in inputs]


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
}
