"""`ShardPosition`: where in a dim a rank's shard lies, for kernels that turn global indices into local ones and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymInt, Tensor

from ..layouts.layout import Factor, Layout, Number, PerRank

#: A position that no operator takes, neither counted from the front nor from the back.
OUTSIDE = -(2**31)


class ShardPosition:
    """One dim of a layout, as kernels see it.

    `numbers` go into a kernel's extra arguments; there they are 0-d tensors of this rank's own, and go back into `local` and
    `index`. Any dim will do: sharded by several axes, unevenly, or by factors.
    """

    __slots__ = ("dim", "factors", "numbers", "size")

    def __init__(self, layout: Layout, dim: int) -> None:
        self.dim, self.factors = dim, layout.dims[dim]
        self.size = math.prod(factor.size for factor in self.factors)
        both = [(factor, values) for factor in self.factors for values in (factor.starts, factor.sizes)]
        self.numbers = tuple(by_shard(layout, factor, values, Number) for factor, values in both)

    def split(self, args: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
        """A kernel's positional arguments, and this rank's numbers, which come after them."""
        count = len(args) - len(self.numbers)
        return list(args[:count]), list(args[count:])

    def local(self, index: Tensor, numbers: Sequence[Tensor], elsewhere: int = 0) -> tuple[Tensor, Tensor]:
        """The position of each global index in this rank's shard, and which are in it.

        `elsewhere` is given for an index that another rank holds, `OUTSIDE` for one that none does: operators then raise what
        they raise on one device, and `naming` puts the index into their words.
        """
        position = index - numbers[0]
        mine = (position >= 0) & (position < numbers[1])
        if len(self.factors) > 1:
            position, mine = self._by_factor(index, numbers)
        outside = torch.where((index < 0) | (index >= self.size), OUTSIDE, elsewhere)
        return torch.where(mine, position, outside).to(index.dtype), mine

    @contextmanager
    def naming(self, index: Tensor, least: int = 0, ignored: float = math.nan) -> Iterator[None]:
        """Puts into an operator's error the index that is not from `least` to less than the global size, nor `ignored`: the
        operator knows only local positions."""
        try:
            yield
        except (IndexError, RuntimeError) as error:
            wrong = index[((index < least) | (index >= self.size)) & (index != ignored)]
            if not wrong.numel():
                raise
            text = f"index {wrong[0].item()} is out of bounds for dimension {self.dim} with size {self.size}"
            raise type(error)(text) from None

    def _by_factor(self, index: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The same for a dim of several factors: an index is a number whose digits are positions in the factors."""
        rest, position = index, torch.zeros_like(index)
        step: Tensor | int = 1
        mine = torch.ones_like(index, dtype=torch.bool)
        for i in range(len(self.factors) - 1, -1, -1):
            start, length = numbers[2 * i], numbers[2 * i + 1]
            digit = (rest if i == 0 else rest % self.factors[i].size) - start
            rest = rest // self.factors[i].size
            mine = mine & (digit >= 0) & (digit < length)
            position, step = position + digit * step, step * length
        return position, mine

    def index(self, length: int, numbers: Sequence[Tensor]) -> Tensor:
        """The global index of each of the `length` positions of this rank's shard."""
        rest = torch.arange(length, device=numbers[0].device)
        index, step = torch.zeros_like(rest), 1
        for i in range(len(self.factors) - 1, -1, -1):
            start, size = numbers[2 * i], numbers[2 * i + 1].clamp(min=1)
            index = index + ((rest if i == 0 else rest % size) + start) * step
            rest, step = rest // size, step * self.factors[i].size
        return index


def by_shard(layout: Layout, factor: Factor, values: Sequence[Any], kind: type[PerRank] = PerRank) -> Any:
    """For each rank one of `values`, by the shard of a factor that it holds."""
    return kind(lambda place: values[layout.shard(factor, place)])


def zero_rows(x: Tensor, dim: int, rows: int = 1) -> Tensor:
    """Zeros of the shape of `x`, but for the rows along a dim."""
    return x.new_zeros([rows if i == dim else n for i, n in enumerate(x.shape)])


def at_least_one(x: Tensor, dim: int) -> Tensor:
    """`x`, or a row of zeros where it has none, so that there is something to look up."""
    return x if x.shape[dim] else zero_rows(x, dim)


def keep(x: Tensor, mine: Tensor) -> Tensor:
    """`x` where it is mine, else zero."""
    return torch.where(mine, x, torch.zeros((), dtype=x.dtype, device=x.device))


def padded(x: Tensor, dim: int) -> Tensor:
    """`x` with one row more, to be written to in place of rows that other ranks hold."""
    return torch.cat([x, zero_rows(x, dim)], dim)


def reading(layout: Layout, dim: int, at: int, op: Any) -> tuple[Any, ...] | None:
    """A kernel of an operator that reads the rows of its first argument that indices name, which are argument `at`: those that
    this rank holds, and zeros for the others. None where the dim of the rows is not sharded."""
    if dim >= layout.ndim or not layout.axes_of(dim):
        return None
    shard = ShardPosition(layout, dim)

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        (x, *given), numbers = shard.split(args)
        index = given[at - 1]
        given[at - 1], mine = shard.local(index, numbers)
        with shard.naming(index):
            rows: Tensor = op(at_least_one(x, dim), *given, **kwargs)
        return keep(rows, mine[(..., *[None] * (rows.ndim - dim - mine.ndim))])

    return kernel, *shard.numbers


def indices(start: Any, end: Any, step: int, size: Any) -> tuple[Any, Any, int]:
    """Where a slice of a dim begins and ends; of a symbolic size only what the slice says is found out."""
    if not isinstance(size, SymInt):
        return slice(start, end, step).indices(size)

    def clipped(index: Any) -> Any:
        index = index + size if index < 0 else index
        return 0 if index < 0 else size if index > size else index

    first = 0 if start is None or (type(start) is int and start == 0) else clipped(start)
    return first, size if end is None or (type(end) is int and end >= sys.maxsize) else clipped(end), step
