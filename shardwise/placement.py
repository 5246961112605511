"""Shard, Replicate, Partial: what one mesh axis does to a tensor. Values only; they know no mesh and no tensor.

>>> Shard(0), Replicate(), Partial("sum")
(Shard(0), Replicate(), Partial('sum'))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._torch import OpaqueBaseMeta, constant_type
from .errors import LayoutError

#: How pending values combine; "avg" is a sum scaled by the number of ranks.
KINDS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Placement(metaclass=OpaqueBaseMeta):
    """What one mesh axis does to a tensor: one of `Shard`, `Replicate`, `Partial`."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this cuts a dim (or the given dim)."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same."""
        return isinstance(self, Replicate)

    def is_partial(self, kind: str | None = None) -> bool:
        """Whether a reduction over the axis is pending."""
        return isinstance(self, Partial) and kind in (None, self.kind)

    def write(self) -> str:
        """This placement as text that `read_placement` reads."""
        if isinstance(self, Shard):
            return f"S:{self.dim}" if self.sizes is None else f"S:{self.dim}:{','.join(map(str, self.sizes))}"
        return f"P:{self.kind}" if isinstance(self, Partial) else "R"

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """This as code of a traced program, and what its names mean."""
        return repr(self), {type(self).__name__: type(self)}


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """The axis cuts dim `dim`, into equal chunks or into the given `sizes`, one per rank of the axis.

    >>> Shard(1), Shard(0, sizes=(2, 3, 4))
    (Shard(1), Shard(0, sizes=(2, 3, 4)))
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise LayoutError(f"Shard(dim) takes an int, got {self.dim!r}")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, sizes={self.sizes})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole."""


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Each rank of the axis holds a summand (or factor, or candidate): the value is their reduction by `kind`.

    >>> Partial(), Partial("max")
    (Partial('sum'), Partial('max'))
    """

    kind: str = "sum"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayoutError(f"Partial({self.kind!r}) is not known; use one of {', '.join(KINDS)}")

    @property
    def reduce_op(self) -> str:
        """The name `torch.distributed.tensor` gives to `kind`."""
        return self.kind

    def __repr__(self) -> str:
        return f"Partial({self.kind!r})"


def read_placement(text: str) -> Placement:
    """The placement that a text tells.

    >>> [read_placement(p.write()) for p in (Shard(0), Shard(1, (2, 3)), Replicate(), Partial("max"))]
    [Shard(0), Shard(1, sizes=(2, 3)), Replicate(), Partial('max')]
    """
    kind, *facts = text.split(":")
    if kind == "S":
        return Shard(int(facts[0]), tuple(int(n) for n in facts[1].split(",")) if len(facts) > 1 else None)
    return Partial(facts[0]) if kind == "P" else Replicate()


for _kind in (Placement, Shard, Replicate, Partial):
    constant_type(_kind)
