"""Samples for the rules of shardwise/rules/recurrent.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

#: Not reversed, no packed batch, an LSTM of hidden size 3, one layer, with biases, one direction, time first, in training.
WORDS = (False, [], 2, 3, 1, True, False, False, True)


def _layer(*tensors: Tensor) -> Any:
    return aten.mkldnn_rnn_layer(*tensors, *WORDS)[:3]  # what the last one holds is no tensor to compare


def _layer_backward(*tensors: Tensor) -> Any:
    """Forward and backward, since only a rank itself can read what it kept."""
    *inputs, grad, grad_h, grad_c = tensors
    out, h, c, kept = aten.mkldnn_rnn_layer(*inputs, *WORDS)
    words = (False, 2, 3, 1, True, True, False, [], False)
    return aten.mkldnn_rnn_layer_backward(*inputs, out, h, c, grad, grad_h, grad_c, *words, kept)


LAYER = ((2, 5, 4), (12, 4), (12, 3), (12,), (12,), (5, 3), (5, 3))


SAMPLES: dict[str, list[Sample]] = {
    "aten.mkldnn_rnn_layer": [sample(_layer, *LAYER)],
    "aten.mkldnn_rnn_layer_backward": [sample(_layer_backward, *LAYER, (2, 5, 3), (5, 3), (5, 3), atol=1e-4)],
    # no kernel on a CPU; tests/gpu/test_recurrent.py has modules that reach them
    "aten._thnn_fused_lstm_cell": [],
    "aten._thnn_fused_lstm_cell_backward_impl": [],
    "aten._thnn_fused_gru_cell": [],
    "aten._thnn_fused_gru_cell_backward": [],
    "aten._cudnn_rnn": [],
    "aten._cudnn_rnn_backward": [],
}
