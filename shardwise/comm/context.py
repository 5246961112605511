"""What a `with` block sets for a while (the active logs, the policy, the simulated world), and where the user stands.

Knows nothing of meshes and tensors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Setting(Generic[T]):
    """A value set for a while; seen also by the threads in which autograd runs the backward of CUDA operators.

    >>> depth = Setting("depth", 0)
    >>> with depth.set(3):
    ...     depth.get()
    3
    """

    __slots__ = ("_default", "_set", "_variable")

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._variable: ContextVar[T | None] = ContextVar(f"shardwise.{name}", default=None)
        self._set: dict[object, T] = {}

    def get(self) -> T:
        """The value now."""
        value = self._variable.get()
        if value is not None:
            return value
        # A thread that torch started has no context of anyone's: it works for the last one who set the value.
        return next(reversed(self._set.values())) if self._set and _is_foreign_thread() else self._default

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[T]:
        """Set the value inside a `with` block."""
        token, block = self._variable.set(value), object()
        self._set[block] = value
        try:
            yield value
        finally:
            del self._set[block]
            self._variable.reset(token)


def _is_foreign_thread() -> bool:
    """Whether the thread was not started by Python: `threading` then makes up a name for it."""
    return threading.current_thread().name.startswith("Dummy-")


class Line(NamedTuple):
    """A line of the user's program."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}:{self.number}"


_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))
#: Programs that this library wrote have this name in place of a file's.
CAPTURED = "<captured program>"
_PASSED_THROUGH = (contextlib.__file__, functools.__file__, CAPTURED)


def _is_written(frame: FrameType) -> bool:
    """Whether a compiler wrote the code, to a module of torch's wherever its file is, or to no file."""
    name = frame.f_globals.get("__name__")
    return frame.f_code.co_filename.startswith("<eval_with_key>") or (type(name) is str and name.startswith("torch."))


def callers(most: int) -> list[Line]:
    """The innermost lines outside Shardwise and torch, at most so many; none in a thread that has no line of the user's.

    >>> len(callers(1))
    1
    """
    frame, found = sys._getframe(1), list[Line]()
    while frame is not None and len(found) < most:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and path not in _PASSED_THROUGH and not _is_written(frame):
            found.append(Line(path, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def caller() -> Line:
    """The innermost line outside Shardwise and torch; `<autograd>:0` in a thread that has no line of the user's.

    >>> caller().number > 0
    True
    """
    return next(iter(callers(1)), Line("<autograd>", 0))
