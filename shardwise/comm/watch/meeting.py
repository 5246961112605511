"""`Session`: ranks that tell each other, through the job's store, what they are about to communicate, before they do.

Nothing here goes through the groups whose order may be wrong. A *meeting* is the n-th communication of some ranks with each
other: each leaves a `Post` and waits for those of the others. Whoever finds that they cannot come together leaves word of why,
and all ranks raise it. Knows nothing of meshes and tensors.

Two ranks never part ways at a meeting: all raise or all go on, by the first word under its name, "go" from one who has seen all
posts or "stop" from one who gives up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import product
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..._torch.groups import job_store, job_timeout
from ...errors import MismatchError
from ..failures import has_ended, in_job, this_process
from ..source_lines import caller

T = TypeVar("T")
#: Seconds between two signs of life of a rank.
BEAT = 0.5
#: Seconds that a rank stays when it leaves with an error, so that others learn of it: the store may end with its process.
GRACE = 2.0
#: Seconds between two looks at what keeps the others.
LOOK = 0.1
#: The longest pause between two looks for their posts.
_PAUSE = 0.02

#: How many sessions each job has had: the n-th of one rank is the n-th of all.
_sessions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


# ── posts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Post(NamedTuple):
    """What a rank is about to communicate, for whom and from which line (and path to it), and what it sends to others and
    expects from them, by rank.

    >>> print(Post("all_reduce(sum)", "aten.sum", "axes tp of Mesh(tp=2)", "f32[4]", "train.py:12"))
    all_reduce(sum) of f32[4] for aten.sum over axes tp of Mesh(tp=2) at train.py:12
    >>> print(Post("batch", "p2p", line="train.py:9", send={"1": ["f32[2]"]}, receive={"3": ["i64[]"]}))
    batch for p2p at train.py:9: f32[2] to rank 1, i64[] from rank 3
    """

    kind: str
    operator: str = ""
    group: str = ""
    value: str = ""
    line: str = ""
    path: str = ""
    send: dict[str, list[str]] = {}  # noqa: RUF012  never written to
    receive: dict[str, list[str]] = {}  # noqa: RUF012
    fact: str = ""

    def __str__(self) -> str:
        words = [self.kind, self.value and f"of {self.value}", self.operator and f"for {self.operator}"]
        words += [
            self.group and f"over {self.group}",
            self.line and f"at {self.line}",
            self.path,
            self.fact and f"({self.fact})",
        ]
        parcels = [f"{' and '.join(messages)} to rank {rank}" for rank, messages in self.send.items()]
        parcels += [f"{' and '.join(messages)} from rank {rank}" for rank, messages in self.receive.items()]
        return " ".join(filter(None, words)) + (": " + ", ".join(parcels) if parcels else "")

    def _only(self, rank: int) -> Post:
        """The post as far as it is about messages from and to one rank."""
        kept = [{name: parcels[name] for name in parcels if name == str(rank)} for parcels in (self.send, self.receive)]
        return self._replace(send=kept[0], receive=kept[1])


#: What must agree, by the name of the field, and what it is called.
MUST = {"kind": "the kind", "operator": "the operator", "group": "the group", "value": "shape or dtype", "line": "the line"}
MUST["fact"] = "values that must be the same on every rank"


def difference(posts: dict[int, Post], fields: Iterable[str]) -> str:
    """How the posts of ranks that meet do not fit together; nothing if they do.

    >>> print(difference({0: Post("all_gather", value="f32[2]"), 1: Post("all_gather", value="f32[3]")}, MUST))
    the ranks are about to do different communications:
      rank 0: all_gather of f32[2]
      rank 1: all_gather of f32[3]
    They differ in shape or dtype.
    """
    first = next(iter(posts.values()))
    names = [name for name in fields if any(getattr(post, name) != getattr(first, name) for post in posts.values())]
    if names:
        more = " If these lines are meant to meet, use sw.debug_mode(lines=False)." if names == ["line"] else ""
        return (
            f"the ranks are about to do different communications:\n{_listed(posts)}\n"
            f"They differ in {', '.join(MUST[name] for name in names)}.{more}"
        )
    for rank, other in product(posts, posts):
        sent, expected = posts[rank].send.get(str(other), []), posts[other].receive.get(str(rank), [])
        if sent != expected:
            both = {rank: posts[rank]._only(other), other: posts[other]._only(rank)}
            what, instead = (" and ".join(several) or "nothing" for several in (sent, expected))
            return f"rank {rank} is about to send {what} to rank {other}, which expects {instead}:\n{_listed(both)}"
    return ""


def _listed(posts: dict[int, Post]) -> str:
    """A line for each post, with all ranks that left it."""
    ranks: dict[str, list[int]] = {}
    for rank, post in posts.items():
        ranks.setdefault(str(post), []).append(rank)
    return "\n".join(f"  {_named(several)}: {text}" for text, several in ranks.items())


def _named(ranks: Iterable[int]) -> str:
    several = sorted(ranks)
    return f"rank{'s' if len(several) > 1 else ''} {', '.join(map(str, several))}"


class Standing(NamedTuple):
    """Where a rank stands: how many steps it took, its last post, how many meetings of each name it came to, and the names and
    numbers of those that it came to last, where it may wait for others."""

    step: int
    post: Post
    came: dict[str, int]
    last: list[list[Any]]

    def written(self) -> str:
        """This as text."""
        return json.dumps(self)

    @staticmethod
    def read(text: bytes) -> Standing:
        """What such a text tells."""
        step, post, came, last = json.loads(text)
        return Standing(step, Post(*post), came, last)

    def awaits(self, rank: int, other: Standing) -> bool:
        """Whether another rank has not come yet to where this one came last."""
        return any(rank in _members(name) and other.came.get(name, 0) < number for name, number in self.last)


def _members(name: str) -> list[int]:
    """The ranks that come to a meeting, by its name."""
    return [int(rank) for rank in name.split(",")]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _gone(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"the job's store is gone, so the process that held it has ended ({reason}); look for its own error"


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
        number = _sessions[dist.group.WORLD] = _sessions.get(dist.group.WORLD, 0) + 1
        self.job, self.rank, self.timeout = dist.group.WORLD, dist.get_rank(), timeout
        self.fields = tuple(name for name in MUST if lines or name != "line")
        self.warned: set[str] = set()  # lines of sums that are not finite
        self._store: Any = job_store(f"shardwise/debug/{number}")
        self._came: Counter[str] = Counter()
        self._step = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._store.set(f"process/{self.rank}", this_process())
        self._store.set(f"at/{self.rank}", Standing(0, Post("none"), {}, []).written())
        self._life = threading.Thread(target=self._live, daemon=True, name="shardwise-debug")
        self._life.start()
        atexit.register(self._end_of_program)

    def enter(self) -> None:
        """Wait for all ranks of the job: one that left before others entered would not hear of their errors."""
        self.agree(Post("sw.debug_mode()", line=str(caller())), [range(dist.get_world_size())], ("kind",))

    def meet(self, post: Post, meetings: Sequence[Iterable[int]]) -> list[dict[int, Post]]:
        """Leave a post for each of several sets of ranks, this one among them; what all of each set left, when all have."""
        with self._lock:
            try:
                return self._meet(post, [",".join(map(str, sorted(ranks))) for ranks in meetings])
            except dist.DistError as error:
                raise MismatchError(f"rank {self.rank} was about to do {post}, and {_gone(error)}") from error

    def agree(self, post: Post, meetings: Sequence[Iterable[int]], fields: Iterable[str]) -> None:
        """Come to meetings, and raise, as all others will, if what is left there does not fit together."""
        for posts in self.meet(post, meetings):
            text = difference(posts, fields)
            if text:
                raise MismatchError(self._blame(text))

    def finish(self, wait: Callable[[], T]) -> T:
        """What a call gives that only waits, unless some rank fails meanwhile: then it is left behind, in a thread."""
        given: Future[T] = Future()
        threading.Thread(target=_fill, args=(given, wait), daemon=True, name="shardwise-waits").start()
        while True:
            with contextlib.suppress(TimeoutError):
                return given.result(LOOK)
            why = self.failure()
            if why:
                raise MismatchError(why)

    def failure(self) -> str:
        """Why some rank failed; nothing if none did."""
        return str(self._store.get("failed").decode()) if self._store.check(["failed"]) else ""

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
        self._ended.set()
        self._life.join(BEAT)

    # ── meetings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _meet(self, post: Post, names: list[str]) -> list[dict[int, Post]]:
        self._came.update(names)
        self._step += 1
        standing = Standing(self._step, post, self._came, [[name, self._came[name]] for name in names])
        keys = {f"{name}/{number}/{rank}": rank for name, number in standing.last for rank in _members(name)}
        told = {key: json.dumps(post) for key, rank in keys.items() if rank == self.rank}
        told[f"at/{self.rank}"] = standing.written()
        self._store.multi_set(list(told), list(told.values()))
        try:
            why = self._wait(keys, standing)
        except BaseException as error:
            self._give_up(standing, f"rank {self.rank} raised {_short(error)}, and was about to do {post}")
            raise
        words = {self._word(name, number, "stop" if why else "go") for name, number in standing.last}
        if words != {"go"}:
            raise MismatchError(why or self.failure())
        left = dict(zip(keys, self._store.multi_get(list(keys)), strict=True))
        self._forget(standing)
        named = [(name, f"{name}/{number}") for name, number in standing.last]
        return [{rank: Post(*json.loads(left[f"{key}/{rank}"])) for rank in _members(name)} for name, key in named]

    def _word(self, name: str, number: int, word: str) -> str:
        """The first word about a meeting: go or stop."""
        return str(self._store.compare_set(f"{name}/{number}/word", "", word).decode())

    def _give_up(self, standing: Standing, why: str) -> None:
        with contextlib.suppress(dist.DistError):
            self._blame(why)
            for name, number in standing.last:
                self._word(name, number, "stop")

    def _forget(self, standing: Standing) -> None:
        """Take back what was left at the meetings before: all have come to these, and so have read it."""
        for name, number in standing.last:
            if number > 1:
                self._store.delete_key(f"{name}/{number - 1}/{self.rank}")
                if self.rank == _members(name)[0]:
                    self._store.delete_key(f"{name}/{number - 1}/word")

    def _wait(self, keys: dict[str, int], standing: Standing) -> str:
        """Wait for all posts; nothing, or why they will not come."""
        every = list(keys)
        start = looked = time.monotonic()
        while not self._store.check(every):
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                late = {rank: key for key, rank in keys.items() if not self._store.check([key])}
                why = self.failure() or self._trouble(late, standing, now - start)
                if why:
                    return why
            time.sleep(min(_PAUSE, (now - start) / 4))
        return ""

    # ── what keeps the others ─────────────────────────────────────────────────────────────────────────────────────────

    def _trouble(self, late: dict[int, str], standing: Standing, waited: float) -> str:
        """Why the late ranks will not come, which all ranks are told; nothing if they still may."""
        found = [(rank, self._ended_how(rank)) for rank, key in late.items()]
        found = [(rank, how) for rank, how in found if how and not self._store.check([late[rank]])]
        found = found or [(rank, how) for rank in late if (how := self._death(rank))]
        if not found:
            ring = self._ring(standing)
            if ring:
                return self._blame(f"these ranks wait for each other, and none can go on:\n{_listed(ring)}")
        more = ""
        if not found and waited > self.timeout:
            found = [(rank, "lives") if self._at(rank) else (rank, "is not here") for rank in late]
            more = f"\nThey did not within {waited:.1f} s; if they are only slow, allow more by sw.debug_mode(timeout=...)."
        lines = [f"  rank {rank} {how}; {self._last(rank)}" for rank, how in found]
        head = f"rank {self.rank} waits for {_named(late)}:\n  rank {self.rank}: {standing.post}\n"
        return self._blame(head + "\n".join(lines) + more) if found else ""

    def _blame(self, text: str) -> str:
        """Leave word of a failure; the first word counts, and is given back."""
        return str(self._store.compare_set("failed", "", text).decode())

    def _ended_how(self, rank: int) -> str:
        key = f"end/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _at(self, rank: int) -> Standing | None:
        """Where a rank stands; None if it is not in the session."""
        key = f"at/{rank}"
        return Standing.read(self._store.get(key)) if self._store.check([key]) else None

    def _last(self, rank: int) -> str:
        at = self._at(rank)
        return "it has not entered sw.debug_mode()" if at is None else f"its last communication in the block: {at.post}"

    def _death(self, rank: int) -> str:
        """How a rank of the session has died; nothing if it lives. On this host its process is looked for. Elsewhere it has
        been silent for as long as ranks are waited for: one that lives may be in code that holds Python's lock."""
        if not self._store.check([f"at/{rank}"]):
            return ""
        if (ended := has_ended(self._store.get(f"process/{rank}").decode())) is not None:
            return "died: its process has ended" if ended else ""
        beats, now = int(self._store.add(f"beat/{rank}", 0)), time.monotonic()
        if rank not in self._heard or self._heard[rank][0] != beats:
            self._heard[rank] = (beats, now)
        silent = now - self._heard[rank][1] > max(self.timeout, 4 * BEAT)
        return "shows no life: its process has ended or hangs" if silent else ""

    def _ring(self, standing: Standing) -> dict[int, Post]:
        """Ranks that wait for each other in a ring, with what for; none if there are none.

        They are looked at one after the other, so that some may have moved meanwhile: it is a ring if they stand there still.
        """
        seen, waits = {self.rank: standing}, dict[int, list[int]]()
        while len(waits) < len(seen):
            rank = next(rank for rank in seen if rank not in waits)
            members = {member for name, _ in seen[rank].last for member in _members(name)}
            found = {member: seen.get(member) or self._at(member) for member in members}
            waits[rank] = [member for member, at in found.items() if at is not None and seen[rank].awaits(member, at)]
            seen.update({member: at for member, at in found.items() if at is not None and member in waits[rank]})
        while free := [rank for rank, others in waits.items() if not set(others) & waits.keys()]:
            for rank in free:  # it can go on, or waits for some that can
                del waits[rank]
        ring: list[int] = []
        rank = next(iter(waits), -1)
        while waits and rank not in ring:
            ring.append(rank)
            rank = next(other for other in waits[rank] if other in waits)
        ring = ring[ring.index(rank) :] if ring else []
        moved = any(other != self.rank and self._at(other) != seen[other] for other in ring)
        return {} if moved else {other: seen[other].post for other in sorted(ring)}

    # ── life and end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _live(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it everyone who would listen
            while not self._ended.wait(BEAT):
                self._store.add(f"beat/{self.rank}", 1)

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
        start = looked = time.monotonic()
        others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        others = [rank for rank in others if word == "end" or self._ended_how(rank)]
        while not self._store.check([f"{word}/{rank}" for rank in others]):
            now = time.monotonic()
            if now - start > seconds:
                break
            if heeds and now - looked > LOOK:
                looked = now
                late = [rank for rank in others if not self._ended_how(rank)]
                why = self.failure() or self._first_death(late)
                if why:
                    return why
            time.sleep(min(_PAUSE, (now - start) / 4))
        return self.failure()

    def _first_death(self, ranks: Iterable[int]) -> str:
        """What to say of the first of the ranks that died; nothing if none did."""
        for rank in ranks:
            if how := self._death(rank):
                return self._blame(f"rank {rank} {how}; {self._last(rank)}")
        return ""


class Checks:
    """What a block of `debug_mode` asks for, and its session, which begins when there is a job."""

    __slots__ = ("_begun", "_session", "lines", "timeout")

    def __init__(self, timeout: float | None, lines: bool, begun: Callable[[Session], None]) -> None:
        self.timeout, self.lines, self._begun = timeout, lines, begun
        self._session: Session | None = None

    def session(self) -> Session | None:
        """The session of this block in this job, entered if it has not been; None where this process works alone."""
        if self._session is not None and self._session.job is not dist.group.WORLD:
            self._session.end()
            self._session = None
        if self._session is None and in_job():
            self._session = Session(self.timeout, self.lines)
            self._session.enter()
            self._begun(self._session)
        return self._session

    def leave(self, error: BaseException | None) -> None:
        """Leave the session, also one that has not been entered: others may wait there."""
        session = self.session() if error is None else self._session
        if session is not None:
            session.leave(error)
