"""What a `with` block sets for a while (the active logs, the policy, the simulated world), and where the user stands.

Knows nothing of meshes and tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Generic, NamedTuple, TypeVar

import torch

from .._torch import context_of_backward

T = TypeVar("T")

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_PACKAGE = __name__.partition(".")[0]
#: Modules that run a generator as a context manager: what it sets where it is suspended is meant for others.
_MANAGERS = frozenset(("contextlib", "_pytest.fixtures"))


class Block(Generic[T]):
    """A value that is set, as long as `active`. `before` was set in the same context before it."""

    __slots__ = ("active", "before", "frame", "in_generator", "of_main", "value", "within")

    def __init__(self, value: T, frame: FrameType | None) -> None:
        self.value, self.active = value, True
        self.before: Block[T] | None = None
        #: the generator's block around this one
        self.within: Block[T] | None = None
        #: that of a generator or a coroutine, which may be suspended inside the block
        self.frame = frame
        self.in_generator = frame is not None and bool(frame.f_code.co_flags & _GENERATOR)
        self.of_main = threading.current_thread() is threading.main_thread()

    def is_around(self, other: Block[T] | None) -> bool:
        """Whether another block was entered inside of this one, which is a generator's."""
        while other is not None and other.within is not self:
            other = other.within
        return other is not None


class Setting(Generic[T]):
    """A value that holds inside a `with` block and no longer: in what the block calls, and in tasks that it starts.

    With `reaches_threads` it also holds in threads that are not in a block of their own: that of the main thread in all, that
    of another thread in those that run in a copy of its context, and that of whoever calls backward in autograd's threads.
    While a generator is suspended its blocks hold nowhere; they do again when it goes on, in whichever thread. Those of a
    generator that serves as a context manager hold for whoever entered it.

    >>> depth = Setting("depth", 0)
    >>> with depth.set(3):
    ...     depth.get()
    3
    """

    __slots__ = ("_active", "_default", "_reaches_threads", "_variable")

    def __init__(self, name: str, default: T, reaches_threads: bool = False) -> None:
        self._default, self._reaches_threads = default, reaches_threads
        self._variable: ContextVar[Block[T] | None] = ContextVar(f"shardwise.{name}", default=None)
        self._active: dict[Block[T], None] = {}  # of all threads, in the order in which they were entered

    def get(self) -> T:
        """The value now."""
        block = self._variable.get()
        if block is None and not self._active:
            return self._default
        found = self._innermost(block)
        return self._default if found is None else found.value

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[T]:
        """Set the value inside a `with` block."""
        block = Block(value, _suspendable(sys._getframe(2)) if self._reaches_threads else None)
        block.before, block.within = _still_active(self._variable.get()), self._of_generator()
        if self._reaches_threads:
            self._active[block] = None
        if not block.in_generator:
            self._variable.set(block)
        try:
            yield value
        finally:
            block.active, block.frame = False, None  # for all contexts: not every one that holds it can be reached from here
            self._active.pop(block, None)
            if self._variable.get() is block:
                self._variable.set(_still_active(block.before))

    def _innermost(self, block: Block[T] | None) -> Block[T] | None:
        own, generator = _still_active(block), self._of_generator()
        if generator is not None and not generator.is_around(own):
            return generator
        if own is None and self._reaches_threads:
            caller = context_of_backward()
            own = _still_active(None if caller is None else caller.get(self._variable)) or self._of_others()
        return own

    def _of_generator(self) -> Block[T] | None:
        """The block of the innermost generator that is running in this thread and has one."""
        frames = {block.frame: block for block in list(self._active) if block.in_generator and block.active}
        frame: FrameType | None = sys._getframe(1) if frames else None
        while frame is not None and frame not in frames:
            frame = frame.f_back
        return None if frame is None else frames[frame]

    def _of_others(self) -> Block[T] | None:
        """The last block that the main thread is in; in a thread of autograd of which torch does not say whom it works for (in
        a backward inside a backward), that any thread is in."""
        for block in reversed(list(self._active)):
            frame = block.frame
            is_running = block.active and (frame is None or frame.f_back is not None)  # what is suspended has no caller
            if is_running and (block.of_main or _is_foreign_thread()):
                return block
        return None


def _still_active(block: Block[T] | None) -> Block[T] | None:
    """A block, or the last one before it that has not been left."""
    while block is not None and not block.active:
        block = block.before
    return block


def _is_foreign_thread() -> bool:
    """Whether the thread was not started by Python: `threading` then makes up a name for it."""
    return threading.current_thread().name.startswith("Dummy-")


def _suspendable(frame: FrameType | None) -> FrameType | None:
    """The frame whose `with` block is being entered, if it is that of a generator or a coroutine. A generator that is run as a
    context manager stands for whoever enters that."""
    while frame is not None:
        module, back = frame.f_globals.get("__name__", ""), frame.f_back
        runs = back.f_globals.get("__name__", "") if back is not None else ""
        is_manager = bool(frame.f_code.co_flags & _GENERATOR) and runs in _MANAGERS
        if not is_manager and module not in _MANAGERS and module.partition(".")[0] != _PACKAGE:
            break
        frame = back
    return frame if frame is not None and frame.f_code.co_flags & (_GENERATOR | _COROUTINE) else None


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
