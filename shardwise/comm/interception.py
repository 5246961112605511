"""Interception point: rematerialisation records or replays the result of a communication or of a random draw.

Knows nothing of regions and policies: a watcher is asked for a result, and may or may not let it be computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

#: Called for an operator with a key that describes its communication or draw, the tensors communicated, and what computes the
#: result: gives that result, or an earlier one.
Watcher = Callable[[str, Hashable, Tensor | tuple[Tensor, ...] | None, Callable[[], Any]], Any]


class _Watchers(threading.local):
    now: tuple[Watcher, ...] = ()


#: The watchers of this thread, each before those that it came after.
watchers = _Watchers()


def watched(operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], T]) -> T:
    """The result of a communication or a draw, by way of all watchers of this thread.

    >>> import torch
    >>> watched("move", "", torch.ones(2), lambda: torch.zeros(2))
    tensor([0., 0.])
    """
    for watcher in watchers.now:
        run = partial(watcher, operator, key, x, run)
    return run()
