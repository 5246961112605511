"""The job's store, which every rank reads and writes: topics, signs of life, and whether another rank's process ended.

Knows nothing of what is stored, of meshes and of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch.groups import job_store

#: Seconds between two looks at what keeps other ranks, and the longest pause between two looks for what they leave.
LOOK, _PAUSE = 0.1, 0.02
#: For each job, how often each topic was opened: opening it once more is a new one, under a name that all ranks know.
_opened: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def topic_store(topic: str) -> Any:
    """torch's store of the running job, for one topic. The same topic again, in the same job, starts empty."""
    times = _opened.setdefault(dist.group.WORLD, Counter())
    times[topic] += 1
    return job_store(f"shardwise/{topic}/{times[topic]}")


def wait_for(
    store: Any, keys: list[str], trouble: Callable[[float], str], seconds: float = math.inf, pause: float = _PAUSE
) -> str:
    """Wait until all keys are in a store, so many seconds at most, with such pauses. Nothing, or why they will not come, as
    `trouble` says, which is now and then given the seconds waited so far."""
    start = looked = now = time.monotonic()
    while not store.check(keys) and now - start <= seconds:
        now = time.monotonic()
        if now - looked > LOOK:
            looked = now
            if why := trouble(now - start):
                return why
        time.sleep(min(pause, (now - start) / 4))
    return ""


def store_gone(error: Exception, remedy: str) -> str:
    """What to say where the store does not answer any more."""
    reason = str(error).partition("\n")[0]
    return f"the job's store is gone, so the process that held it has ended ({reason}); {remedy}"


# ── signs of life ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Heartbeat:
    """A thread that counts in the store, every so many seconds, until it is stopped: this rank lives."""

    def __init__(self, store: Any, key: str, seconds: float) -> None:
        self._store, self._key, self._seconds = store, key, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name=f"shardwise-{key}")
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it everyone who would listen
            while not self._stopped.wait(self._seconds):
                self._store.add(self._key, 1)

    def stop(self) -> None:
        """Give no more signs of life."""
        self._stopped.set()
        self._thread.join(self._seconds)


class Pulse:
    """The heartbeat of another rank, as it is seen here."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._beats, self._since = -1, 0.0

    def silence(self) -> float:
        """For how many seconds, seen from here, there was no sign of life."""
        beats, now = int(self._store.add(self._key, 0)), time.monotonic()
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _system() -> str:
    """This system and its table of processes, as far as Linux tells: those of containers are apart."""
    boot, table = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(table)}" if boot.exists() and table.exists() else ""


def this_process() -> str:
    """This process, as text for others."""
    return f"{os.getpid()} {_started(os.getpid())} {_system()}"


def _started(pid: int) -> str:
    """When a process was started, in the system's own count; nothing if there is none, or only what is left of one."""
    with contextlib.suppress(OSError):
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else facts[18]
    return ""


def has_ended(process: str) -> bool | None:
    """Whether a process, as it told of itself, has ended; None where that cannot be seen from here.

    >>> has_ended(this_process())
    False
    """
    pid, started, system = process.split(" ", 2)
    return _started(int(pid)) != started if system and system == _system() else None
