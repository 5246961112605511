"""Runs many small tasks in forked processes, so that a task that hangs or takes its process down is known by its name."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

#: Seconds of computing after which a task is taken to hang, and how many times as long its process may take on the clock.
LIMIT, PATIENCE = 120.0, 20.0


class TimeOut(BaseException):
    """A task computes for too long."""


class TaskResult(NamedTuple):
    """A task and its result; what became of it where it has none: "hang", "abort", or an error of the verifier itself."""

    task: Any
    result: Any
    failure: str = ""


def limited(function: Callable[[Any], Any], task: Any) -> TaskResult:
    """Run a task in this process, for so many seconds of computing."""

    def late(*_: Any) -> None:
        raise TimeOut(f"{task} computes for more than {LIMIT:.0f} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        return TaskResult(task, function(task))
    except TimeOut:
        return TaskResult(task, None, "hang")
    except Exception as error:
        return TaskResult(task, None, f"fault: {type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Worker:
    """A forked process that runs one task after another."""

    def __init__(self, function: Callable[[Any], Any], task: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, far, self.pipe), daemon=True)
        self.process.start()
        far.close()
        self.give(task)

    def give(self, task: Any) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)


def _serve(function: Callable[[Any], Any], pipe: Connection, other: Connection) -> None:
    other.close()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(limited(function, pipe.recv()))


def run_tasks(function: Callable[[Any], Any], tasks: Sequence[Any], workers: int) -> Iterator[TaskResult]:
    """The results of a function of tasks, as they come; both must travel between processes. A terminal shows a bar."""
    left, crew, shown = list(tasks)[::-1], list[_Worker](), sys.stderr.isatty()
    while left or crew:
        while left and len(crew) < workers:
            crew.append(_Worker(function, left.pop()))
        ready = wait([worker.pipe for worker in crew], timeout=5.0)
        for worker in list(crew):
            late = time.monotonic() - worker.since > LIMIT * PATIENCE
            if worker.pipe not in ready and not late:
                continue
            done = TaskResult(worker.task, None, "hang" if late else "abort")
            with contextlib.suppress(EOFError, ConnectionResetError):
                done = done if late else worker.pipe.recv()
            if shown:
                sys.stderr.write("\r\033[K")
            yield done
            if left and not late and done.failure != "abort":
                worker.give(left.pop())
            else:
                worker.process.kill()
                worker.process.join()
                crew.remove(worker)
            if shown:
                number = len(tasks) - len(left) - len(crew)
                sys.stderr.write(f"[{'#' * (40 * number // len(tasks)):<40}] {number}/{len(tasks)} {done.task}")
                sys.stderr.flush()
    if shown:
        sys.stderr.write("\r\033[K")
