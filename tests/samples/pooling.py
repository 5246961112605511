"""Samples for the rules of shardwise/rules/pooling.py; values are far apart, so that no partial sum changes an order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten


def plane(*shape: int) -> Tensor:
    """Values far apart, in no order."""
    count = math.prod(shape)
    return (torch.arange(count) * 37 % (count + 1)).view(shape) / 4


P2, P3 = plane(3, 5, 6, 4), plane(3, 2, 4, 5, 2)
U2, U3 = plane(5, 5, 4), plane(3, 4, 3, 2)


def forward(op: Any, *calls: tuple[Tensor, tuple[Any, ...]]) -> list[Sample]:
    """One sample for each plane and what follows it."""
    return [sample(lambda x, more=more: op(x, *more), x) for x, more in calls]


def backward(op: Any, *calls: tuple[Any, Tensor, tuple[Any, ...]]) -> list[Sample]:
    """A gradient and indices as the forward operator gives them; its arguments come between the input and the indices."""
    made = []
    for pool, x, more in calls:
        out = pool(x, *more)
        values, *index = out if isinstance(out, tuple) else (out,)
        made.append(sample(lambda g, y, *i, more=more: op(g, y, *more, *i), plane(*values.shape) - 3, x, *index))
    return made


def _without(op: Any) -> Callable[..., Any]:
    """A backward operator that takes none of the arguments of the forward one."""
    return lambda grad, x, size, *index: op(grad, x, *index)


TILED2, TILED3 = ([2, 2], [2, 2], [0, 0]), ([2, 2, 1], [2, 2, 1], [0, 0, 0])
OVER2, OVER3 = ([3, 2], [2, 1], [1, 1]), ([2, 2, 2], [2, 1, 2], [1, 0, 1])
GAPS2 = ([1, 2], [2, 3], [0, 0])
MAX2, MAX3 = ([1, 1], False), ([1, 1, 1], False)
AVG = (False, True, None)
AVG2, AVG3, IDX2, IDX3 = aten.avg_pool2d, aten.avg_pool3d, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices
R2, R3 = torch.rand(3, 5, 2), torch.rand(3, 2, 3)
CEIL2 = ([2, 3], [2, 3], [0, 0], [1, 1], True)


def _fractional(op: Any, *calls: Any) -> list[Sample]:
    return [sample(lambda x, r, more=more: op(x, *more, r), x, r) for x, r, more in calls]


def _fractional_backward(op: Any, pool: Any, x: Tensor, r: Tensor, more: Any) -> list[Sample]:
    values, index = pool(x, *more, r)
    return [sample(lambda g, y, i: op(g, y, *more, i), plane(*values.shape), x, index)]


def _unpool(op: Any, pool: Any, x: Tensor, more: Any) -> list[Sample]:
    return [sample(lambda v, i: op(v, i, list(x.shape[2:]), *more[1:]), *pool(x, *more))]


SAMPLES: dict[str, list[Sample]] = {
    "aten.avg_pool2d": forward(AVG2, (P2, ([2],)), (U2, (*OVER2, False, False)), (U2, (*GAPS2, True))),
    "aten.avg_pool3d": forward(AVG3, (P3, TILED3), (U3, (*OVER3, False, False))),
    "aten.avg_pool2d_backward": backward(aten.avg_pool2d_backward, (AVG2, P2, (*OVER2, *AVG)), (AVG2, U2, (*GAPS2, *AVG))),
    "aten.avg_pool3d_backward": backward(aten.avg_pool3d_backward, (AVG3, P3, (*TILED3, *AVG))),
    "aten.max_pool2d_with_indices": forward(IDX2, (P2, TILED2), (U2, OVER2), (U2, CEIL2)),
    "aten.max_pool3d_with_indices": forward(IDX3, (P3, TILED3), (U3, OVER3)),
    "aten.max_pool2d_with_indices_backward": backward(
        aten.max_pool2d_with_indices_backward, (IDX2, P2, (*OVER2, *MAX2)), (IDX2, U2, CEIL2)
    ),
    "aten.max_pool3d_with_indices_backward": backward(aten.max_pool3d_with_indices_backward, (IDX3, P3, (*TILED3, *MAX3))),
    "aten._adaptive_avg_pool2d": forward(aten._adaptive_avg_pool2d, (P2, ([2, 3],)), (U2, ([3, 1],))),
    "aten._adaptive_avg_pool3d": forward(aten._adaptive_avg_pool3d, (P3, ([2, 2, 1],)), (U3, ([1, 1, 1],))),
    "aten.adaptive_max_pool2d": forward(aten.adaptive_max_pool2d, (P2, ([2, 3],)), (U2, ([3, 1],))),
    "aten.adaptive_max_pool3d": forward(aten.adaptive_max_pool3d, (P3, ([2, 2, 1],))),
    "aten._adaptive_avg_pool2d_backward": backward(
        _without(aten._adaptive_avg_pool2d_backward), (aten._adaptive_avg_pool2d, P2, ([2, 3],))
    ),
    "aten._adaptive_avg_pool3d_backward": backward(
        _without(aten._adaptive_avg_pool3d_backward), (aten._adaptive_avg_pool3d, P3, ([2, 2, 1],))
    ),
    "aten.adaptive_max_pool2d_backward": backward(
        _without(aten.adaptive_max_pool2d_backward), (aten.adaptive_max_pool2d, P2, ([2, 3],))
    ),
    "aten.adaptive_max_pool3d_backward": backward(
        _without(aten.adaptive_max_pool3d_backward), (aten.adaptive_max_pool3d, P3, ([2, 2, 1],))
    ),
    "aten.fractional_max_pool2d": _fractional(
        aten.fractional_max_pool2d, (P2, R2, ([2, 2], [3, 2])), (U2, R2[:1], ([2, 2], [2, 2]))
    ),
    "aten.fractional_max_pool3d": _fractional(aten.fractional_max_pool3d, (P3, R3, ([2, 2, 1], [2, 3, 1]))),
    "aten.fractional_max_pool2d_backward": _fractional_backward(
        aten.fractional_max_pool2d_backward, aten.fractional_max_pool2d, P2, R2, ([2, 2], [3, 2])
    ),
    "aten.fractional_max_pool3d_backward": _fractional_backward(
        aten.fractional_max_pool3d_backward, aten.fractional_max_pool3d, P3, R3, ([2, 2, 1], [2, 3, 1])
    ),
    "aten.max_unpool2d": _unpool(aten.max_unpool2d, IDX2, P2, ([2, 2],)),
    "aten.max_unpool3d": _unpool(aten.max_unpool3d, IDX3, P3[:, :, :, :4], TILED3),
}
