"""Compares a result on DTensors with the one on one device: type, shape, dtype, the shard of each rank, and the numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import tree_leaves
from ..comm import Bundle
from ..comm.simulated import shared
from ..tensor.dtensor import DTensor
from .spread import assembled, shards_of

#: How far numbers may be apart, for the largest of them.
RELATIVE = 2e-4


def difference(got: Any, want: Any, relative: float = RELATIVE) -> str | None:
    """Where two results (lists and tuples included) differ first; None where they agree.

    >>> difference(torch.ones(2), torch.zeros(2))
    'gives [1.0, 1.0], not [0.0, 0.0]'
    """
    several, wanted = tree_leaves(got), tree_leaves(want)
    if len(several) != len(wanted):
        return f"gives {len(several)} results, not {len(wanted)}"
    for number, (one, other) in enumerate(zip(several, wanted, strict=True)):
        text = _difference(one, other, relative)
        if text is not None:
            return text if len(wanted) == 1 else f"result {number} {text}"
    return None


def _difference(got: Any, want: Any, relative: float) -> str | None:
    if not isinstance(want, Tensor):
        same = got == want or (got != got and want != want)
        if isinstance(want, float | complex) and isinstance(got, int | float | complex):
            same = same or abs(got - want) <= relative * max(1.0, abs(want))
        return None if same else f"gives {got!r}, not {want!r}"
    if not isinstance(got, Tensor) or isinstance(got, Bundle):
        return f"gives a {type(got).__name__}, not a tensor"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"gives {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    want = want.detach()
    if not isinstance(got, DTensor):
        return _numbers(got.detach(), want, relative)
    for place, shard in enumerate(shards_of(got)):
        if tuple(shard.shape) != got.layout.local_shape(place):
            return f"holds {list(shard.shape)} at rank {place} of {got.layout}, not {list(got.layout.local_shape(place))}"
    common = shared(shards_of(got)) if want.layout == torch.strided else None
    if common is not None:
        return f"gives ranks {common[0]} and {common[1]} memory in common: a write on one would be one on the other"
    texts = (_numbers(whole, want, relative) for whole in assembled(got))
    return next((f"{text} ({got.layout})" for text in texts if text is not None), None)


def _numbers(got: Tensor, want: Tensor, relative: float) -> str | None:
    if want.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
    return None if close(got, want, relative) else _shown(got, want)


def close(got: Tensor, want: Tensor, relative: float = RELATIVE) -> bool:
    """Whether two tensors of one shape have the same numbers."""
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return torch.equal(got, want)
    wide = torch.complex128 if want.is_complex() else torch.float64
    relative = max(relative, 8 * torch.finfo(want.dtype).eps) if relative else 0.0
    one, other = got.to(wide), want.to(wide)
    largest = other.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if want.numel() else 0.0
    return torch.allclose(one, other, rtol=relative, atol=relative * max(1.0, largest), equal_nan=True)


def _shown(got: Tensor, want: Tensor) -> str:
    """Both values, or the element of many that differs most."""
    if want.numel() <= 8:
        return f"gives {got.tolist()}, not {want.tolist()}"
    wide = torch.complex128 if want.is_complex() else torch.float64
    apart = (got.to(wide) - want.to(wide)).abs()
    apart = torch.where(got.isnan() != want.isnan(), torch.inf, apart.nan_to_num(0.0, torch.inf))
    worst = int(apart.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)]
    one, other = got.reshape(-1)[worst].item(), want.reshape(-1)[worst].item()
    return f"gives {one} at {place}, not {other}"
