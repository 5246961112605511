"""PerRank: a value that differs from rank to rank, computed for a rank where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PerRank:
    """A value that depends on the place in the root mesh, computed where it is needed.

    >>> PerRank(lambda place: place * 10).at(3)
    30
    """

    __slots__ = ("_function", "_known")

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._known: dict[int, Any] = {}

    def at(self, place: int) -> Any:
        """The value at a place of the root mesh."""
        if place not in self._known:
            self._known[place] = self._function(place)
        return self._known[place]


class Number(PerRank):
    """An int per place that reaches a kernel as a 0-d tensor, so that no rank's int enters a traced graph."""

    __slots__ = ()
