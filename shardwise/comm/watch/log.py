"""Logs of communication: `Log`, made of one `Record` for each collective, and what watches communication now.

Reads a `Communication`, writes it into every active log.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ...base.settings import Setting
from ..source_lines import caller
from .communication import Communication
from .meeting import Checks

#: Kinds of communication that users know by another name.
_NAMES = {"exchange": "p2p"}


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


def record(communication: Communication) -> None:
    """Write a communication into the active logs, unless no rank receives anything from another."""
    received = communication.received() if logs() else -1
    if received >= 0:
        kind, line = _NAMES.get(communication.kind, communication.kind), communication.line or str(caller())
        entry = Record(kind, communication.axes, received, communication.operator, line)
        for log in logs():
            log.records.append(entry)


def note(served: str, operator: str) -> None:
    """Write into the active logs that an operator without a rule was served by gathering its inputs (`fallbacks`) or by torch's
    decomposition (`decomposed`).

    >>> from shardwise import trace_comm
    >>> with trace_comm() as log:
    ...     note("fallbacks", "aten.sort")
    >>> log.fallbacks
    ['aten.sort']
    """
    for log in logs():
        getattr(log, served).append(operator)
