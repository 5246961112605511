"""Interception point: rematerialisation records or replays the result of a communication or of a random draw.

Knows nothing of regions and policies: a watcher is asked for a result, and may or may not let it be computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Watcher(Protocol):
    """Records or replays results."""

    def result(self, operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], Any]) -> Any:
        """The result of a communication of `x`, or of a draw, that `key` describes: that of `run`, or an earlier one."""


class _Watchers(threading.local):
    def __init__(self) -> None:
        self.now: tuple[Watcher, ...] = ()


_watchers = _Watchers()


def watch(watcher: Watcher) -> tuple[Watcher, ...]:
    """Put a watcher before the others of this thread; gives these."""
    before = _watchers.now
    _watchers.now = (*before, watcher)
    return before


def watch_as_before(watchers: tuple[Watcher, ...]) -> None:
    """Restore the watchers that `watch` gave."""
    _watchers.now = watchers


def is_watched() -> bool:
    """Whether this thread has a watcher."""
    return bool(_watchers.now)


def watched(operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], T]) -> T:
    """The result of a communication or a draw, by way of all watchers of this thread.

    >>> import torch
    >>> watched("move", "", torch.ones(2), lambda: torch.zeros(2))
    tensor([0., 0.])
    """
    for watcher in _watchers.now:
        run = partial(watcher.result, operator, key, x, run)
    return run()
