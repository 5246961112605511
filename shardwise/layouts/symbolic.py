"""Sizes that are symbols of a trace (`torch.SymInt`): what `SymbolicLayout` asks of the dims and strides of a layout.

A traced program may run for many sizes. Comparing a symbol with a number makes torch add a guard: the program is then used only
for sizes of which the comparison holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import SymInt

from .._torch.symbols import hint, known
from ..errors import Unsettled
from .factor import Dim, Factor

Dims = tuple[Dim, ...]
Stride = tuple[int, ...]


def simplified(dims: Dims, stride: Stride) -> tuple[Dims, Stride]:
    """With numbers in place of the symbols that torch knows to be these numbers."""
    return _mapped(known, dims, stride)


def at_hand(dims: Dims, stride: Stride) -> tuple[Dims, Stride]:
    """With the current values in place of symbols; adds no guard."""
    return _mapped(hint, dims, stride)


def has_symbols(dims: Dims, stride: Stride) -> bool:
    """Whether any size or stride is a symbol."""
    return any(isinstance(n, SymInt) for n in (*(n for dim in dims for f in dim for n in (f.size, *f.sizes)), *stride))


def refuse_uneven(dims: Dims) -> None:
    """Raise where shards of a symbolic size differ: which rank holds how much would be part of the program."""
    if any(isinstance(f.size, SymInt) and any(n != f.sizes[0] for n in f.sizes) for dim in dims for f in dim):
        raise Unsettled("uneven shards of a symbolic size depend on the rank: the size has to be specialised")


def guard(dims: Dims, stride: Sequence[int]) -> None:
    """Specialise: let torch guard on the current values of all symbols."""
    for size in (*(f.size for dim in dims for f in dim), *stride):
        int(size)


def _mapped(number: Callable[[int], int], dims: Dims, stride: Stride) -> tuple[Dims, Stride]:
    every = tuple(tuple(Factor(number(f.size), f.axes, tuple(map(number, f.sizes))) for f in dim) for dim in dims)
    return every, tuple(map(number, stride))
