"""Attention on one device and round a ring: values and gradients to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import DTensor


def dense(tensors: list[Tensor], **words: Any) -> list[Tensor]:
    """The value and the gradients on one device."""
    given = [x.detach().clone().requires_grad_() for x in tensors]
    out = F.scaled_dot_product_attention(*given, **words)
    (out * out.detach().cos()).sum().backward()
    return [out.detach(), *(x.grad for x in given)]  # type: ignore[misc]


def ring(tensors: list[Tensor], mesh: Any, placements: Any, **words: Any) -> list[Tensor]:
    """The same on DTensors."""
    cuts = placements if isinstance(placements[0], list) else [placements] * 3
    given = [sw.distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(tensors, cuts, strict=True)]
    out = sw.ring_attention(*given, **words)
    assert isinstance(out, DTensor)
    (out * out.detach().cos()).sum().backward()
    assert all(x.grad.placements == x.placements for x in given)
    return [out.detach().full_tensor(), *(x.grad.full_tensor() for x in given)]


def tensors(length: int, keys: int | None = None, heads: tuple[int, int] = (4, 4), dtype: Any = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, heads[0], length, 8)] + [(2, heads[1], length if keys is None else keys, 8)] * 2
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    close = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}[want[0].dtype]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=close, rtol=close)
