"""A small network of windows, for a world of any kind: its loss and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import Mesh, Replicate, Shard


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def loss(x: Tensor, first: Tensor, scale: Tensor, shift: Tensor, last: Tensor) -> Tensor:
    """Convolution, normalisation, maximum, convolution."""
    y = F.conv2d(x, first, padding=1)
    y = F.relu(F.batch_norm(y, None, None, scale, shift, training=True)) - 1  # below the zeros that rows outside might hold
    return F.conv2d(F.max_pool2d(y, 3, 2, 1), last, padding=1).square().mean()


def small_net(mesh: Mesh, rows: int, function: Callable[..., Any] = loss) -> None:
    """Compare the network on planes of which `rows` are sharded with the same on one device."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(2, 3, rows, 6), (4, 3, 3, 3), (4,), (4,), (5, 4, 3, 3)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    dense = [x.clone().requires_grad_() for x in tensors]
    cuts = [Shard(2), *[Replicate()] * 4]
    spread = [sw.distribute_tensor(x, mesh, [cut]).requires_grad_() for x, cut in zip(tensors, cuts, strict=True)]
    got, want = function(*spread), loss(*dense)
    close(got.full_tensor(), want, 1e-5)
    got.backward()
    want.backward()
    for x, y in zip(spread, dense, strict=True):
        close(x.grad.full_tensor(), y.grad, 1e-4)
