"""Samples for the rules of shardwise/rules/gather_scatter.py and shardwise/rules/indexing.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

#: For dim 0 of size 5, other dims of size 3.
along = torch.tensor([[0, 4, 1], [3, 3, 2]])
#: Each row of a (5, 3) tensor is written to at most once.
once = torch.tensor([[0, 4, 1], [3, 2, 2]])
smaller = torch.tensor([[4, 0], [1, 1]])
rows = torch.tensor([3, 0, 3])
distinct = torch.tensor([3, 0, 4])
HALF = torch.tensor([True, False, True, False, True])


def at(op: Any, dim: int, *rest: Any, **words: Any) -> Any:
    """The operator along a dim."""
    return lambda x, *tensors: op(x, dim, *tensors, *rest, **words)


def slices(x: Tensor, start: int, end: int, step: int = 1) -> Tensor:
    return aten.slice_backward(aten.slice(x, 0, start, end, step), [7, 3], 0, start, end, step)


SAMPLES: dict[str, list[Sample]] = {
    "aten.gather": [
        sample(at(aten.gather, 0), (5, 3), along),
        sample(at(aten.gather, -1), (3, 5), along.T),
        sample(at(aten.gather, 0), (5, 3), smaller),
        sample(at(aten.gather, 0), torch.tensor([[True, False, True]] * 5), along),
    ],
    "aten.index_select": [
        sample(at(aten.index_select, 0), (5, 3), rows),
        sample(at(aten.index_select, 1), (2, 5), torch.tensor(4)),
        sample(at(aten.index_select, 0), (), torch.tensor([0])),
    ],
    "aten.scatter.src": [
        sample(at(aten.scatter, 0), (5, 3), once, (2, 3)),
        sample(at(aten.scatter_, 0), (5, 3), smaller[:1], (2, 3), mutates=(0,)),
    ],
    "aten.scatter.value": [
        sample(at(aten.scatter, 0, 2.5), (5, 3), along),
        sample(at(aten.scatter, 1, 2.5), (3, 5), smaller),
    ],
    "aten.scatter.reduce": [sample(at(aten.scatter, 0, reduce="multiply"), (5, 3), along, (2, 3))],
    "aten.scatter.value_reduce": [sample(at(aten.scatter, 0, 2.5, reduce="add"), (5, 3), along)],
    "aten.scatter_reduce": [
        sample(at(aten.scatter_reduce, 0, "mean"), (5, 3), along, (2, 3)),
        sample(at(aten.scatter_reduce, 0, "amax", include_self=False), (5, 3), smaller, (3, 3)),
    ],
    "aten.scatter_add": [
        sample(at(aten.scatter_add, 0), (5, 3), along, (2, 3)),
        sample(at(aten.scatter_add_, 0), (5, 3), along, (3, 4), mutates=(0,)),
    ],
    "aten.index_add": [
        sample(at(aten.index_add, 0, alpha=2), (5, 3), rows, (3, 3)),
        sample(at(aten.index_add_, 1), (2, 5), rows, (2, 3), mutates=(0,)),
        sample(at(aten.index_add_, 0), (), torch.tensor([0]), (), mutates=(0,)),
    ],
    "aten.select_scatter": [sample(lambda x, y: aten.select_scatter(x, y, 0, 2), (5, 3), (3,))],
    "aten.slice_scatter": [sample(lambda x, y: aten.slice_scatter(x, y, 1, 1, 6, 2), (5, 6), (5, 3))],
    "aten.index_copy": [
        sample(at(aten.index_copy, 0), (5, 3), distinct, (3, 3)),
        sample(at(aten.index_copy_, 0), (5, 3), distinct, (3, 3), mutates=(0,)),
    ],
    "aten.index_reduce": [sample(at(aten.index_reduce, 0, "prod"), (5, 3), rows, (3, 3))],
    "aten.index_fill": [
        sample(at(aten.index_fill, 0, 1.5), (5, 3), rows),
        sample(at(aten.index_fill, 0), (5, 3), rows, torch.tensor(2.0)),
    ],
    "aten.index.Tensor": [
        sample(lambda x, i: aten.index(x, [i]), (5, 3), torch.tensor([[0, -1, 3], [2, 2, 4]])),
        sample(lambda x, i, j: aten.index(x, [i, None, j]), (5, 2, 3), torch.tensor([[4], [1], [1]]), torch.tensor([2, -3])),
        sample(lambda x, i, j: aten.index(x, [None, i, j]), (2, 5, 3), torch.tensor([4, 0, 1]), torch.tensor(-1)),
        sample(lambda x, i: aten.index(x, [None, i]), (3, 5, 1), torch.tensor(3)),
        sample(lambda x, m: aten.index(x, [m]), (5, 3), HALF),
        sample(lambda x, m: aten.index(x, [m]), (5, 3, 2), torch.eye(5, 3).bool()),
        sample(lambda x, m: aten.index(x, [None, m]), (3, 5), HALF),
        sample(lambda x, m, i: aten.index(x, [m, i]), (5, 3), HALF, torch.tensor(2)),
    ],
    "aten._unsafe_index.Tensor": [sample(lambda x, i: aten._unsafe_index(x, [None, i]), (5, 3), torch.tensor([0, 2, 2]))],
    "aten.index_put": [
        sample(lambda x, i, v: aten.index_put(x, [i], v, True), (5, 3), torch.tensor([0, -1, 0, 3]), (4, 3)),
        sample(lambda x, i, v: aten.index_put_(x, [i], v), (5, 3), torch.tensor([0, -1, 3]), (3,), mutates=(0,)),
        sample(
            lambda x, i, j, v: aten.index_put(x, [i, None, j], v),
            *((5, 2, 3), torch.tensor([[4], [1]]), torch.tensor([2, -3]), (2, 2, 2)),
        ),
        sample(lambda x, m, v: aten.index_put_(x, [m], v), (5, 3), torch.eye(5, 3).bool(), (), mutates=(0,)),
        sample(lambda x, m, v: aten.index_put(x, [m], v, True), (5, 3), torch.eye(5)[1].bool(), (1, 3)),
        sample(lambda x, m, v: aten.index_put_(x, [m], v), (5, 3), HALF, (3, 3), mutates=(0,)),
        sample(lambda x, m, v: aten.index_put(x, [None, m], v), (3, 5), HALF, (3, 3)),
    ],
    "aten._unsafe_index_put": [
        sample(lambda x, i, v: aten._unsafe_index_put(x, [i], v, True), (5, 3), torch.tensor([0, 1, 0]), (3, 3))
    ],
    "aten._index_put_impl": [
        sample(lambda x, i, v: aten._index_put_impl_(x, [i], v, True), (5, 3), torch.tensor([0, 4, 0]), (3, 3), mutates=(0,))
    ],
    "aten.tril": [sample(aten.tril, (2, 5, 3)), sample(partial(aten.tril_, diagonal=-1), (5, 3), mutates=(0,))],
    "aten.triu": [sample(lambda x: aten.triu(x, 1), (3, 5))],
    "aten.slice_backward": [
        sample(lambda x: slices(x, 1, 6), (7, 3)),
        sample(lambda x: slices(x, -6, 100, 2), (7, 3)),
        sample(lambda g: aten.slice_backward(g, [3, 9], 1, 2, 7, 1), (3, 5)),
        sample(lambda g: aten.slice_backward(g, [7, 3], 0, 4, 4, 1), (0, 3)),
    ],
    "aten.select_backward": [
        sample(lambda g: aten.select_backward(g, [3, 5, 2], 1, 3), (3, 2)),
        sample(lambda g: aten.select_backward(g, [4], 0, -1), ()),
    ],
    "aten.diagonal_backward": [
        sample(lambda g: aten.diagonal_backward(g, [5, 3], -1, 0, 1), (3,)),
        sample(lambda g: aten.diagonal_backward(g, [4, 2, 7], 2, 0, 2), (2, 4)),
    ],
    "aten.unfold_backward": [sample(lambda g: aten.unfold_backward(g, [7, 3], 0, 3, 2), (3, 3, 3))],
    "aten.put": [
        sample(lambda x, i, v: aten.put(x, i, v), (5, 3), torch.tensor([[14, 0], [-2, 7]]), (2, 2)),
        sample(lambda x, i, v: aten.put_(x, i, v, True), (5, 3), torch.tensor([3, 3, 0]), (3,), mutates=(0,)),
    ],
    "aten.nonzero": [
        sample(aten.nonzero, torch.eye(5, 3)),
        sample(aten.nonzero, HALF),
        sample(aten.nonzero, torch.tensor(2.0)),
        sample(aten.nonzero, torch.zeros(5)),
    ],
    "aten.masked_select": [
        sample(aten.masked_select, (5, 3), torch.eye(5, 3).bool()),
        sample(aten.masked_select, (2, 5), HALF),
        sample(aten.masked_select, (), torch.tensor(True)),
    ],
    "aten.masked_scatter": [
        sample(aten.masked_scatter, (5, 3), torch.eye(5, 3).bool(), (2, 4)),
        sample(aten.masked_scatter_, (3, 5), HALF, (3, 5), mutates=(0,)),
    ],
    "aten.masked_scatter_backward": [
        sample(lambda g, m: aten.masked_scatter_backward(g, m, [2, 3]), (5, 3), torch.eye(5, 3).bool())
    ],
    "aten.as_strided_scatter": [
        sample(lambda x, y: aten.as_strided_scatter(x, y, [2, 2], [3, 2], 1), (5, 3), (2, 2)),
        sample(lambda x, y: aten.as_strided_scatter(x, y, [], [], 4), (5, 3), ()),
    ],
    "aten.equal": [
        sample(aten.equal, (5, 3), (5, 3)),
        sample(lambda x, y: aten.equal(x, x + 0 * y), (5, 3), (3,)),
        sample(aten.equal, (5, 3), (3,)),
    ],
    "aten.allclose": [sample(lambda x, y: aten.allclose(x, x + 1e-9 * y), (5, 3), (5, 3)), sample(aten.allclose, (3,), (3,))],
}
