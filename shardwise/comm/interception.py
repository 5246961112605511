"""Who watches what is communicated and drawn, to keep it and to give it back in a second run: `watched`, `watch`.

Knows nothing of blocks and policies: a watcher is asked for a result, and may or may not let it be computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Watcher(Protocol):
    """One who is asked."""

    def result(self, operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], Any]) -> Any:
        """What comes of a communication of `x`, or a draw, that `key` describes: what `run` gives, or has given before."""


class _Watchers(threading.local):
    def __init__(self) -> None:
        self.now: tuple[Watcher, ...] = ()


_watchers = _Watchers()


def watch(watcher: Watcher) -> tuple[Watcher, ...]:
    """From now on a watcher is asked first; gives those who were asked before."""
    before = _watchers.now
    _watchers.now = (*before, watcher)
    return before


def watch_as_before(watchers: tuple[Watcher, ...]) -> None:
    """From now on those are asked who were asked before."""
    _watchers.now = watchers


def is_watched() -> bool:
    """Whether anyone watches this thread."""
    return bool(_watchers.now)


def watched(operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], T]) -> T:
    """The result of a communication or a draw, by way of all who watch this thread.

    >>> import torch
    >>> watched("move", "", torch.ones(2), lambda: torch.zeros(2))
    tensor([0., 0.])
    """
    for watcher in _watchers.now:
        run = partial(watcher.result, operator, key, x, run)
    return run()
