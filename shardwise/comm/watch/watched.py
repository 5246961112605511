"""`trace_comm`, `debug_mode`, and `Watched`: the one transport around another that reports every communication to both.

Reads calls of the transport, and the calls of process groups that compiled programs make. Changes nothing of what is
communicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...base.argument_checks import flag, number, optional
from ...layouts.mesh import Mesh, group_named
from ..aliases import expected, listening, through_transport
from ..delivery import arrived
from ..transport import Transport
from .communication import COMMUNICATIONS, Communication, rows_for_each
from .debug import compare_fact, compared, current_session
from .log import Log, Watch, record, watching
from .meeting import Checks, Session


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
    with watching.set(now._replace(logs=(*now.logs, log))), listening(_overheard):
        yield log


@contextlib.contextmanager
def debug_mode(timeout: float | None = None, lines: bool = True) -> Iterator[None]:
    """Inside the block the ranks of a job compare what they are about to communicate, each time before they do: the operator,
    the group, shapes and dtype, and the line of the program. Where they differ every rank raises the same `MismatchError`,
    with what each was about to do, instead of waiting forever; and where a rank does not come any more, because it raised,
    left the block, ended or died, or because ranks wait for each other.

    `timeout` is for how many seconds a rank that lives is waited for: by default, the time-out of the job. `lines=False` lets
    ranks meet from different lines. All ranks of the job enter and leave the block together. Programs that were captured,
    compiled or loaded from a package are compared too. So are, outside of these, the values of plain tensors that operators
    take for replicated, and what random numbers are made of. A rank that adds infinities or nan up warns, once for a line: such
    sums may differ from those of one device. Not seen are the collectives that the program asks of
    torch.distributed itself, and the making of groups. A rank that skips one of several communications of the same line and
    shapes is found when it leaves the block. In a simulated world there is nothing to compare.

    >>> with debug_mode(timeout=60):
    ...     pass
    """
    optional(number, timeout, "debug_mode: timeout", 0.0)
    flag(lines, "debug_mode: lines")
    now = watching.get() or Watch()
    if now.checks is not None:
        yield  # blocks inside one another are one
        return
    checks = Checks(None if timeout is None else float(timeout), lines)
    with listening(_overheard):
        try:
            checks.session()
            with watching.set(now._replace(checks=checks)):
                yield
        except BaseException as error:
            checks.leave(error)
            raise
        checks.leave(None)


@contextlib.contextmanager
def _around(communication: Communication, session: Session | None) -> Iterator[None]:
    """Around a communication: it is written into the active logs and, with a session of debug mode, compared first."""
    record(communication)
    with contextlib.nullcontext() if session is None else compared(session, communication), through_transport.set(True):
        yield


def _overheard(
    alias: str, kind: str, detail: str, tensors: Sequence[Tensor], rows: tuple[list[int], list[int]] | None
) -> contextlib.AbstractContextManager[None]:
    """Around a collective that a program asks of a group by its alias, on whatever thread runs the program; `rows` go to and
    come from each rank of the group, where they say so."""
    if watching.get() is None:
        return contextlib.nullcontext()
    (mesh, axes), (operator, line) = group_named(alias), expected.origin
    what = Communication(kind, mesh, axes, tensors, detail, operator, line)
    if rows is not None:
        send, receive = (rows_for_each(tuple(counts), mesh, axes, tensors[0]) for counts in rows)
        what = what._replace(places=(mesh.place(dist.get_rank()) or 0,), send=send, receive=receive)
    return _around(what, current_session())


class Watched:
    """A transport around another one. What communicates is recorded and compared, then passed on; all else is the other's."""

    __slots__ = ("_operator", "_session", "_transport")

    def __init__(self, transport: Transport, operator: str, session: Session | None) -> None:
        self._transport, self._operator, self._session = transport, operator, session

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._transport, name)
        return partial(self._through, COMMUNICATIONS[name], verb) if name in COMMUNICATIONS else verb

    def _through(self, about: Callable[..., Communication], verb: Callable[..., Any], *args: Any) -> Any:
        """Watch what one of the transport's verbs is about to communicate, then let it. In debug mode, ranks that know their
        own messages only wait for them here."""
        what, session = about(*args)._replace(operator=self._operator), self._session
        if session is not None and any(map(self._transport.traced, what.tensors)):
            session = None
        with _around(what, session):
            outs = verb(*args)
        if session is None or not what.alone or self._transport.place(what.mesh) < 0:
            return outs
        return session.finish(lambda: [arrived(out) for out in outs])

    def agree(self, fact: str, mesh: Mesh, due: bool) -> None:
        """In debug mode, compare there; else as the other transport does."""
        if self._session is None:
            self._transport.agree(fact, mesh, due)
        else:
            compare_fact(self._session, fact, mesh, self._operator)
