"""Factor: how mesh axes shard one factor of a dim. A dim is an ordered product of factors, almost always one.

Values and arithmetic on sizes; knows no tensor and no layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple
from urllib.parse import unquote

from torch import SymInt

from .._torch.symbols import quotient
from ..base.caches import memo
from .mesh import Mesh, quote

#: An interval of indices: its first, and the one after its last.
Run = tuple[int, int]


class Factor(NamedTuple):
    """A factor of a dim: its size, the axes that shard it (major to minor) and the size of each shard in that order."""

    size: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first index of each shard, and at the end the size.

        >>> Factor(9, ("dp",), (2, 3, 4)).starts
        (0, 2, 5, 9)
        """
        return _starts(self.sizes)

    def interval(self, shard: int) -> Run:
        """The indices that a shard holds: its first, and the one after its last."""
        starts = _starts(self.sizes)
        return starts[shard], starts[shard + 1]

    def describe(self, mesh: Mesh) -> str:
        """`8`, `8@dp`, `16@(tp,dp)`, `9@dp{2,3,4}`."""
        if not self.axes:
            return str(self.size)
        names = self.axes[0] if len(self.axes) == 1 else f"({','.join(self.axes)})"
        default = self.sizes == default_sizes(self.size, [mesh.axis_sizes[a] for a in self.axes])
        return f"{self.size}@{names}" + ("" if default else "{" + ",".join(map(str, self.sizes)) + "}")


Dim = tuple[Factor, ...]


@memo("starts of shards", limit=8192)
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


def whole(size: int) -> Factor:
    """A factor that nothing shards."""
    return Factor(size, (), (size,))


def default_sizes(size: int, parts: Iterable[int]) -> tuple[int, ...]:
    """torch's chunks: ceiling division, axis after axis.

    >>> default_sizes(5, [4]), default_sizes(5, [2, 2])
    ((2, 2, 1, 0), (2, 1, 1, 1))
    """
    if isinstance(size, SymInt):
        count = math.prod(parts := tuple(parts))
        if size % count == 0:  # torch notes this: where it does not hold, the program is traced anew
            return (quotient(size, count),) * count
    sizes = [int(size)]
    for count in parts:
        sizes = [shard for whole_size in sizes for shard in chunks(whole_size, count)]
    return tuple(sizes)


def chunks(size: int, count: int) -> list[int]:
    """torch's chunks of one axis."""
    step = -(-size // count)
    return [max(0, min(step, size - step * i)) for i in range(count)]


def sharded(size: int, axes: Sequence[str], mesh: Mesh) -> Factor:
    """A factor sharded by `axes` into default chunks."""
    return Factor(size, tuple(axes), default_sizes(size, [mesh.axis_sizes[axis] for axis in axes]))


def shard_runs(dim: Dim, shards: Sequence[int]) -> list[Run]:
    """The intervals of a dim's indices that the given shard of each of its factors holds, ascending.

    >>> shard_runs((whole(2), Factor(4, ("tp",), (2, 2))), [0, 1])
    [(2, 4), (6, 8)]
    """
    runs = [(0, 1)]
    if len(dim) == 1:
        start, stop = dim[0].interval(shards[0])
        return [(start, stop)] if start < stop else []
    for factor, index in zip(dim, shards, strict=True):
        start, stop = factor.interval(index)
        bases = [i * factor.size for low, high in runs for i in range(low, high)] if start < stop else []
        runs = [(base + start, base + stop) for base in bases]
    return joined(runs)


def canonical(factors: Iterable[Factor]) -> Dim:
    """The one way to write a product of factors: neighbours merge wherever the product is again an interval per shard.

    >>> canonical([Factor(4, ("dp",), (2, 2)), whole(8)])
    (Factor(size=32, axes=('dp',), sizes=(16, 16)),)
    """
    factors = tuple(factors)
    if len(factors) == 1:
        return factors
    factors = sorted(factors, key=lambda factor: bool(factor.size != 1))  # a factor of size 1 commutes with the others
    if math.prod(f.size for f in factors) == 0:
        shards = math.prod(len(f.sizes) for f in factors)
        return (Factor(0, tuple(a for f in factors for a in f.axes), (0,) * shards),)
    merged: list[Factor] = []
    for factor in factors:
        if merged and (not factor.axes or max(merged[-1].sizes) <= 1):
            major = merged.pop()
            sizes = tuple(a * b for a in major.sizes for b in factor.sizes)
            factor = Factor(major.size * factor.size, major.axes + factor.axes, sizes)
        merged.append(factor)
    return tuple(merged) or (whole(1),)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Ascending intervals with neighbours joined."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


class Part(NamedTuple):
    """A factor without its size: the axes that shard it; the size of each shard where they are not the default chunks; its
    size where the dim has several factors (none for the first, which is what the others leave of the dim)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    size: int | None = None

    def factor(self, size: int, mesh: Mesh) -> Factor:
        """The factor of this part at a size."""
        return sharded(size, self.axes, mesh) if self.sizes is None else Factor(size, self.axes, self.sizes)

    @property
    def text(self) -> str:
        """`_`, `8`, `@dp`, `8@tp+dp`, `@dp:2:3:4`."""
        size, axes = "" if self.size is None else str(self.size), "+".join(map(quote, self.axes))
        sizes = "" if self.sizes is None else "".join(f":{n}" for n in self.sizes)
        return f"{size}@{axes}{sizes}" if axes else size or "_"


def read_part(text: str) -> Part:
    """The part that a text tells.

    >>> read_part("8@tp+dp"), [read_part(text).text for text in ("_", "8", "@dp:2:3:4")]
    (Part(axes=('tp', 'dp'), sizes=None, size=8), ['_', '8', '@dp:2:3:4'])
    """
    size, _, shards = text.partition("@")
    axes, *sizes = shards.split(":")
    names = tuple(map(unquote, axes.split("+"))) if axes else ()
    return Part(names, tuple(map(int, sizes)) if sizes else None, int(size) if size.isdigit() else None)


def parts_of(dim: Dim, mesh: Mesh) -> tuple[Part, ...]:
    """A dim without its size."""
    parts = []
    for position, factor in enumerate(dim):
        counts = [mesh.axis_sizes[axis] for axis in factor.axes]
        default = not factor.axes or isinstance(factor.size, SymInt) or factor.sizes == default_sizes(factor.size, counts)
        parts.append(Part(factor.axes, None if default else factor.sizes, int(factor.size) if position else None))
    return tuple(parts)


def factors_of(parts: Sequence[Part], size: int, mesh: Mesh) -> list[Factor]:
    """The factors of a dim of a size.

    >>> factors_of([read_part("_"), read_part("4@tp")], 12, Mesh(("tp",), (2,), range(2), "cpu", "simulated"))
    [Factor(size=3, axes=(), sizes=(3,)), Factor(size=4, axes=('tp',), sizes=(2, 2))]
    """
    rest = math.prod(part.size for part in parts[1:] if part.size is not None)
    first = parts[0].factor(quotient(size, rest) if rest > 1 else size, mesh)
    return [first, *(part.factor(part.size, mesh) for part in parts[1:] if part.size is not None)]


def write_parts(mesh: Mesh, dims: Iterable[Sequence[Part]], partials: Iterable[tuple[str, str]]) -> str:
    """A mesh, the parts of every dim and the axes with partial values as three words."""
    parts = ",".join("*".join(part.text for part in dim) for dim in dims)
    return f"{mesh.text} [{parts}] {','.join(f'{kind}@{quote(axis)}' for axis, kind in partials)}"


def read_parts(dims: str, partials: str) -> tuple[tuple[tuple[Part, ...], ...], tuple[tuple[str, str], ...]]:
    """The parts and the partial axes that the last two words of `write_parts` say.

    >>> read_parts("[@dp,_]", "sum@tp")
    (((Part(axes=('dp',), sizes=None, size=None),), (Part(axes=(), sizes=None, size=None),)), (('tp', 'sum'),))
    """
    parts = [tuple(map(read_part, dim.split("*"))) for dim in dims[1:-1].split(",")] if dims != "[]" else []
    words = [word.split("@") for word in partials.split(",") if word]
    return tuple(parts), tuple((unquote(axis), kind) for kind, axis in words)
