"""Shard, Replicate, Partial: what one mesh axis does to a tensor. Values only; they know no mesh and no tensor.

Those of `torch.distributed.tensor` are taken wherever these are, and are equal to them.

>>> Shard(0), Replicate(), Partial("sum")
(Shard(0), Replicate(), Partial('sum'))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .._torch.compiler import OpaqueBaseMeta, constant_type
from ..base.argument_checks import choice, integer, integers, optional, refuse, shown
from ..errors import LayoutError

#: What `Part.text` writes of a factor.
_PART = re.compile(r"(_|\d+)?(@[^@:*+ ]+(\+[^@:*+ ]+)*(:\d+)*)?")
#: How partial values combine; "avg" is a sum scaled by the number of ranks.
KINDS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True, eq=False)
class Placement(metaclass=OpaqueBaseMeta):
    """What one mesh axis does to a tensor: one of `Shard`, `Replicate`, `Partial`."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards a dim (or the given dim)."""
        optional(integer, dim, "is_shard: dim")
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the ranks of the axis hold partial values of a reduction."""
        optional(choice, reduce_op, "is_partial: reduce_op", KINDS)
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)

    def write(self) -> str:
        """This placement as text that `read_placement` reads."""
        if isinstance(self, StridedShard):
            return f"F:{self.dim}:{self.split_factor}:{self.parts}"
        if isinstance(self, Shard):
            return f"S:{self.dim}" if self.sizes is None else f"S:{self.dim}:{','.join(map(str, self.sizes))}"
        return f"P:{self.reduce_op}" if isinstance(self, Partial) else "R"

    def __eq__(self, other: object) -> bool:
        given = taken(other)
        if given is None:
            return NotImplemented
        return type(given) is type(self) and given.write() == self.write()

    def __hash__(self) -> int:
        """As those of torch: equal placements have equal hashes."""
        if isinstance(self, Shard):
            return hash(self.dim)
        return 1 + hash(self.reduce_op) if isinstance(self, Partial) else hash(-1)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """This as code of a traced program, and what its names mean."""
        return repr(self), {type(self).__name__: type(self)}


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Shard(Placement):
    """The axis shards dim `dim`, into equal chunks or into the given `sizes`, one per rank of the axis.

    >>> Shard(1), Shard(0, sizes=(2, 3, 4))
    (Shard(1), Shard(0, sizes=(2, 3, 4)))
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            object.__setattr__(self, "dim", integer(self.dim, "Shard: dim"))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", integers(self.sizes, "Shard: sizes", 0))

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, sizes={self.sizes})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class StridedShard(Shard):
    """The axis shards dim `dim` in a way that `Shard` cannot say: a factor of the dim, or behind an axis that comes later.

    `x.placements` has them where they are needed, so that what it has can be given back to `from_local`, `distribute_tensor`
    and `redistribute`. `parts` are the factors of the dim, major to minor, with the axes that shard each; every axis that
    shards the dim carries them. Or `split_factor`, as torch's `_StridedShard`: the axis shards each of so many equal stretches.

    >>> import shardwise as sw
    >>> mesh = sw.init_mesh(tp=2)
    >>> x = sw.ones(3, 4, mesh=mesh, placements=[sw.Shard(1)]).flatten()
    >>> x.layout, x.placements, sw.layout((12,), mesh, [StridedShard(0, split_factor=3)])
    (f32[(3*4@tp)], (StridedShard(0, '_*4@tp'),), f32[(3*4@tp)])
    """

    parts: str = ""
    split_factor: int = 1

    def __init__(self, dim: int, parts: str = "", *, split_factor: int = 1) -> None:
        integer(dim, "StridedShard: dim")
        integer(split_factor, "StridedShard: split_factor", 1)
        if not isinstance(parts, str) or (parts and not all(map(_PART.fullmatch, parts.split("*")))):
            refuse("StridedShard: parts", "text as `x.placements` has it, such as '_*4@tp'", parts)
        for name, value in (("dim", dim), ("sizes", None), ("parts", parts), ("split_factor", split_factor)):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, {repr(self.parts) if self.parts else f'split_factor={self.split_factor}'})"


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(Placement):
    """Every rank of the axis holds the whole."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Partial(Placement):
    """Each rank of the axis holds a summand (or factor, or candidate): the value is their reduction by `reduce_op`.

    >>> Partial(), Partial("max")
    (Partial('sum'), Partial('max'))
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.reduce_op, str) or self.reduce_op not in KINDS:
            raise LayoutError(f"Partial(reduce_op={shown(self.reduce_op)}) is not known; use one of {', '.join(KINDS)}")

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})"


def taken(given: object) -> Placement | None:
    """A placement of ours for one of ours or of torch's; None for anything else."""
    if isinstance(given, Placement):
        return given
    peer = _PEERS.get(type(given).__name__) if type(given).__module__.startswith("torch.distributed.tensor") else None
    return None if peer is None else peer(given)


#: Ours for each placement of torch's, by its name: importing that package takes more than a second.
_PEERS: dict[str, Any] = {
    "Shard": lambda given: Shard(given.dim),
    "_StridedShard": lambda given: StridedShard(given.dim, split_factor=int(given.split_factor)),
    "Replicate": lambda given: Replicate(),
    "Partial": lambda given: Partial(given.reduce_op),
}


def read_placement(text: str) -> Placement:
    """The placement that a text tells.

    >>> [read_placement(p.write()) for p in (Shard(1, (2, 3)), StridedShard(0, "_*4@tp"), Replicate(), Partial("max"))]
    [Shard(1, sizes=(2, 3)), StridedShard(0, '_*4@tp'), Replicate(), Partial('max')]
    """
    kind, *facts = text.split(":")
    if kind == "F":
        return StridedShard(int(facts[0]), ":".join(facts[2:]), split_factor=int(facts[1]))
    if kind == "S":
        return Shard(int(facts[0]), tuple(int(n) for n in facts[1].split(",")) if len(facts) > 1 else None)
    return Partial(facts[0]) if kind == "P" else Replicate()


for _kind in (Placement, Shard, StridedShard, Replicate, Partial):
    constant_type(_kind)
