"""`Session`: ranks that tell each other, through the job's store, what they are about to communicate, before they do.

Nothing here goes through the process groups, whose order may be wrong. A *meeting* is the n-th communication of the same
ranks: each leaves an `Intent` and waits for those of the others. A rank that finds that they do not fit together, or that one
will not come, leaves the reason, and all ranks raise it. Knows nothing of meshes and tensors.

All ranks of a meeting raise or all go on, by the first word under its name: "go" from one that has seen all intents, or "stop"
from one that gives up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..._torch.groups import job_timeout
from ...errors import MismatchError
from ..agreement import by_text, named
from ..failures import in_job
from ..source_lines import caller
from ..store import LOOK, Heartbeat, Pulse, has_ended, store_gone, this_process, topic_store, wait_for

T = TypeVar("T")
#: Seconds between two signs of life of a rank.
BEAT = 0.5
#: Seconds that a rank stays when it leaves with an error, so that others learn of it: the store may end with its process.
GRACE = 2.0
#: Nothing is sent or received.
_NO_MESSAGES: dict[str, list[str]] = {}


# ── intents ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Intent(NamedTuple):
    """What a rank is about to communicate, for whom and from which line (and path to it), and what it sends to others and
    expects from them, by rank.

    >>> print(Intent("all_reduce(sum)", "aten.sum", "axes tp of Mesh(tp=2)", "f32[4]", "train.py:12"))
    all_reduce(sum) of f32[4] for aten.sum over axes tp of Mesh(tp=2) at train.py:12
    >>> print(Intent("batch", "p2p", line="train.py:9", send={"1": ["f32[2]"]}, receive={"3": ["i64[]"]}))
    batch for p2p at train.py:9: f32[2] to rank 1, i64[] from rank 3
    """

    kind: str
    operator: str = ""
    group: str = ""
    value: str = ""
    line: str = ""
    path: str = ""
    send: dict[str, list[str]] = _NO_MESSAGES
    receive: dict[str, list[str]] = _NO_MESSAGES
    fact: str = ""

    def __str__(self) -> str:
        words = [self.kind, self.value and f"of {self.value}", self.operator and f"for {self.operator}"]
        words += [self.group and f"over {self.group}", self.line and f"at {self.line}", self.path]
        words += [self.fact and f"({self.fact})"]
        sent = [f"{' and '.join(messages)} to rank {rank}" for rank, messages in self.send.items()]
        sent += [f"{' and '.join(messages)} from rank {rank}" for rank, messages in self.receive.items()]
        return " ".join(filter(None, words)) + (": " + ", ".join(sent) if sent else "")

    def _only(self, rank: int) -> Intent:
        """The intent as far as it is about messages from and to one rank."""
        name = str(rank)
        send, receive = ({name: of[name]} if name in of else {} for of in (self.send, self.receive))
        return self._replace(send=send, receive=receive)


#: What must agree, by the name of the field, and what it is called.
MUST = {"kind": "the kind", "operator": "the operator", "group": "the group", "value": "shape or dtype", "line": "the line"}
MUST["fact"] = "values that must be the same on every rank"


def difference(intents: dict[int, Intent], fields: Iterable[str]) -> str:
    """How the intents of ranks that meet do not fit together; nothing if they do.

    >>> print(difference({0: Intent("all_gather", value="f32[2]"), 1: Intent("all_gather", value="f32[3]")}, MUST))
    the ranks are about to do different communications:
      rank 0: all_gather of f32[2]
      rank 1: all_gather of f32[3]
    They differ in shape or dtype.
    """
    first = next(iter(intents.values()))
    names = [name for name in fields if any(getattr(intent, name) != getattr(first, name) for intent in intents.values())]
    if names:
        more = " If these lines are meant to meet, use sw.debug_mode(lines=False)." if names == ["line"] else ""
        return (
            f"the ranks are about to do different communications:\n{by_text(intents)}\n"
            f"They differ in {', '.join(MUST[name] for name in names)}.{more}"
        )
    for rank, other in product(intents, intents):
        sent, expected = intents[rank].send.get(str(other), []), intents[other].receive.get(str(rank), [])
        if sent != expected:
            both = {rank: intents[rank]._only(other), other: intents[other]._only(rank)}
            what, instead = (" and ".join(several) or "nothing" for several in (sent, expected))
            return f"rank {rank} is about to send {what} to rank {other}, which expects {instead}:\n{by_text(both)}"
    return ""


class Standing(NamedTuple):
    """Where a rank stands: how many steps it took, its last intent, how many meetings of each name it came to, and the names
    and numbers of those that it came to last, where it may wait for others."""

    step: int
    intent: Intent
    came: dict[str, int]
    last: list[list[Any]]


def _members(name: str) -> list[int]:
    """The ranks that come to a meeting, by its name."""
    return [int(rank) for rank in name.split(",")]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


# ── the session ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _fill(given: Future[T], call: Callable[[], T]) -> None:
    try:
        given.set_result(call())
    except BaseException as error:
        given.set_exception(error)


class Session:
    """This rank's part in the checks of a job; to be ended by `leave`."""

    def __init__(self, timeout: float | None, lines: bool) -> None:
        timeout = job_timeout().total_seconds() if timeout is None else timeout
        self.job, self.rank, self.timeout = dist.group.WORLD, dist.get_rank(), timeout
        self.fields = tuple(name for name in MUST if lines or name != "line")
        self.warned: set[str] = set()  # lines of sums that are not finite
        self._store: Any = topic_store("debug")
        self._came: Counter[str] = Counter()
        self._step = 0
        self._pulses: dict[int, Pulse] = {}
        self._lock = threading.Lock()
        self._store.set(f"process/{self.rank}", this_process())
        self._store.set(f"at/{self.rank}", json.dumps(Standing(0, Intent("none"), {}, [])))
        self._life = Heartbeat(self._store, f"beat/{self.rank}", BEAT)
        atexit.register(self._end_of_program)

    def agree(self, intent: Intent, meetings: Sequence[Iterable[int]], fields: Iterable[str]) -> None:
        """Leave an intent for each of several sets of ranks, this one among them; when all have, raise, as all others will, if
        what they left does not fit together."""
        try:
            with self._lock:
                left = self._meet(intent, [",".join(map(str, sorted(ranks))) for ranks in meetings])
        except dist.DistError as error:
            raise MismatchError(
                f"rank {self.rank} was about to do {intent}, and {store_gone(error, 'look for its own error')}"
            ) from error
        for text in [difference(intents, fields) for intents in left]:
            if text:
                raise MismatchError(self._blame(text))

    def finish(self, wait: Callable[[], T]) -> T:
        """What a call gives that only waits for messages, unless some rank fails meanwhile: then it is left, in a thread.
        Of the ranks of a batch one may find, after others began to wait, that it does not agree with another."""
        given: Future[T] = Future()
        threading.Thread(target=_fill, args=(given, wait), daemon=True, name="shardwise-waits").start()
        while True:
            with contextlib.suppress(TimeoutError):
                return given.result(LOOK)
            if why := self.failure():
                raise MismatchError(why)

    def failure(self) -> str:
        """Why some rank failed; nothing if none did."""
        return self._text("failed")

    def _text(self, key: str) -> str:
        """What a rank left in the store; nothing if it did not."""
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def leave(self, error: BaseException | None) -> None:
        """Say that this rank comes to no meeting any more. Then stay until all others have said so, since the store may end
        with this process; with an error only so long that those who wait can learn of it."""
        self._say_end(f"left sw.debug_mode() at {caller()}" if error is None else f"raised {_short(error)}")
        why = ""
        with contextlib.suppress(dist.DistError):  # the process that held the store has ended, and no one waits any more
            why = self._stay("end", self.timeout, heeds=True) if error is None else self._stay("end", GRACE, heeds=False)
            self._store.set(f"left/{self.rank}", "")
            if why or error:  # those that leave may still be reading why
                self._stay("left", GRACE, heeds=False)
        self.end()
        if error is None and why:
            raise MismatchError(why)

    def end(self) -> None:
        """Give no more signs of life."""
        atexit.unregister(self._end_of_program)
        self._life.stop()

    # ── meetings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _meet(self, intent: Intent, names: list[str]) -> list[dict[int, Intent]]:
        self._came.update(names)
        self._step += 1
        standing = Standing(self._step, intent, self._came, [[name, self._came[name]] for name in names])
        keys = {f"{name}/{number}/{rank}": rank for name, number in standing.last for rank in _members(name)}
        left = {key: json.dumps(intent) for key, rank in keys.items() if rank == self.rank}
        left[f"at/{self.rank}"] = json.dumps(standing)
        self._store.multi_set(list(left), list(left.values()))

        def trouble(waited: float) -> str:
            late = {rank: key for key, rank in keys.items() if not self._store.check([key])}
            return self.failure() or self._trouble(late, standing, waited)

        try:
            why = wait_for(self._store, list(keys), trouble)
        except BaseException as error:
            with contextlib.suppress(dist.DistError):
                self._blame(f"rank {self.rank} raised {_short(error)}, and was about to do {intent}")
                self._say(standing, "stop")
            raise
        if self._say(standing, "stop" if why else "go") != {"go"}:
            raise MismatchError(why or self.failure())
        every = dict(zip(keys, self._store.multi_get(list(keys)), strict=True))
        self._forget(standing)
        named = [(name, f"{name}/{number}") for name, number in standing.last]
        return [{rank: Intent(*json.loads(every[f"{key}/{rank}"])) for rank in _members(name)} for name, key in named]

    def _say(self, standing: Standing, word: str) -> set[str]:
        """Go or stop: the first word about each of the meetings."""
        keys = [f"{name}/{number}/word" for name, number in standing.last]
        return {str(self._store.compare_set(key, "", word).decode()) for key in keys}

    def _forget(self, standing: Standing) -> None:
        """Take back what was left at the meetings before: all have come to these, and so have read it."""
        for name, number in standing.last:
            if number > 1:
                self._store.delete_key(f"{name}/{number - 1}/{self.rank}")
                if self.rank == _members(name)[0]:
                    self._store.delete_key(f"{name}/{number - 1}/word")

    # ── what keeps the others ─────────────────────────────────────────────────────────────────────────────────────────

    def _trouble(self, late: dict[int, str], standing: Standing, waited: float) -> str:
        """Why the late ranks will not come, which all ranks are told; nothing if they still may."""
        ended = [(rank, self._text(f"end/{rank}")) for rank in late]
        found = [(rank, how) for rank, how in ended if how and not self._store.check([late[rank]])]
        found = found or [(rank, how) for rank in late if (how := self._death(rank))]
        if not found and (ring := self._ring(standing)):
            return self._blame(f"these ranks wait for each other, and none can go on:\n{by_text(ring)}")
        more = ""
        if not found and waited > self.timeout:
            found = [(rank, "lives") if self._at(rank) else (rank, "is not here") for rank in late]
            more = f"\nThey did not within {waited:.1f} s; if they are only slow, allow more by sw.debug_mode(timeout=...)."
        lines = [f"  rank {rank} {how}; {self._last(rank)}" for rank, how in found]
        head = f"rank {self.rank} waits for {named(late)}:\n  rank {self.rank}: {standing.intent}\n"
        return self._blame(head + "\n".join(lines) + more) if found else ""

    def _blame(self, text: str) -> str:
        """Leave word of a failure; the first word counts, and is given back."""
        return str(self._store.compare_set("failed", "", text).decode())

    def _at(self, rank: int) -> Standing | None:
        """Where a rank stands; None if it is not in the session."""
        if not (text := self._text(f"at/{rank}")):
            return None
        step, intent, came, last = json.loads(text)
        return Standing(step, Intent(*intent), came, last)

    def _last(self, rank: int) -> str:
        at = self._at(rank)
        return "it has not entered sw.debug_mode()" if at is None else f"its last communication in the block: {at.intent}"

    def _death(self, rank: int) -> str:
        """How a rank of the session has died; nothing if it lives. On this host its process is looked for. Elsewhere it has
        been silent for as long as ranks are waited for: one that lives may be in code that holds Python's lock."""
        if not self._store.check([f"at/{rank}"]):
            return ""
        if (ended := has_ended(self._store.get(f"process/{rank}").decode())) is not None:
            return "died: its process has ended" if ended else ""
        pulse = self._pulses.setdefault(rank, Pulse(self._store, f"beat/{rank}"))
        is_silent = pulse.silence() > max(self.timeout, 4 * BEAT)
        return "shows no life: its process has ended or hangs" if is_silent else ""

    def _ring(self, standing: Standing) -> dict[int, Intent]:
        """Ranks that wait for each other in a ring, with what for. They are looked at one after the other, and some may move
        meanwhile: it is a ring if they stand there still."""
        seen, waits = {self.rank: standing}, dict[int, list[int]]()
        while len(waits) < len(seen):
            rank = next(rank for rank in seen if rank not in waits)
            last = [(member, name, number) for name, number in seen[rank].last for member in _members(name)]
            found = {member: seen.get(member) or self._at(member) for member, _, _ in last}
            waits[rank] = [member for member, name, n in last if (at := found[member]) and at.came.get(name, 0) < n]
            seen.update({member: at for member, at in found.items() if at is not None and member in waits[rank]})
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            ring = sorted(error.args[1][1:])  # the last is the first
            moved = any(other != self.rank and self._at(other) != seen[other] for other in ring)
            return {} if moved else {other: seen[other].intent for other in ring}
        return {}

    # ── life and end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _say_end(self, how: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"end/{self.rank}", how)

    def _end_of_program(self) -> None:
        """Called where the program ends inside the block."""
        error = getattr(sys, "last_value", None)
        self._say_end("ended its program" + ("" if error is None else f" by {_short(error)}"))
        self.end()

    def _stay(self, word: str, seconds: float, heeds: bool) -> str:
        """Wait until all ranks of the session have left a word, or one has failed that this one heeds; why, if one did."""
        others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        others = [rank for rank in others if word == "end" or self._text(f"end/{rank}")]

        def trouble(waited: float) -> str:
            late = [rank for rank in others if not self._text(f"end/{rank}")]
            died = [f"rank {rank} {how}; {self._last(rank)}" for rank in late if (how := self._death(rank))]
            return self.failure() or (self._blame(died[0]) if died else "")

        wait_for(self._store, [f"{word}/{rank}" for rank in others], trouble if heeds else lambda waited: "", seconds)
        return self.failure()


class Checks:
    """What a block of `debug_mode` asks for, and its session, which begins when there is a job."""

    __slots__ = ("_session", "lines", "timeout")

    def __init__(self, timeout: float | None, lines: bool) -> None:
        self.timeout, self.lines = timeout, lines
        self._session: Session | None = None

    def session(self) -> Session | None:
        """The session of this block in this job, entered if it has not been; None where this process works alone."""
        if self._session is not None and self._session.job is not dist.group.WORLD:
            self._session.end()
            self._session = None
        if self._session is None and in_job():
            self._session = Session(self.timeout, self.lines)  # one that left before others entered would not hear of errors
            self._session.agree(Intent("sw.debug_mode()", line=str(caller())), [range(dist.get_world_size())], ("kind",))
        return self._session

    def leave(self, error: BaseException | None) -> None:
        """Leave the session, also one that has not been entered: others may wait there."""
        session = self.session() if error is None else self._session
        if session is not None:
            session.leave(error)
