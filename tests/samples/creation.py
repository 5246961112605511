"""Samples for the rules of shardwise/rules/creation.py."""

from __future__ import annotations

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten


SAMPLES: dict[str, list[Sample]] = {
    "aten.empty_like": [sample(lambda x: aten.empty_like(x).zero_(), (5, 3))],
    "aten.zeros_like": [sample(aten.zeros_like, (5, 3)), sample(lambda x: aten.zeros_like(x, dtype=torch.int64), (5, 3))],
    "aten.ones_like": [sample(aten.ones_like, (5, 3))],
    "aten.full_like": [sample(lambda x: aten.full_like(x, 2.5), (5, 3))],
    "aten.new_empty": [sample(lambda x: aten.new_empty(x, [4, 2]).zero_(), (5, 3))],
    "aten.new_zeros": [
        sample(lambda x: aten.new_zeros(x, [4, 2]), (5, 3)),
        sample(lambda x: aten.new_zeros(x, [5, 3]), (5, 3)),
    ],
    "aten.new_ones": [sample(lambda x: aten.new_ones(x, [4, 2]), (5, 3))],
    "aten.new_full": [sample(lambda x: aten.new_full(x, [4, 2], 3.0), (5, 3))],
    "aten.new_empty_strided": [
        sample(lambda x: aten.new_empty_strided(x, [4, 2], [2, 1]).zero_(), (5, 3)),
        sample(lambda x: aten.new_empty_strided(x, [5, 3], [1, 5]).zero_(), (5, 3)),
    ],
    "aten._has_same_storage_numel": [
        sample(aten._has_same_storage_numel, (5, 3), (5, 3)),
        sample(aten._has_same_storage_numel, (5, 3), (3, 4)),
    ],
    "aten._new_zeros_with_same_feature_meta": [
        sample(aten._new_zeros_with_same_feature_meta, (5, 3), (5, 3)),
        sample(lambda x, y: aten._new_zeros_with_same_feature_meta(x, y, self_num_batch_dims=1), (2, 5, 3), (5, 3)),
    ],
    "aten._local_scalar_dense": [
        sample(lambda x: round(aten._local_scalar_dense(x), 4), ()),
        sample(lambda x: round(x.item(), 4), (1, 1)),
    ],
}
