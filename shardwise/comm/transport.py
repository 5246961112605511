"""The transport: the one narrow interface through which every communication and every per-rank step goes.

A *local value* is what a rank holds: an ordinary tensor behind real process groups (a shape without data where the rank is
not in the mesh), a bundle of one tensor per place in a simulated world. Nothing outside this package knows which. `axes` are
always given in the order of the root mesh; a group's ranks are ordered by `mesh.peers(place, axes)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import LayoutError, OperatorError, WorldError
from ..layouts.layout import PerRank
from ..layouts.mesh import Mesh
from .messages import Batch

#: Elements for each of a group, in group order; they may differ from rank to rank.
Counts = tuple[int, ...] | PerRank


class Assumed(NamedTuple):
    """A call of `from_local` to check: its line, a tensor of the given shape, and the shape it should have on each rank."""

    line: str
    given: Tensor
    shape: PerRank


class Transport(Protocol):
    """All communication, and all that depends on the rank. Every method is collective over the mesh: all its ranks call it, in
    the same order. A rank that is not in the mesh may call it: it communicates nothing, and its result has the shape of the
    first place's."""

    #: Whether the shards of all ranks are in this process.
    holds_all: bool

    def ready(self, mesh: Mesh) -> None:
        """Make whatever communication on the mesh needs, since a graph from a compile cache runs where nothing was traced."""
        return None  # a world may have nothing to make, and no one to ask or to tell

    def traced(self, x: Tensor) -> bool:
        """Whether a local value only stands for what a program will compute that is traced here and runs on every rank."""

    def place(self, mesh: Mesh) -> int:
        """Where this rank stands in the mesh, -1 if it is not in it; 0 where all ranks are in this process."""

    def all_reduce(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce over the group by kind (sum, max, min, product, band, bor, bxor); a new tensor."""

    def all_gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Concatenate along dim 0, in group order; x has one shape on all ranks of the group and at least one dim."""

    def reduce_scatter(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce, and keep this rank's equal chunk of dim 0, in group order."""

    def all_to_all(self, x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """x is 1-D: `send[i]` elements go to the i-th of the group, `receive[i]` come from it; a 1-D result."""

    def exchange(self, sent: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """The tensors that a rank receives in a batch of messages (zeros where nobody sends to it); they may still be on their
        way, and have to be waited for."""

    def broadcast(self, x: Tensor, mesh: Mesh, source: int = 0) -> Tensor:
        """The value of the rank at coordinate `source` of every axis of the mesh, on all ranks along these axes."""

    def each(self, function: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """`function(*args)` on every rank, local values and `PerRank` arguments (also inside lists and tuples) replaced
        by that rank's own; gives a local value, or a tuple of them, as the function does. No communication."""

    def number(self, value: PerRank, mesh: Mesh) -> Tensor:
        """A 0-d int64 local value from one int per place (an offset, say): no rank's int enters a traced graph."""

    def replicate(self, tensor: Tensor, mesh: Mesh) -> Tensor:
        """An ordinary tensor, equal on every rank, as a local value. It may share memory: not to be written to."""

    def plain(self, x: Tensor) -> Tensor:
        """A local value that is equal on every rank, as an ordinary tensor; an error on a rank that holds nothing."""

    def own(self, x: Tensor, mesh: Mesh, shape: PerRank) -> Tensor:
        """A rank's own tensor, of the given shape, as a local value; that of a rank outside the mesh is left out."""

    def reseat(self, x: Tensor, have: Mesh, want: Mesh, shape: PerRank) -> Tensor:
        """A local value on the mesh `have` as one on the mesh `want`: a rank in both keeps what it holds, a rank new in `want`
        gets uninitialised memory of `shape`. No communication."""

    def shapes(self, x: Tensor, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """The local shape at every place of the root mesh (communicates where ranks are processes); nothing on a rank outside
        the mesh, which no one tells. An error where dtypes, devices or requires_grad differ."""

    def assume(self, x: Tensor, mesh: Mesh, shape: PerRank) -> None:
        """Assume that the local tensor of each rank has the given shape: checked here where that takes no communication, else
        with the next communication on the mesh (`assumed`), once for each line of the program."""

    def assumed(self, mesh: Mesh) -> list[Assumed]:
        """What was assumed of this mesh and is not checked yet; from now on it counts as checked."""

    def agree(self, fact: str, mesh: Mesh, due: bool) -> None:
        """Have the ranks compare something that must be the same on all, and raise on all if it is not; what is not `due`, only
        in debug mode."""
        return None

    def report(self, error: Exception, mesh: Mesh, where: str, alone: bool = False) -> None:
        """Report an error that perhaps this rank alone raises, so that ranks that wait for it raise as well; `alone`: surely
        this rank alone."""
        return None


# ── what every world checks alike ─────────────────────────────────────────────────────────────────────────────────────


def check_chunks(rows: int, parts: int, axes: tuple[str, ...]) -> None:
    """Refuse a reduce_scatter whose dim 0 does not fall into equal chunks."""
    if rows % parts:
        raise OperatorError(
            f"reduce_scatter over axes {axes}: dim 0 has {rows} rows, which {parts} ranks cannot share equally; pad it first"
        )


class Fact(NamedTuple):
    """The facts of a local tensor in which ranks must agree, and its shape."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool

    @staticmethod
    def of(x: Tensor) -> Fact:
        """The facts of a tensor."""
        return Fact(tuple(x.shape), str(x.dtype), x.device.type, x.requires_grad)


def alike(facts: Sequence[Fact], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """The shapes, if the ranks agree on all else.

    >>> mesh = Mesh(("tp",), (2,), range(2), "cpu", "simulated")
    >>> alike([Fact((2, 3), "torch.float32", "cpu", False), Fact((1, 3), "torch.float32", "cpu", False)], mesh)
    ((2, 3), (1, 3))
    """
    first = facts[0]
    for name in ("number of dims", "dtype", "device", "requires_grad"):
        values = [len(fact.shape) if name == "number of dims" else getattr(fact, name) for fact in facts]
        for rank, value in zip(mesh.ranks, values, strict=True):
            if value != values[0]:
                raise WorldError(
                    f"from_local: the local tensors differ in {name}: {values[0]} on rank {mesh.ranks[0]} (shape "
                    f"{list(first.shape)}), {value} on rank {rank}; give the same on every rank"
                )
    return tuple(fact.shape for fact in facts)


def check_shards(shapes: Sequence[Sequence[int]], shape: PerRank, mesh: Mesh, line: str = "") -> None:
    """Refuse local tensors whose shapes are not those that were assumed."""
    if any(tuple(have) != tuple(shape.at(place)) for place, have in enumerate(shapes)):
        listed = ", ".join(f"{list(have)} on rank {rank}" for rank, have in zip(mesh.ranks, shapes, strict=True))
        raise LayoutError(
            f"from_local{line and f' at {line}'}: local tensors are not equal shards, nor those of the given shape: {listed}; "
            "give run_check=True, which asks the ranks for their shapes, or the size of each shard, as in "
            "Shard(0, sizes=(1, 3)), or the shape of the whole (shape=) where they are its chunks"
        )
