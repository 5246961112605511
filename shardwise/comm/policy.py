"""`communication`: whether operators may communicate on their own account, and `check`, which asks.

Reads a size and a description, gives nothing, or a warning, or an error that every rank raises alike.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..base.argument_checks import choice, integer
from ..base.settings import Setting
from ..errors import CommunicationError
from .source_lines import Line, caller

MODES = ("auto", "warn", "forbid")


@dataclass(frozen=True, slots=True)
class CommunicationPolicy:
    """What a block of `communication` allows, and which lines were warned about since."""

    mode: str = "auto"
    over_bytes: int = 0
    warned: set[tuple[str, Line]] = field(default_factory=set)


policy: Setting[CommunicationPolicy] = Setting("communication", CommunicationPolicy(), reaches_threads=True)


@contextlib.contextmanager
def communication(mode: str, over_bytes: int = 0) -> Iterator[None]:
    """Allow ("auto"), report ("warn") or refuse ("forbid") communication that an operator needs but nobody asked for.

    Only what moves more than `over_bytes` bytes to a rank counts; each operator on each line warns once.

    >>> with communication("forbid", over_bytes=1024):
    ...     check("aten.mm", 512, lambda: "f32[8, 16@tp]")
    """
    choice(mode, "communication: mode", MODES)
    with policy.set(CommunicationPolicy(mode, integer(over_bytes, "communication: over_bytes", 0))):
        yield


def check(operator: str, bytes: int, describe: Callable[[], str]) -> None:
    """Warn or raise, as the block of `communication` says, about `bytes` that `operator` is going to move to a rank."""
    current = policy.get()
    if current.mode == "auto" or bytes <= current.over_bytes:
        return
    line = caller()
    if current.mode == "warn" and (operator, line) in current.warned:
        return
    limit = f" (over_bytes={current.over_bytes:,})" if current.over_bytes else ""
    text = (
        f"{operator} at {line} communicates {bytes:,} bytes{limit}: {describe()}. Redistribute its inputs to "
        'layouts that fit before the operator, or allow it with sw.communication("auto").'
    )
    if current.mode == "forbid":
        raise CommunicationError(text)
    current.warned.add((operator, line))
    warnings.warn_explicit(text, UserWarning, line.path, line.number)
