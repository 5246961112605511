"""Failures of one rank raise on all: it tells the others through the job's store, and wakes those that wait for it.

A rank whose local computation raises (a bad index in its shard, memory that does not suffice) first asks whether the others
raise too: then the error is one of the program, every rank has it, and nothing else happens. Else it leaves word of it and
closes the job's groups, so that whoever waits there is woken, reads the word and raises a `RankError`. Knows nothing of meshes
and tensors.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._torch.groups import job_store
from .._torch.tensors import dispatch_modes
from ..errors import MismatchError, RankError, ShardwiseError
from .aliases import groups
from .source_lines import caller
from .store import has_ended, this_process

P = ParamSpec("P")
T = TypeVar("T")
#: Seconds in which other ranks that raise as well must say so: they may be behind by that much.
GRACE = 2.0
#: No message has this tag: waiting for one is a way to close a group.
_NEVER = 0x5359
#: What errors of backends say that lost a peer, or waited for it too long; they have no class of their own.
_LOST = ("gloo", "pair closure", "NCCL", "Wait timeout")
#: Marks an error that others were told of, on its way out through several places that would tell.
_TOLD = "_shardwise_told"
_REMEDY = "the groups of the job are closed, and it cannot go on: end it and start it again"


def in_job() -> bool:
    """Whether this process shares its work with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


class _Job:
    """What this rank knows of the failures of a job."""

    def __init__(self) -> None:
        self.store: Any = job_store("shardwise/failures")
        self.reports: Counter[str] = Counter()
        self.why = ""
        self.store.set(f"process/{dist.get_rank()}", this_process())

    def word(self, text: str = "") -> str:
        """Why the job failed: the first word counts. Without one, what another rank left; nothing if none did."""
        try:
            if text and not self.why:
                self.why = self.store.compare_set("failed", "", text).decode()
            elif not self.why and self.store.check(["failed"]):
                self.why = self.store.get("failed").decode()
        except dist.DistError as error:
            self.why = text or f"the process that holds the job's store has ended ({_short(error)})"
        return self.why

    def ended(self) -> str:
        """Which ranks on this host have ended, as text."""
        others = [f"process/{rank}" for rank in range(dist.get_world_size())]
        with contextlib.suppress(dist.DistError):
            known = [(rank, self.store.get(key).decode()) for rank, key in enumerate(others) if self.store.check([key])]
            gone = [rank for rank, process in known if has_ended(process)]
            return f"the process of rank {', '.join(map(str, gone))} has ended" if gone else ""
        return ""


_jobs: WeakKeyDictionary[Any, _Job] = WeakKeyDictionary()


def joined() -> _Job:
    """What is known of the running job; the first call tells others which process this rank is."""
    found = _jobs.get(dist.group.WORLD)
    if found is None:
        found = _jobs[dist.group.WORLD] = _Job()
    return found


# ── this rank raises ──────────────────────────────────────────────────────────────────────────────────────────────────


def report(error: Exception, where: str, ranks: Sequence[int], alone: bool = False) -> None:
    """Tell the other ranks that this one raises an error, unless all of them do (`alone`: surely not all)."""
    if isinstance(error, RankError | MismatchError) or error.__dict__.get(_TOLD) or (len(ranks) < 2 and not alone):
        return
    job = joined()
    rank = dist.get_rank()
    text = f"rank {rank} raised {type(error).__name__}: {error}"[:2000] + f"\nin {where} at {caller()}"
    with contextlib.suppress(dist.DistError):
        if alone or not _all_raise(job, ranks):
            error.__dict__[_TOLD] = True
            job.word(text)
            close_groups()
            error.add_note(f"rank {rank} raised this in {where}, and not all others did; they were told, and {_REMEDY}")


def _all_raise(job: _Job, ranks: Sequence[int]) -> bool:
    """Whether every one of these ranks raises here too; the first that knows says so for all."""
    name = ",".join(map(str, sorted(ranks)))
    job.reports[name] += 1
    name, end = f"{name}/{job.reports[name]}", time.monotonic() + GRACE
    count = job.store.add(f"{name}/count", 1)
    while count < len(ranks) and time.monotonic() < end and not job.store.check([f"{name}/word"]):
        time.sleep(0.02)
        count = job.store.add(f"{name}/count", 0)
    return bool(job.store.compare_set(f"{name}/word", "", "all" if count >= len(ranks) else "some") == b"all")


def close_groups() -> None:
    """Close the connections of every group, to wake whoever waits there. Gloo closes a group in use only when a message is
    waited for in vain. NCCL's groups are left to the time-out: its watchdog ends the processes that wait."""
    for group in groups():
        with contextlib.suppress(ValueError):  # not one of a job
            gloo = group.size() > 1 and "gloo" in dist.get_backend_config(group)
            for peer in range(group.size() if gloo else 0):  # a connection that is closed already closes no others
                with contextlib.suppress(RuntimeError, ValueError):
                    group.recv([torch.empty(1)], peer, _NEVER).wait(timedelta(milliseconds=1))


# ── another rank does not answer ──────────────────────────────────────────────────────────────────────────────────────


def is_lost(error: BaseException) -> bool:
    """Whether an error says that communication failed: a peer is gone, or did not come in time."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


def lost(error: RuntimeError, what: str) -> RankError:
    """What to raise where communication failed: the word of the rank that failed first, or what is known here."""
    job, rank = joined(), dist.get_rank()
    seen = f"rank {rank} was in {what} at {caller()}"
    word = job.word() or job.word(f"{seen}: {_short(error)}; {job.ended() or 'some rank raised, skipped this or is late'}")
    close_groups()  # others that wait for this rank are woken in turn
    return RankError(f"{word}\n{'' if word.startswith(seen) else seen + chr(10)}{_REMEDY}")


def _short(error: Exception) -> str:
    """What a backend says, without the line of its code and its advice."""
    text = str(error).partition("\n")[0]
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". This is")[0]


def guarded(verb: Callable[P, T]) -> Callable[P, T]:
    """A function that communicates: where a peer fails, it raises the error of this library that says so."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return verb(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, ShardwiseError) or not is_lost(error):
                raise
            raise lost(error, verb.__name__) from error

    return call


def failed(error: Exception, what: str) -> None:
    """What to do with an error of a program in which this rank computed and communicated: raise that of a peer that failed, or
    tell the job's ranks of one that this rank may have alone."""
    if isinstance(error, ShardwiseError) or not in_job() or dispatch_modes():
        return
    if isinstance(error, RuntimeError) and is_lost(error):
        raise lost(error, what) from error
    report(error, what, range(dist.get_world_size()))
