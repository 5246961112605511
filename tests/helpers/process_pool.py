"""Gloo processes on loopback that stay alive between tests.

    Pool(4).run(function, *args)  ->  [what rank 0 returned, ..., what rank 3 returned]

The function must be importable by name (top level of a test module): it travels as a pickle, and so do its arguments
and results. It runs with the process group initialised and the seed set to 0.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# How long the other ranks may still take once one has failed: they may wait for it in a collective.
GRACE_SECONDS = 5.0
# How many characters of what a process wrote to stderr are shown when it ends.
LAST_WORDS = 4000


class Reply(NamedTuple):
    """One rank's answer: a value, or an exception with its traceback text."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


class Pool:
    """A fixed number of Gloo ranks; started by the first `run`, and anew after a timeout or a failure of some."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank and give the results in rank order; raise the first rank's exception."""
        request = pickle.dumps((function, args))
        if not self._processes:
            self._start()
        replies: dict[int, Reply] = {}
        try:
            for rank, pipe in enumerate(self._pipes):
                self._send(pipe, request, rank, replies)
            self._collect(replies, timeout)
        except BaseException:
            self.close()
            raise
        return self._results(replies, f"{function.__module__}.{function.__qualname__}", timeout)

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._folder.name, rank, self.size), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, replies: dict[int, Reply], timeout: float) -> None:
        """Fill `replies` in order of arrival, until all are there or time is up."""
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while len(replies) < self.size:
            if any(reply.error for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            ready = wait([p for p, rank in ranks.items() if rank not in replies], max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for pipe in sorted(ready, key=lambda p: ranks[p]):
                replies[ranks[pipe]] = self._receive(pipe, ranks[pipe])

    def _send(self, pipe: Connection, request: bytes, rank: int, replies: dict[int, Reply]) -> None:
        try:
            pipe.send_bytes(request)
        except OSError:
            replies[rank] = self._dead(rank)

    def _receive(self, pipe: Connection, rank: int) -> Reply:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return self._dead(rank)

    def _dead(self, rank: int) -> Reply:
        self._processes[rank].join(GRACE_SECONDS)
        code = self._processes[rank].exitcode
        text = f"the process of rank {rank} ended without an answer, with exit code {code}"
        return Reply(error=RuntimeError(text), traceback=self._last_words(rank))

    def _last_words(self, rank: int) -> str:
        return (Path(self._folder.name) / f"stderr{rank}").read_text()[-LAST_WORDS:]

    def _stack(self, rank: int) -> str:
        """Where a process that does not answer is, as it says itself."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return self._last_words(rank)

    def _results(self, replies: dict[int, Reply], name: str, timeout: float) -> list[Any]:
        failed = {rank: reply for rank, reply in replies.items() if reply.error}
        silent = [rank for rank in range(self.size) if rank not in replies]
        standing = [f"rank {rank} stands here:\n{self._stack(rank)}" for rank in silent]
        if silent or 0 < len(failed) < self.size or not all(process.is_alive() for process in self._processes):
            # Some ranks may be ahead of others in the sequence of collectives, or gone: the group is of no more use.
            self.close()
        for rank, reply in failed.items():
            reply.error.add_note(f"on rank {rank} of {self.size}, in {name}:\n{reply.traceback}")
            raise reply.error
        if silent:
            error = TimeoutError(f"{name} on {self.size} ranks: no answer from ranks {silent} within {timeout:g} s")
            error.add_note("\n".join(standing))
            raise error
        return [replies[rank].value for rank in range(self.size)]


def _serve(pipe: Connection, folder: str, rank: int, size: int) -> None:
    """The life of one worker: join the group, then answer requests until killed. What it writes to stderr goes to a file."""
    with (Path(folder) / f"stderr{rank}").open("w") as words:
        os.dup2(words.fileno(), 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), size), rank=rank, world_size=size)
    while True:
        pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        torch.manual_seed(0)
        return pickle.dumps(Reply(function(*args)))
    except Exception as error:
        return _failure(error, traceback.format_exc())


def _failure(error: Exception, text: str) -> bytes:
    """A reply that surely unpickles: an exception that does not survive the trip is named in a RuntimeError."""
    try:
        reply = pickle.dumps(Reply(error=error, traceback=text))
        pickle.loads(reply)
    except Exception:
        reply = pickle.dumps(Reply(error=RuntimeError(f"{type(error).__name__}: {error}"), traceback=text))
    return reply
