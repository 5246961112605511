"""`Setting`: what a `with` block sets for a while, as the current mesh, the active logs, the policy, the simulated world.

Knows nothing of meshes and tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Generic, TypeVar

from .._torch.tensors import context_of_backward

T = TypeVar("T")

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_PACKAGE = __name__.partition(".")[0]
#: Modules that run a generator as a context manager: what it sets where it is suspended is meant for others.
_MANAGERS = frozenset(("contextlib", "_pytest.fixtures"))


class _Entered(Generic[T]):
    """A value that is set, as long as `active`. `before` was set in the same context before it."""

    __slots__ = ("active", "before", "frame", "in_generator", "of_main", "value", "within")

    def __init__(self, value: T, frame: FrameType | None) -> None:
        self.value, self.active = value, True
        self.before: _Entered[T] | None = None
        #: the generator's block around this one
        self.within: _Entered[T] | None = None
        #: that of a generator or a coroutine, which may be suspended inside the block
        self.frame = frame
        self.in_generator = frame is not None and bool(frame.f_code.co_flags & _GENERATOR)
        self.of_main = threading.current_thread() is threading.main_thread()

    def is_around(self, other: _Entered[T] | None) -> bool:
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
        self._variable: ContextVar[_Entered[T] | None] = ContextVar(f"shardwise.{name}", default=None)
        self._active: dict[_Entered[T], None] = {}  # of all threads, in the order in which they were entered

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
        block = self.enter(value, sys._getframe(2))
        try:
            yield value
        finally:
            self._leave(block)

    def enter(self, value: T, frame: FrameType) -> _Entered[T]:
        """Set the value from here on, for a block that code in that frame enters: for objects that are blocks themselves."""
        block = _Entered(value, _suspendable(frame) if self._reaches_threads else None)
        block.before, block.within = _still_active(self._variable.get()), self._of_generator()
        if self._reaches_threads:
            self._active[block] = None
        if not block.in_generator:
            self._variable.set(block)
        return block

    def leave(self, value: T) -> None:
        """End the innermost block that set this very value: it may be set in several threads at once, and blocks may be left
        in another order than they were entered in."""
        block = self._innermost(self._variable.get())
        while block is not None and not (block.active and block.value is value):
            block = block.before
        others = (other for other in reversed(list(self._active)) if other.active and other.value is value)
        found = block or next(others, None)
        if found is not None:
            self._leave(found)

    def _leave(self, block: _Entered[T]) -> None:
        block.active, block.frame = False, None  # for all contexts: not every one that holds it can be reached from here
        self._active.pop(block, None)
        if self._variable.get() is block:
            self._variable.set(_still_active(block.before))

    def _innermost(self, block: _Entered[T] | None) -> _Entered[T] | None:
        own, generator = _still_active(block), self._of_generator()
        if generator is not None and not generator.is_around(own):
            return generator
        if own is None and self._reaches_threads:
            caller = context_of_backward()
            own = _still_active(None if caller is None else caller.get(self._variable)) or self._of_others()
        return own

    def _of_generator(self) -> _Entered[T] | None:
        """The block of the innermost generator that is running in this thread and has one."""
        frames = {block.frame: block for block in list(self._active) if block.in_generator and block.active}
        frame: FrameType | None = sys._getframe(1) if frames else None
        while frame is not None and frame not in frames:
            frame = frame.f_back
        return None if frame is None else frames[frame]

    def _of_others(self) -> _Entered[T] | None:
        """The last block that the main thread is in; in a thread of autograd of which torch does not say whom it works for (in
        a backward inside a backward), that any thread is in."""
        for block in reversed(list(self._active)):
            frame = block.frame
            is_running = block.active and (frame is None or frame.f_back is not None)  # what is suspended has no caller
            is_foreign = threading.current_thread().name.startswith("Dummy-")  # made up: Python did not start the thread
            if is_running and (block.of_main or is_foreign):
                return block
        return None


def _still_active(block: _Entered[T] | None) -> _Entered[T] | None:
    """A block, or the last one before it that has not been left."""
    while block is not None and not block.active:
        block = block.before
    return block


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
