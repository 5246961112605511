"""`trace_comm`: a log of every communication; `Recorder`, a transport around another transport that writes it.

Reads what passes through the transport, gives records. Changes nothing of what passes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ...base.settings import Setting
from ...layouts.layout import PerRank
from ...layouts.mesh import Mesh, group_named
from ..aliases import listening
from ..listener import asked, expected
from ..messages import Batch
from ..simulated import Bundle
from ..source_lines import caller
from ..transport import Around, Counts, Transport
from .meeting import Checks


@dataclass(frozen=True, slots=True)
class Record:
    """One collective: what it was, over which axes, the bytes the worst rank receives, for which operator, from where.

    >>> Record("all_gather", ("tp",), 96, "aten.mm", "train.py:12").bytes
    96
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    operator: str
    source: str


@dataclass(slots=True)
class Log:
    """What was communicated while `trace_comm()` was active."""

    records: list[Record] = field(default_factory=list)
    #: Operators that were served by gathering their inputs, for want of a rule; one entry for each call.
    fallbacks: list[str] = field(default_factory=list)
    #: Operators that were served by torch's decomposition into others, for want of a rule; one entry for each call.
    decomposed: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All bytes received, on the worst rank of each collective."""
        return sum(record.bytes for record in self.records)

    def counts(self) -> dict[str, int]:
        """How many collectives of each kind.

        >>> Log([Record("all_gather", ("tp",), 96, "aten.mm", "train.py:12")]).counts()
        {'all_gather': 1}
        """
        return dict(Counter(record.kind for record in self.records))

    def __str__(self) -> str:
        head = ("kind", "axes", "bytes", "operator", "source")
        rows = [(r.kind, ",".join(r.axes), f"{r.bytes:,}", r.operator, r.source) for r in self.records]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        lines.append(f"{len(rows)} collectives, {self.bytes:,} bytes")
        lines += [f"gathered for want of a rule: {name} (x{count})" for name, count in Counter(self.fallbacks).items()]
        lines += [f"decomposed for want of a rule: {name} (x{count})" for name, count in Counter(self.decomposed).items()]
        return "\n".join(line.rstrip() for line in lines)


class Watch(NamedTuple):
    """Who watches communication now: the active logs, and what compares the ranks before each."""

    logs: tuple[Log, ...] = ()
    checks: Checks | None = None


#: One setting for all, so that a transport without any costs one look.
watching: Setting[Watch | None] = Setting("watching", None, reaches_threads=True)


def logs() -> tuple[Log, ...]:
    """The active logs."""
    watch = watching.get()
    return () if watch is None else watch.logs


@contextlib.contextmanager
def trace_comm() -> Iterator[Log]:
    """Record every communication inside the block, that of programs which were captured, compiled or loaded too. (Of simulated
    ranks such a program is one of one process, which communicates nothing.) On processes, a program whose threads communicate
    enters a first block before it starts them.

    >>> with trace_comm() as log:
    ...     pass
    >>> log.counts(), log.bytes
    ({}, 0)
    """
    log, now = Log(), watching.get() or Watch()
    with watching.set(now._replace(logs=(*now.logs, log))), listening(functools.partial(_overheard, log)):
        yield log


def note_fallback(operator: str) -> None:
    """Write into the active logs that an operator was served by gathering its inputs.

    >>> with trace_comm() as log:
    ...     note_fallback("aten.sort")
    >>> log.fallbacks
    ['aten.sort']
    """
    for log in logs():
        log.fallbacks.append(operator)


def note_decomposed(operator: str) -> None:
    """Write into the active logs that an operator was served by torch's decomposition.

    >>> with trace_comm() as log:
    ...     note_decomposed("aten.trace")
    >>> log.decomposed
    ['aten.trace']
    """
    for log in logs():
        log.decomposed.append(operator)


#: Bytes that one rank of a group of `n` receives when each holds `size` bytes, by a good algorithm.
RECEIVED: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) // n,
    "all_gather": lambda size, n: size * (n - 1),
    "reduce_scatter": lambda size, n: size * (n - 1) // n,
    "broadcast": lambda size, n: size,
    "shapes": lambda size, n: size * (n - 1),
}


@contextlib.contextmanager
def _overheard(log: Log, alias: str, kind: str, tensors: Sequence[Tensor], going: Any, coming: Any) -> Iterator[None]:
    """Write down what programs ask of a group by its alias, if this thread is one of the log's."""
    if not any(one is log for one in logs()):
        yield
        return
    name, (mesh, axes) = kind.partition("(")[0], group_named(alias)
    if coming is None:
        received = RECEIVED[name](sum(x.numel() * x.element_size() for x in tensors), _group_size(mesh, axes))
    else:
        place = mesh.place(dist.get_rank()) or 0
        rows = sum(coming) - coming[mesh.peers(place, axes).index(place)]
        received = rows * math.prod(tensors[0].shape[1:]) * tensors[0].element_size()
    operator, line = expected()
    log.records.append(Record(name, axes, received, operator, line or str(caller())))
    yield


class Recorder(Around):
    """A transport that writes what passes into the active logs, on behalf of one operator."""

    __slots__ = ("_operator",)

    def __init__(self, transport: Transport, operator: str) -> None:
        super().__init__(transport)
        self._operator = operator

    def _write(self, kind: str, axes: tuple[str, ...], received: int) -> None:
        record = Record(kind, axes, received, self._operator, str(caller()))
        for log in logs():
            log.records.append(record)

    def _count(self, kind: str, size: int, mesh: Mesh, axes: tuple[str, ...]) -> None:
        ranks = _group_size(mesh, axes)
        if ranks > 1:
            self._write(kind, axes, RECEIVED[kind](size, ranks))

    def all_reduce(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Record an all_reduce."""
        self._count("all_reduce", _size(x), mesh, axes)
        with asked.set(True):
            return self._transport.all_reduce(x, kind, mesh, axes)

    def all_gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Record an all_gather."""
        self._count("all_gather", _size(x), mesh, axes)
        with asked.set(True):
            return self._transport.all_gather(x, mesh, axes)

    def reduce_scatter(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Record a reduce_scatter."""
        self._count("reduce_scatter", _size(x), mesh, axes)
        with asked.set(True):
            return self._transport.reduce_scatter(x, kind, mesh, axes)

    def all_to_all(self, x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Record an all_to_all."""
        if _group_size(mesh, axes) > 1:
            self._write("all_to_all", axes, x.element_size() * _most_received(receive, mesh, axes))
        with asked.set(True):
            return self._transport.all_to_all(x, send, receive, mesh, axes)

    def exchange(self, sent: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """Record a batch of messages."""
        if (most := max(_received(batch, place) for place in range(len(batch.mesh.ranks)))) >= 0:
            self._write("p2p", batch.axes, most)
        with asked.set(True):
            return self._transport.exchange(sent, batch)

    def broadcast(self, x: Tensor, mesh: Mesh, source: int = 0) -> Tensor:
        """Record a broadcast."""
        self._count("broadcast", _size(x), mesh, mesh.sorted_axes(mesh.axes))
        with asked.set(True):
            return self._transport.broadcast(x, mesh, source)

    def shapes(self, x: Tensor, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Record an exchange of shapes."""
        self._count("shapes", 8 * (x.ndim + 1), mesh, mesh.root.axes)
        with asked.set(True):
            return self._transport.shapes(x, mesh)


def _group_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return len(mesh.peers(0, axes))


def _size(x: Tensor) -> int:
    """The bytes of the largest shard."""
    return x.element_size() * max(shard.numel() for shard in (x.shards if isinstance(x, Bundle) else (x,)))


def _received(batch: Batch, place: int) -> int:
    """The bytes that come to a place from others; -1 where nothing does."""
    coming = [index for index, source in batch.coming(place) if source != place]
    return sum(math.prod(batch.shape(i, place)) * batch.dtypes[i].itemsize for i in coming) if coming else -1


def _most_received(receive: tuple[int, ...] | PerRank, mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The most elements that come to any one place from the others of its group."""
    most = 0
    for place in range(len(mesh.ranks)):
        counts = receive.at(place) if isinstance(receive, PerRank) else receive
        most = max(most, sum(counts) - counts[mesh.peers(place, axes).index(place)])
    return most
