"""Samples for the rules of shardwise/rules/views.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten


def viewed(*size: int) -> object:
    return lambda x: aten.view.default(x, list(size))


def written_diagonal(x: Tensor) -> Tensor:
    """A write to the view reaches what it is a view of."""
    x = x + 0
    x.diagonal(-1).fill_(7)
    return x


PAIRS = torch.complex(torch.arange(15.0).view(5, 3), torch.arange(15.0).view(5, 3).flip(0))

SAMPLES: dict[str, list[Sample]] = {
    "aten.view.default": [
        sample(viewed(15), (5, 3)),
        sample(viewed(5, 3), (15,)),
        sample(viewed(2, 4, 3), (8, 3)),
        sample(viewed(8, 3), (2, 4, 3)),
        sample(viewed(6, 4), (4, 6)),
        sample(viewed(2, 2, 6), (4, 6)),
        sample(viewed(1, 5, 1, 3), (5, 3)),
        sample(viewed(5, 3), (1, 5, 1, 3)),
        sample(viewed(1), (1, 1)),
        sample(viewed(), (1,)),
        sample(viewed(0, 3), (3, 0)),
        sample(viewed(4, 4, 2), (8, 4)),
    ],
    "aten._unsafe_view": [sample(lambda x: aten._unsafe_view(x, [6, 4]), (3, 2, 4))],
    "aten._reshape_alias": [sample(lambda x: aten._reshape_alias(x, [6, 4], [4, 1]), (3, 2, 4))],
    "aten.view_copy.default": [sample(lambda x: aten.view_copy(x, [6, 4]), (3, 2, 4))],
    "aten.transpose.int": [sample(lambda x: aten.transpose.int(x, 0, -1), (5, 3, 2))],
    "aten.transpose_copy.int": [sample(lambda x: aten.transpose_copy.int(x, 0, 1), (5, 3))],
    "aten.t": [sample(aten.t, (5, 3)), sample(aten.t, (5,))],
    "aten.t_copy": [sample(aten.t_copy, (5, 3))],
    "aten.permute": [sample(lambda x: aten.permute(x, [2, 0, 1]), (5, 3, 2))],
    "aten.permute_copy": [sample(lambda x: aten.permute_copy(x, [-1, 0]), (5, 3))],
    "aten.unsqueeze": [sample(lambda x: aten.unsqueeze(x, -1), (5, 3)), sample(lambda x: aten.unsqueeze(x, 1), (5, 3))],
    "aten.unsqueeze_copy": [sample(lambda x: aten.unsqueeze_copy(x, 0), (5, 3))],
    "aten.squeeze.default": [
        sample(aten.squeeze.default, (1, 5, 1)),
        sample(aten.squeeze.default, (1, 1)),
        sample(aten.squeeze.default, (2, 3)),
    ],
    "aten.squeeze_copy.default": [sample(aten.squeeze_copy.default, (1, 5, 1))],
    "aten.squeeze.dim": [sample(lambda x: aten.squeeze.dim(x, 1), (5, 1)), sample(lambda x: aten.squeeze.dim(x, 0), (5, 1))],
    "aten.squeeze_copy.dim": [sample(lambda x: aten.squeeze_copy.dim(x, 1), (5, 1))],
    "aten.squeeze.dims": [sample(lambda x: aten.squeeze.dims(x, [0, 2]), (1, 5, 1))],
    "aten.squeeze_copy.dims": [sample(lambda x: aten.squeeze_copy.dims(x, [0, 2]), (1, 5, 1))],
    "aten.expand": [sample(lambda x: aten.expand(x, [4, 5, 3]), (5, 1)), sample(lambda x: aten.expand(x, [-1, 3]), (1, 3))],
    "aten.expand_copy": [sample(lambda x: aten.expand_copy(x, [4, 5, 3]), (5, 1))],
    "aten.slice.Tensor": [
        sample(lambda x: aten.slice.Tensor(x, 0, 1, 5), (7, 3)),
        sample(lambda x: aten.slice.Tensor(x, 1, -2, 100), (2, 5)),
        sample(lambda x: aten.slice.Tensor(x, 0, 1, 9, 3), (10,)),
        sample(lambda x: aten.slice.Tensor(x, 0, 3, 3), (5, 2)),
        sample(lambda x: aten.slice.Tensor(x, 0, 0, None), (5, 2)),
    ],
    "aten.slice_copy.Tensor": [sample(lambda x: aten.slice_copy.Tensor(x, 0, 1, 5), (7, 3))],
    "aten.select.int": [
        sample(lambda x: aten.select.int(x, 0, 3), (5, 3)),
        sample(lambda x: aten.select.int(x, 1, -1), (5, 3, 2)),
        sample(lambda x: aten.select.int(x, 0, 2), (4,)),
    ],
    "aten.select_copy.int": [sample(lambda x: aten.select_copy.int(x, 0, 3), (5, 3))],
    "aten.diagonal": [
        sample(written_diagonal, (5, 4), partial=False),
        sample(lambda x: aten.diagonal(x, 1, 0, 2), (5, 3, 4)),
        sample(lambda x: aten.diagonal(x), (5, 3)),
    ],
    "aten.diagonal_copy": [sample(lambda x: aten.diagonal_copy(x, -1), (5, 3))],
    "aten.diagonal_scatter": [
        sample(lambda x, y: aten.diagonal_scatter(x, y, 1), (5, 4), (3,)),
        sample(lambda x, y: aten.diagonal_scatter(x, y, -1, 0, 2), (4, 2, 3), (2, 3)),
    ],
    "aten.unfold": [sample(lambda x: x.unfold(-1, 3, 2), (3, 7)), sample(lambda x: x.unfold(0, 1, 1), ())],
    "aten.unfold_copy": [sample(lambda x: aten.unfold_copy(x, 0, 2, 1), (5, 3))],
    "aten.flip": [sample(lambda x: x.flip(0), (5, 3)), sample(lambda x: x.flip(0, -1), (5, 3, 2))],
    "aten.roll": [
        sample(lambda x: x.roll(2, 0), (5, 3)),
        sample(lambda x: x.roll((-4, 1, 5), (0, -1, 0)), (5, 3)),
        sample(lambda x: x.roll(4), (5, 3)),
    ],
    "aten.view_as_real": [sample(torch.view_as_real, PAIRS), sample(lambda x: x.imag, PAIRS)],
    "aten.view_as_real_copy": [sample(aten.view_as_real_copy, PAIRS)],
    "aten.view_as_complex": [sample(torch.view_as_complex, (5, 3, 2))],
    "aten.view_as_complex_copy": [sample(aten.view_as_complex_copy, (5, 3, 2))],
    "aten.split.Tensor": [
        sample(lambda x: aten.split.Tensor(x, 2, 0), (5, 3)),
        sample(lambda x: aten.split.Tensor(x, 2, -1), (5, 3)),
    ],
    "aten.split_with_sizes": [sample(lambda x: aten.split_with_sizes(x, [1, 4, 0], 0), (5, 3))],
    "aten.unbind.int": [sample(lambda x: aten.unbind.int(x, 1), (5, 3)), sample(lambda x: aten.unbind.int(x), (3,))],
    "aten.cat": [
        sample(lambda x, y: aten.cat([x, y], 0), (5, 3), (2, 3)),
        sample(lambda x, y: aten.cat([x, y], -1), (3, 5), (3, 4)),
        sample(lambda x, y: aten.cat([x, y, x]), (5,), (0,)),
        sample(lambda x, y: aten.cat([x, y], 1), (3, 5), (0,)),
    ],
    "aten.stack": [sample(lambda x, y: aten.stack([x, y], 1), (5, 3), (5, 3)), sample(lambda x, y: aten.stack([x, y]), (), ())],
    "aten.resize_as_": [sample(lambda x, y: aten.resize_as_(x, y), (5, 3), (5, 3), mutates=(0,))],
    "aten.set_": [sample(lambda x, y: aten.set_.source_Tensor(x, y) + 0, (5, 3), (5, 3))],
}
