"""On a GPU: the fused operators of recurrent layers and cells, convolution and batch norm mean what they mean on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import Replicate, Shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

#: A module, the shape of its input, and the dim of the batch.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "LSTM": (lambda: nn.LSTM(8, 16, num_layers=2), (4, 5, 8), 1),
    "LSTM, batch first": (lambda: nn.LSTM(8, 16, batch_first=True, bidirectional=True), (5, 4, 8), 0),
    "GRU": (lambda: nn.GRU(8, 16), (4, 5, 8), 1),
    "RNN": (lambda: nn.RNN(8, 16), (4, 1, 8), 1),
    "LSTMCell": (lambda: nn.LSTMCell(8, 16), (5, 8), 0),
    "GRUCell": (lambda: nn.GRUCell(8, 16), (5, 8), 0),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 6, 6), 0),
    "Conv2d of groups": (lambda: nn.Conv2d(4, 4, 3, groups=4), (5, 4, 6, 6), 1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (5, 4, 6, 6), 0),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (3, 4, 6, 6), 2),
}


def flat(value: Any) -> list[Tensor]:
    return [x for item in value for x in flat(item)] if isinstance(value, tuple) else [value]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_one_device(name: str) -> None:
    make, shape, batch = MODULES[name]
    torch.manual_seed(0)
    module, x = make().cuda(), torch.randn(shape, device="cuda", requires_grad=True)
    state = {key: t.detach().clone() for key, t in module.state_dict().items()}
    want = flat(module(x))
    torch.autograd.backward(want, [out.detach().cos() for out in want])
    with sw.simulate(2):
        mesh = sw.init_mesh(dp=2, device="cuda")
        spread = sw.distribute_tensor(x.detach(), mesh, [Shard(batch)]).requires_grad_()
        placed = {key: sw.distribute_tensor(t, mesh, [Replicate()]) if t.ndim else t for key, t in state.items()}
        for key, _ in module.named_parameters():
            placed[key].requires_grad_()
        got = flat(torch.func.functional_call(module, placed, (spread,)))
        torch.autograd.backward(got, [out.detach().cos() for out in got])
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(spread.grad.full_tensor(), x.grad, atol=1e-3, rtol=1e-3)
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(placed[key].grad.full_tensor(), parameter.grad, atol=1e-3, rtol=1e-3)
