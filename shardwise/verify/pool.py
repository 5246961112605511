"""Runs many small tasks in forked processes, so that a task that hangs or takes its process down is known by its name."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, far, self.pipe), daemon=True)
        self.process.start()
        far.close()
        self.task: Any = None
        self.since = 0.0

    def give(self, task: Any) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(function: Callable[[Any], Any], pipe: Connection, other: Connection) -> None:
    other.close()
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(limited(function, task))


def run(function: Callable[[Any], Any], tasks: Sequence[Any], workers: int) -> Iterator[TaskResult]:
    """The results of a function of tasks, as they come; both must be able to travel between processes."""
    left = list(tasks)[::-1]
    crew = [_Worker(function) for _ in range(min(workers, len(left)))]
    for worker in crew:
        worker.give(left.pop())
    while crew:
        ready = wait([worker.pipe for worker in crew], timeout=5.0)
        for worker in list(crew):
            late = time.monotonic() - worker.since > LIMIT * PATIENCE
            if worker.pipe not in ready and not late:
                continue
            done = _received(worker, late)
            yield done
            if done.failure == "abort" or late:
                worker.end()
                crew.remove(worker)
                if left:
                    crew.append(_Worker(function))
                    crew[-1].give(left.pop())
            elif left:
                worker.give(left.pop())
            else:
                worker.end()
                crew.remove(worker)


def _received(worker: _Worker, late: bool) -> TaskResult:
    if late:
        return TaskResult(worker.task, None, "hang")
    try:
        done: TaskResult = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        return TaskResult(worker.task, None, "abort")
    return done
