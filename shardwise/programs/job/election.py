"""Elects the rank that compiles a program, and passes the result to the other ranks through the job's store.

`Post` passes bytes between ranks; an `Election` is held for one key. Knows nothing of programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...comm.store import Heartbeat, Pulse, has_ended, store_gone, this_process, topic_store, wait_for
from ...errors import CompileError

#: Seconds between two signs of life of a rank that compiles.
BEAT = 1.0
#: After so many seconds without one it is taken for dead, on another host: one that lives may be in code that holds Python's
#: lock for a while, or on a machine with far too much to do. On this host its process is looked for.
SILENCE = 30.0
#: The longest pause between two looks, in seconds: of many ranks, all look at one store.
_PAUSE = 0.5
#: Bytes of one value in the store; torch's TCP store takes at most 8 MiB.
_CHUNK = 4 << 20
_REMEDY = "look for its own error in the job's output, and start the job again"


class Post:
    """Named bytes in the job's store. The same topic again, in the same job, starts empty."""

    def __init__(self, topic: str) -> None:
        self.store: Any = topic_store(topic)

    def put(self, name: str, data: bytes) -> None:
        """Leave bytes of any size; they are seen all at once."""
        chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
        for index, chunk in enumerate(chunks):
            self.store.set(f"{name}/{index}", chunk)
        self.store.set(name, str(len(chunks)))

    def get(self, name: str) -> bytes:
        """What was left under a name, or nothing."""
        chunks = int(self.store.get(name)) if self.store.check([name]) else 0
        return b"".join(self.store.get(f"{name}/{index}") for index in range(chunks))

    def wait(self, name: str, trouble: Callable[[float], str]) -> bytes:
        """What is left under a name, once it is; `trouble(seconds)` may tell why to wait no longer."""
        if why := wait_for(self.store, [name], trouble, pause=_PAUSE):
            raise CompileError(why)
        return self.get(name)


class Election:
    """The first rank to come leads: it compiles, gives signs of life, and publishes its result or its error."""

    def __init__(self, key: str, timeout: float) -> None:
        self.key, self.timeout, self._leader = key, timeout, "?"
        try:
            self._post = Post(f"compile/{key}")
            self.leads = self._post.store.add("claims", 1) == 1
            if self.leads:
                self._post.put("process", this_process().encode())
                self._post.put("leader", str(dist.get_rank()).encode())
        except dist.DistError as error:
            raise CompileError(
                f"rank {dist.get_rank()} cannot ask who compiles program {key}: {store_gone(error, _REMEDY)}"
            ) from None
        self._pulse = Pulse(self._post.store, "beats")
        self._life = Heartbeat(self._post.store, "beats", BEAT) if self.leads else None

    def end(self) -> None:
        """Stop telling that this rank lives."""
        if self._life is not None:
            self._life.stop()

    def fail(self, error: BaseException) -> None:
        """Leave the others word of why there is nothing."""
        if self.leads:
            self._post.put("error", f"{type(error).__name__}: {error}".encode())

    def publish(self, data: bytes) -> None:
        """Leave what was compiled for the others."""
        self._post.put("made", data)

    def wait(self) -> bytes:
        """What the leader made."""
        try:
            return self._post.wait("made", self._trouble)
        except dist.DistError as error:
            raise CompileError(f"{self._waiting()}, and {store_gone(error, _REMEDY)}") from None

    def _trouble(self, waited: float) -> str:
        leader, process, error = (self._post.get(name).decode() for name in ("leader", "process", "error"))
        self._leader = leader or "?"
        if error:
            return f"{self._waiting()}, and it failed there with {error}"
        silent, ended = self._pulse.silence(), has_ended(process) if process else None
        if ended or (ended is None and silent > SILENCE):
            return (
                f"{self._waiting()} for {waited:.1f} s, and has not heard of it for {silent:.1f} s: its process has ended or "
                f"hangs; {_REMEDY}"
            )
        if waited > self.timeout:
            return (
                f"{self._waiting()} for {waited:.1f} s, and it has not finished; allow more than timeout={self.timeout:g} s "
                "in sw.compile, or ship what an earlier job compiled (sw.save_artifacts, sw.load_artifacts)"
            )
        return ""

    def _waiting(self) -> str:
        return f"rank {dist.get_rank()} waited for rank {self._leader} to compile program {self.key}"
