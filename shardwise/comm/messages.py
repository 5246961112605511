"""`Batch`: messages between ranks in one launch, described in the same way on every rank.

Whom a rank sends to, or receives from, is a *route*: a function of its place, as text that is the same on every rank.

    shift +1 wrap pp     along axis pp, one further, from the last to the first
    shift -1 end pp      one back; the first has none
    table 1,0,-1 pp      by the coordinate along pp; -1: none
    ranks 0>1,2>3        by rank; others have none
    rank 3               rank 3, for whichever rank runs it: of the others nothing is known
    nobody               none

>>> mesh = Mesh(("dp", "pp"), (2, 3), range(6), "cpu", "simulated")
>>> route("shift +1 end pp", mesh).places
(1, 2, -1, 4, 5, -1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor, dtype

from ..base.caches import memo
from ..errors import MeshError, WorldError
from ..layouts.layout import PerRank
from ..layouts.mesh import Mesh

#: The shape of what a rank receives: the same on every rank, or one for each place.
Shape = tuple[int, ...] | PerRank


class Partners(NamedTuple):
    """What a route means on a mesh: for each place of the root the other one, -1 where there is none; the axes it runs along;
    whether it is known for the rank that runs it alone."""

    places: tuple[int, ...]
    axes: tuple[str, ...]
    alone: bool = False


class Batch(NamedTuple):
    """What is sent and received together: the n-th that one rank sends to another is the n-th that this one receives from it.

    goals    for each sent tensor its route
    sources  for each received tensor its route, then its shape and dtype
    lent     whether what is sent stays as it is until all that comes was waited for, so that it need not be copied
    """

    mesh: Mesh
    goals: tuple[str, ...]
    sources: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[dtype, ...]
    lent: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which messages run."""
        return self.mesh.sorted_axes(axis for text in self.goals + self.sources for axis in route(text, self.mesh.root).axes)

    @property
    def alone(self) -> bool:
        """Whether a rank knows its own messages only."""
        return any(route(text, self.mesh.root).alone for text in self.goals + self.sources)

    def going(self, place: int) -> list[tuple[int, int]]:
        """What a place sends: which tensor, and to which place."""
        return self._at(self.goals, place)

    def coming(self, place: int) -> list[tuple[int, int]]:
        """What a place receives: which tensor, and from which place."""
        return self._at(self.sources, place)

    def _at(self, texts: tuple[str, ...], place: int) -> list[tuple[int, int]]:
        found = [(index, route(text, self.mesh.root).places[place]) for index, text in enumerate(texts)]
        return [(index, other) for index, other in found if other >= 0]

    def shape(self, index: int, place: int) -> tuple[int, ...]:
        """The shape of a received tensor at a place."""
        shape = self.shapes[index]
        return shape.at(place) if isinstance(shape, PerRank) else shape


# ── routes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@memo("routes", limit=4096)
def route(text: str, root: Mesh) -> Partners:
    """The route that a text tells on a mesh."""
    kind, _, rest = text.partition(" ")
    return _ROUTES[kind](rest, root)


def _shift(text: str, root: Mesh) -> Partners:
    by, wrap, axis = text.split(" ", 2)
    size = root.size_of(axis)
    goals = [at + int(by) for at in range(size)]
    return _along(axis, root, [goal if 0 <= goal < size else -1 if wrap == "end" else goal % size for goal in goals])


def _table(text: str, root: Mesh) -> Partners:
    numbers, axis = text.split(" ", 1)
    others = [int(number) for number in numbers.split(",") if number]
    size = root.size_of(axis)
    named = [other for other in others if other >= 0]
    if len(others) != size or any(other >= size for other in named) or len(set(named)) != len(named):
        raise MeshError(
            f"a permutation of axis {axis!r} names another coordinate once for each of its {size}, or -1 for none, got {others}"
        )
    return _along(axis, root, others)


def _along(axis: str, root: Mesh, others: list[int]) -> Partners:
    """A route by the coordinate along an axis."""
    at = root.axes.index(axis)
    goals = [others[point[at]] for point in root.coordinates]
    places = (root.peers(place, (axis,))[goal] if goal >= 0 else -1 for place, goal in enumerate(goals))
    return Partners(tuple(places), (axis,))


def _ranks(text: str, root: Mesh) -> Partners:
    words = [pair.partition(">") for pair in text.split(",") if pair]
    pairs = {int(one): int(other) for one, _, other in words}
    return Partners(tuple(_place(pairs[rank], root) if rank in pairs else -1 for rank in root.ranks), root.axes)


def _place(rank: int, root: Mesh) -> int:
    place = root.place(rank)
    if place is None:
        ranks = f"{', '.join(map(str, root.ranks[:8]))}{' …' if len(root.ranks) > 8 else ''}"
        raise MeshError(f"a message goes to or comes from rank {rank}, which mesh {root} does not have: its ranks are {ranks}")
    return place


_ROUTES: dict[str, Callable[[str, Mesh], Partners]] = {
    "shift": _shift,
    "table": _table,
    "ranks": _ranks,
    "rank": lambda text, root: Partners((_place(int(text), root),) * len(root.ranks), root.axes, alone=True),
    "nobody": lambda text, root: Partners((-1,) * len(root.ranks), ()),
}


# ── what must match ───────────────────────────────────────────────────────────────────────────────────────────────────


class Pair(NamedTuple):
    """One message: who sends which tensor, and who receives it as which; None where nobody does."""

    sender: int
    sent: int | None
    receiver: int
    received: int | None


def pairs(batch: Batch) -> Iterator[Pair]:
    """All messages of a batch, and what has no other side."""
    waiting: dict[tuple[int, int], list[int]] = {}
    places = range(len(batch.mesh.ranks))
    for place in places:
        for index, goal in batch.going(place):
            waiting.setdefault((place, goal), []).append(index)
    for place in places:
        for index, source in batch.coming(place):
            sent = waiting.get((source, place))
            yield Pair(source, sent.pop(0) if sent else None, place, index)
    for (place, goal), left in waiting.items():
        for index in left:
            yield Pair(place, index, goal, None)


def check_matched(batch: Batch, sent: Sequence[Tensor]) -> None:
    """Refuse a batch in which a message has one side only, or two that differ in dtype, if that is known here at all."""
    pair = None if batch.alone else _mismatch(batch._replace(shapes=()), tuple(x.dtype for x in sent))
    if pair is not None:
        refuse(batch, pair, [describe(x.dtype) for x in sent])


@memo("matched batches", limit=1024)
def _mismatch(batch: Batch, sent: tuple[dtype, ...]) -> Pair | None:
    for pair in pairs(batch):
        if pair.sent is None or pair.received is None or sent[pair.sent] != batch.dtypes[pair.received]:
            return pair
    return None


def check_shapes(batch: Batch, sent: Sequence[Tensor], place: int) -> None:
    """Refuse to send what another rank does not expect, as far as a place knows."""
    mine = [] if batch.alone else _sent_from(batch._replace(shapes=(), dtypes=()), place)
    for pair in mine:
        if pair.sent is not None and not fits(batch, pair, sent[pair.sent]):
            refuse(batch, pair, [describe(x.dtype, x.shape) for x in sent])


@memo("sent from", limit=1024)
def _sent_from(batch: Batch, place: int) -> tuple[Pair, ...]:
    return tuple(pair for pair in pairs(batch) if pair.sender == place)


def refuse(batch: Batch, pair: Pair, sent: list[str]) -> NoReturn:
    """Say which message has no other side, or another one."""
    ranks = batch.mesh.ranks
    sender, receiver = ranks[pair.sender], ranks[pair.receiver]
    if pair.received is None:
        other = [f"{ranks[source]}" for _, source in batch.coming(pair.receiver)]
        what = f"rank {sender} sends a {sent[pair.sent or 0]} to rank {receiver}, which does not receive it: it receives from "
    elif pair.sent is None:
        other = [f"{ranks[goal]}" for _, goal in batch.going(pair.sender)]
        what = f"rank {receiver} expects a {_expected(batch, pair)} from rank {sender}, which does not send it: it sends to "
    else:
        raise WorldError(
            f"p2p.batch: rank {sender} sends a {sent[pair.sent]} (send {pair.sent}) to rank {receiver}, which expects a "
            f"{_expected(batch, pair)} from it (receive {pair.received}); let both say the same"
        )
    tail = f"ranks {', '.join(other)}" if other else "nobody"
    raise WorldError(f"p2p.batch: {what}{tail}. Each send needs its receive on the other side, in the same order")


def fits(batch: Batch, pair: Pair, x: Tensor) -> bool:
    """Whether a tensor is what its receiver expects, if there is one."""
    index = pair.received
    return index is None or (x.dtype == batch.dtypes[index] and tuple(x.shape) == batch.shape(index, pair.receiver))


def _expected(batch: Batch, pair: Pair) -> str:
    index = pair.received or 0
    return describe(batch.dtypes[index], batch.shape(index, pair.receiver))


def describe(kind: dtype, shape: Sequence[int] | None = None) -> str:
    """A tensor of that dtype, and shape if it is known, in an error."""
    return f"{str(kind).removeprefix('torch.')}{'' if shape is None else list(shape)} tensor"
