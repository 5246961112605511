"""Whether the program that is being traced belongs to one rank only, so that no other rank may be given it.

A traced program is the same on every rank unless a shape or a number of this rank entered it (uneven pieces). Then a cache may
keep it only under a key that names the rank's coordinate; found out too late for the key, it is not kept at all.
"""

from __future__ import annotations

from typing import Any

from .._torch import tracing_context, veto_cache


class Trace:
    """What is known of one trace: whether it is of one rank only, because of what, and whether its key says so."""

    __slots__ = ("because", "keyed", "specific")

    def __init__(self) -> None:
        self.specific = self.keyed = False
        self.because: Any = None


def current() -> Trace | None:
    """The trace that is going on, or None."""
    context = tracing_context()
    if context is None:
        return None
    if not hasattr(context, "shardwise"):
        context.shardwise = Trace()
    found: Trace = context.shardwise
    return found


def is_of_one_rank() -> bool:
    """Whether ranks may differ in the program that is traced now, in sizes or in what uses a value: what is decided by these
    might differ, too, and with it the collectives."""
    trace = current()
    return trace is not None and trace.specific


def mark_specific(because: Any) -> None:
    """Say that what is traced now, if anything, holds something of this rank, and what: a layout, or values for each rank."""
    trace = current()
    if trace is not None and not trace.specific:
        trace.specific, trace.because = True, because
        veto_cache(_is_misleading)


def _is_misleading() -> bool:
    """Whether a cache would give the traced program to other ranks, which it does not fit."""
    trace = current()
    return trace is not None and trace.specific and not trace.keyed
