"""`x[index] = value` on a DTensor: the index and the value as torch's own assignment takes them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import tracing_context

#: dtypes of indices; uint8 is one of masks.
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def as_int(index: Any) -> Any:
    """An index that stands for an integer as one: a 0-d tensor of integers, or a number of another library."""
    if isinstance(index, Tensor):
        is_int = not index.ndim and index.dtype in INTEGERS and tracing_context() is None
    else:
        is_int = isinstance(index, Integral) and not isinstance(index, bool)
    return int(index) if is_int else index


def written_at(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """`index` and `value` to write to a DTensor. An integer would select from a dim: where that is sharded, a slice of one
    keeps the dim, and with it a view to write through."""
    several = tuple(map(as_int, index)) if isinstance(index, tuple) else (as_int(index),)
    if not all(i is Ellipsis or type(i) in (int, slice) for i in several) or several.count(Ellipsis) > 1:
        return index, value
    full = by_dim(several, x.shape)
    sharded = [dim for dim, i in enumerate(full[: x.ndim]) if type(i) is int and x._layout.axes_of(dim)]
    if isinstance(value, Tensor) and value.ndim:
        value = with_dims(value, full, sharded)
    return tuple(slice(i, i + 1 or None) if dim in sharded else i for dim, i in enumerate(full)), value


def by_dim(index: tuple[Any, ...], shape: Sequence[int]) -> list[Any]:
    """For each dim what an index of integers, slices and one ellipsis says of it. Integers that are no index of their dim are
    refused: as a slice one would select nothing.

    >>> by_dim((..., 1), (2, 3))
    [slice(None, None, None), 1]
    """
    missing = len(shape) - sum(i is not Ellipsis for i in index)
    full = [i for j in index for i in ([slice(None)] * missing if j is Ellipsis else [j])]
    full += [slice(None)] * (len(shape) - len(full))
    for dim, (i, size) in enumerate(zip(full, shape, strict=False)):
        if type(i) is int and not -size <= i < size:
            raise IndexError(f"index {i} is out of bounds for dimension {dim} with size {size}")
    return full


def with_dims(value: Tensor, index: Sequence[Any], dims: Sequence[int]) -> Tensor:
    """`value` with a dim of size 1 for each of `dims`, where an integer of the index (an entry for each dim) became a slice."""
    for dim in reversed(dims):
        behind = sum(type(i) is not int for i in index[dim + 1 :])
        if value.ndim >= behind:
            inserted = sum(other > dim for other in dims)
            value = value.unsqueeze(value.ndim - behind - inserted)
    return value
