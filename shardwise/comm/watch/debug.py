"""`debug_mode`: before each communication the ranks that take part compare what they are about to do; `Checker`, a transport
around another transport that has them do so.

Reads what is asked of the transport, gives it on if the ranks agree, or the same error on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...base.argument_checks import flag, number, optional
from ...errors import MismatchError, ShardwiseError
from ...layouts.dtypes import DTYPES
from ...layouts.layout import PerRank
from ...layouts.mesh import Mesh, group_named
from ..aliases import listening
from ..delivery import arrived
from ..listener import asked, expected
from ..messages import Batch
from ..source_lines import caller, callers
from ..transport import Around, Counts, Transport
from .log import Recorder, Watch, watching
from .meeting import Checks, Post, Session

T = TypeVar("T")
#: The shape and the dtype of one message.
Message = tuple[Sequence[int], torch.dtype]


@contextlib.contextmanager
def debug_mode(timeout: float | None = None, lines: bool = True) -> Iterator[None]:
    """Inside the block the ranks of a job compare what they are about to communicate, each time before they do: the operator,
    the group, shapes and dtype, and the line of the program. Where they differ every rank raises the same `MismatchError`,
    with what each was about to do, instead of waiting forever; and where a rank does not come any more, because it raised,
    left the block, ended or died, or because ranks wait for each other.

    `timeout` is for how many seconds a rank that lives is waited for: by default, the time-out of the job. `lines=False` lets
    ranks meet from different lines. All ranks of the job enter and leave the block together. Programs that were captured,
    compiled or loaded from a package are compared too. So are, outside of these, the values of plain tensors that operators
    take for replicated, and what random numbers are made of. A rank that adds infinities or nan up warns, once for a line: such
    sums may differ from those of one device. Not seen are the collectives that the program asks of
    torch.distributed itself, and the making of groups. A rank that skips one of several communications of the same line and
    shapes is found when it leaves the block. In a simulated world there is nothing to compare.

    >>> with debug_mode(timeout=60):
    ...     pass
    """
    optional(number, timeout, "debug_mode: timeout", 0.0)
    flag(lines, "debug_mode: lines")
    now = watching.get() or Watch()
    if now.checks is not None:
        yield  # blocks inside one another are one
        return
    with contextlib.ExitStack() as told:
        checks = Checks(
            None if timeout is None else float(timeout),
            lines,
            lambda session: told.enter_context(listening(functools.partial(_overheard, session))),
        )
        try:
            checks.session()
            with watching.set(now._replace(checks=checks)):
                yield
        except BaseException as error:
            checks.leave(error)
            raise
        checks.leave(None)


# ── what ranks tell each other ────────────────────────────────────────────────────────────────────────────────────────


def current_session() -> Session | None:
    """The session of the block of `debug_mode` around, in a job; else None."""
    watch = watching.get()
    return None if watch is None or watch.checks is None else watch.checks.session()


def announce_batch(
    operator: str, send: Mapping[int, Sequence[Message]], receive: Mapping[int, Sequence[Message]], kind: str = "batch"
) -> None:
    """Tell every rank that this one sends to or receives from, in one batch, what the messages are, in order.

    The n-th batch that two ranks have in common must hold the same messages between them, each way. Lines may differ, since
    a program that names ranks does different things on them.
    """
    session = current_session()
    if session is None:
        return
    line, path = _lines()
    post = Post(kind, operator, "", "", line, path, parcels(send), parcels(receive))
    peers = sorted({*send, *receive} - {session.rank})
    session.agree(post, [(session.rank, peer) for peer in peers] or [(session.rank,)], ("kind",))


def finish(wait: Callable[[], T]) -> T:
    """What a call gives that does nothing but wait for messages that were begun; in a block of `debug_mode` it is left waiting,
    and every rank raises, if some rank fails meanwhile: in a batch with several ranks one of these may have found, after the
    others began, that it does not agree with another one."""
    session = current_session()
    return wait() if session is None else session.finish(wait)


def parcels(messages: Mapping[int, Sequence[Message]]) -> dict[str, list[str]]:
    """Messages by rank, as a post tells them."""
    return {str(rank): [shown(*message) for message in several] for rank, several in messages.items() if several}


def shown(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A tensor as `f32[4, 2]`."""
    return f"{DTYPES.get(dtype, str(dtype))}[{', '.join(map(str, shape))}]"


def compares(mesh: Mesh) -> bool:
    """Whether the ranks of a mesh compare what they do, now."""
    watch = watching.get()
    return watch is not None and watch.checks is not None and mesh.world == "processes"


def digest(x: Tensor) -> str:
    """A plain tensor as a text that tells its values apart from others.

    >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    data = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return f"{shown(x.shape, x.dtype)} with digest {hashlib.blake2b(data, digest_size=6).hexdigest()}"


def _lines() -> tuple[str, str]:
    """The line of the user's program, and how it came there."""
    first, *others = map(str, callers(3) or [caller()])
    return first, f"(from {', '.join(others)})" if others else ""


def group_text(mesh: Mesh, axes: tuple[str, ...]) -> str:
    """A group as text, with all that makes two meshes different ones."""
    ranks = mesh.root.ranks
    order = f"0 to {len(ranks) - 1}" if ranks == tuple(range(len(ranks))) else ", ".join(map(str, ranks))
    return f"{', '.join(axes)} of {mesh.root!r} on {mesh.device} ranks {order}"


# ── the collectives of programs ───────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _overheard(session: Session, alias: str, kind: str, tensors: Sequence[Tensor], going: Any, coming: Any) -> Iterator[None]:
    """Around a collective of a program, if this thread is in the block: before it the ranks of its group compare."""
    if current_session() is not session:
        yield
        return
    mesh, axes = group_named(alias)
    ranks = tuple(mesh.ranks[peer] for peer in mesh.peers(mesh.place(session.rank) or 0, axes))
    operator, line = expected()
    line, path = (line, "in a captured program") if line else _lines()
    post = Post(kind, operator, group_text(mesh, axes), " and ".join(shown(x.shape, x.dtype) for x in tensors), line, path)
    if going is not None:
        rest, dtype = tensors[0].shape[1:], tensors[0].dtype
        send, receive = (dict(zip(ranks, ([((n, *rest), dtype)] for n in counts), strict=True)) for counts in (going, coming))
        post = post._replace(value="", send=parcels(send), receive=parcels(receive))
    with _together(session, post, ranks, tensors):
        yield


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Around what runs programs outside of Python: errors come out of it as texts, and that of ranks that disagree is raised as
    such again."""
    try:
        yield
    except RuntimeError as error:
        session = current_session()
        why = "" if session is None else session.failure()
        if why:
            raise MismatchError(why) from error
        raise


@contextlib.contextmanager
def _together(session: Session, post: Post, ranks: Sequence[int], tensors: Sequence[Tensor] = ()) -> Iterator[None]:
    """Around a communication of these ranks: before it they compare, and what goes wrong in it says where. What is communicated
    is looked at if it is added up."""
    if len(ranks) > 1:
        session.agree(post, [ranks], session.fields)
        if post.kind.endswith(("(sum)", "(avg)")):
            _tell_unbounded(session, post, tensors)
    try:
        with asked.set(True):
            yield
    except ShardwiseError:
        raise
    except RuntimeError as error:
        why = session.failure()
        if why:
            raise MismatchError(why) from error
        error.add_note(f"in {post}")
        raise


def _tell_unbounded(session: Session, post: Post, tensors: Sequence[Tensor]) -> None:
    """Warn, on this rank and once for a line, where summands are not finite: an operator may have been applied to each of them
    that one device applies to their sum."""
    if post.line in session.warned or all(x.is_meta or bool(x.isfinite().all()) for x in tensors):
        return
    session.warned.add(post.line)
    warnings.warn(
        f"{post}: what rank {session.rank} adds up holds inf or nan. Where operators ran on summands before they were "
        "added up, the result may be nan where one device gives a number (inf - inf, inf * 0); where it matters, add up "
        "before such an operator, with x.redistribute(placements=[Replicate()])",
        RuntimeWarning,
        stacklevel=2,
    )


# ── the transport ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def watched_transport(transport: Transport, world: str, operator: str, watch: Watch) -> Transport:
    """A transport with everything around it that watches now."""
    session = watch.checks.session() if watch.checks is not None and world == "processes" else None
    if session is not None:
        transport = Checker(transport, operator, session)
    return Recorder(transport, operator) if watch.logs else transport


class Checker(Around):
    """A transport through which a rank goes when all that take part are about to go through with the same."""

    __slots__ = ("_operator", "_session")

    def __init__(self, transport: Transport, operator: str, session: Session) -> None:
        super().__init__(transport)
        self._operator, self._session = operator, session

    def _check(self, kind: str, x: Tensor, mesh: Mesh, axes: tuple[str, ...], **words: Any) -> Any:
        if self._transport.traced(x):
            return contextlib.nullcontext()
        value = words.pop("value", None)
        value = shown(x.shape, x.dtype) if value is None else value
        post = Post(kind, self._operator, group_text(mesh, axes), value, *_lines(), **words)
        return _together(self._session, post, self._ranks(mesh, axes), [x])

    def _ranks(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of this rank's group, in its order; none if it is not in the mesh."""
        place = self._transport.place(mesh)
        return tuple(mesh.root.ranks[peer] for peer in mesh.root.peers(place, axes)) if place >= 0 else ()

    def _parcels(self, counts: Counts, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, list[str]]:
        """So many elements for each of this rank's group, as a post tells them."""
        ranks = () if self._transport.traced(x) else self._ranks(mesh, axes)
        if not ranks:
            return {}
        here = counts.at(self._transport.place(mesh)) if isinstance(counts, PerRank) else counts
        return parcels({rank: [((count,), x.dtype)] for rank, count in zip(ranks, here, strict=True)})

    def all_reduce(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Compare, then reduce."""
        with self._check(f"all_reduce({kind})", x, mesh, axes):
            return self._transport.all_reduce(x, kind, mesh, axes)

    def all_gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Compare, then gather."""
        with self._check("all_gather", x, mesh, axes):
            return self._transport.all_gather(x, mesh, axes)

    def reduce_scatter(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Compare, then reduce and scatter."""
        with self._check(f"reduce_scatter({kind})", x, mesh, axes):
            return self._transport.reduce_scatter(x, kind, mesh, axes)

    def all_to_all(self, x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Compare what each sends with what the other expects, then exchange."""
        going, coming = (self._parcels(counts, x, mesh, axes) for counts in (send, receive))
        with self._check("all_to_all", x, mesh, axes, value="", send=going, receive=coming):
            return self._transport.all_to_all(x, send, receive, mesh, axes)

    def exchange(self, sent: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """Compare what each sends with what the other expects, then begin; ranks that know of their own messages only compare
        with those they send to or receive from, and wait for what comes at once."""
        place = self._transport.place(batch.mesh)
        if place < 0:
            return self._transport.exchange(sent, batch)
        ranks = batch.mesh.root.ranks
        going: dict[int, list[Message]] = {}
        coming: dict[int, list[Message]] = {}
        for index, goal in batch.going(place):
            going.setdefault(ranks[goal], []).append((tuple(sent[index].shape), sent[index].dtype))
        for index, source in batch.coming(place):
            coming.setdefault(ranks[source], []).append((batch.shape(index, place), batch.dtypes[index]))
        if batch.alone:
            announce_batch(self._operator, going, coming)
            outs = self._transport.exchange(sent, batch)
            return finish(lambda: [arrived(out) for out in outs])
        words = (group_text(batch.mesh, batch.axes), "", *_lines(), parcels(going), parcels(coming))
        with _together(self._session, Post("exchange", self._operator, *words), self._ranks(batch.mesh, batch.axes)):
            return self._transport.exchange(sent, batch)

    def agree(self, fact: str, mesh: Mesh, due: bool) -> None:
        """Compare what must be the same on all."""
        ranks = self._ranks(mesh, mesh.root.axes)
        if len(ranks) > 1:
            post = Post("comparison", self._operator, group_text(mesh, mesh.root.axes), "", *_lines(), fact=f"of {fact}")
            self._session.agree(post, [ranks], self._session.fields)

    def broadcast(self, x: Tensor, mesh: Mesh, source: int = 0) -> Tensor:
        """Compare, then broadcast."""
        with self._check("broadcast", x, mesh, mesh.sorted_axes(mesh.axes)):
            return self._transport.broadcast(x, mesh, source)

    def shapes(self, x: Tensor, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Compare that all ask, then ask."""
        with self._check("shapes", x, mesh, mesh.root.axes, value=DTYPES.get(x.dtype, str(x.dtype))):
            return self._transport.shapes(x, mesh)
