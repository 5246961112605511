"""Debug mode: before each communication the ranks that take part compare what they are about to do.

Reads a `Communication`, lets it happen if the ranks agree, and raises the same error on all of them if they do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import MismatchError, ShardwiseError
from ...layouts.mesh import Mesh
from ..source_lines import caller, callers
from .communication import Communication, Content, describe_tensor
from .log import watching
from .meeting import Intent, Session


def current_session() -> Session | None:
    """The session of the block of `debug_mode` around, in a job; else None."""
    watch = watching.get()
    return None if watch is None or watch.checks is None else watch.checks.session()


def announce_batch(
    session: Session, operator: str, send: Mapping[int, Sequence[Content]], receive: Mapping[int, Sequence[Content]]
) -> None:
    """Tell every rank that this one sends to or receives from, in one batch, what the messages are, in order. The n-th batch
    that two ranks have in common holds the same messages between them. Lines may differ, as a program that names ranks does."""
    intent = Intent("batch", operator, "", "", *_lines(), _texts(send), _texts(receive))
    peers = sorted({*send, *receive} - {session.rank})
    session.agree(intent, [(session.rank, peer) for peer in peers] or [(session.rank,)], ("kind",))


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
    return f"{describe_tensor(x.shape, x.dtype)} with digest {hashlib.blake2b(data, digest_size=6).hexdigest()}"


@contextlib.contextmanager
def compared(session: Session, communication: Communication) -> Iterator[None]:
    """Around a communication: before it the ranks that take part compare it, and an error in it says where it was. Where ranks
    know their own messages only, they compare with those that they send to or receive from."""
    ranks, place = communication.mesh.root.ranks, communication.mesh.root.place(session.rank)
    send, receive = (
        {} if messages is None or place is None else {ranks[peer]: several for peer, several in messages(place).items()}
        for messages in (communication.send, communication.receive)
    )
    if communication.alone:
        if place is not None:
            announce_batch(session, communication.operator, send, receive)
        yield
        return
    kind, detail, line = communication.kind, communication.detail, communication.line
    lines = (line, "in a captured program") if line else _lines()
    what = f"{kind}({detail})" if detail else kind, communication.operator, _group_text(communication.mesh, communication.axes)
    intent = Intent(*what, communication.value(), *lines, _texts(send), _texts(receive))
    members = group_ranks(communication.mesh, communication.axes, session)
    if len(members) > 1:
        session.agree(intent, [members], session.fields)
        if communication.detail in ("sum", "avg"):
            _warn_unbounded(session, intent, communication.tensors)
    try:
        yield
    except ShardwiseError:
        raise
    except RuntimeError as error:
        if why := session.failure():
            raise MismatchError(why) from error
        error.add_note(f"in {intent}")
        raise


def compare_fact(session: Session, fact: str, mesh: Mesh, operator: str) -> None:
    """Have all ranks of a mesh compare a text that must be the same on all."""
    ranks, group = group_ranks(mesh, mesh.root.axes, session), _group_text(mesh, mesh.root.axes)
    if len(ranks) > 1:
        intent = Intent("comparison", operator, group, "", *_lines(), fact=f"of {fact}")
        session.agree(intent, [ranks], session.fields)


def group_ranks(mesh: Mesh, axes: tuple[str, ...], session: Session) -> tuple[int, ...]:
    """The ranks of this rank's group, in its order; none if it is not in the mesh."""
    place = mesh.root.place(session.rank)
    return () if place is None else tuple(mesh.root.ranks[peer] for peer in mesh.root.peers(place, axes))


@contextlib.contextmanager
def errors_of_ranks() -> Iterator[None]:
    """Around programs that run outside of Python, whose errors are texts: ranks that disagree raise their own error again."""
    try:
        yield
    except RuntimeError as error:
        session = current_session()
        if session is not None and (why := session.failure()):
            raise MismatchError(why) from error
        raise


def _texts(messages: Mapping[int, Sequence[Content]]) -> dict[str, list[str]]:
    """Messages by rank, as an intent holds them."""
    return {str(rank): [describe_tensor(*content) for content in several] for rank, several in messages.items() if several}


def _lines() -> tuple[str, str]:
    """The line of the user's program, and the lines that led there."""
    first, *others = map(str, callers(3) or [caller()])
    return first, f"(from {', '.join(others)})" if others else ""


def _group_text(mesh: Mesh, axes: tuple[str, ...]) -> str:
    """A group as text, with everything in which two meshes can differ."""
    ranks = mesh.root.ranks
    order = f"0 to {len(ranks) - 1}" if ranks == tuple(range(len(ranks))) else ", ".join(map(str, ranks))
    return f"{', '.join(axes)} of {mesh.root!r} on {mesh.device} ranks {order}"


def _warn_unbounded(session: Session, intent: Intent, tensors: Sequence[Tensor]) -> None:
    """Warn once for a line where summands are not finite: operators may have run on each that one device runs on their sum."""
    if intent.line in session.warned or all(x.is_meta or bool(x.isfinite().all()) for x in tensors):
        return
    session.warned.add(intent.line)
    warnings.warn(
        f"{intent}: what rank {session.rank} adds up holds inf or nan. Where operators ran on summands before they were "
        "added up, the result may be nan where one device gives a number (inf - inf, inf * 0); where it matters, add up "
        "before such an operator, with x.redistribute(placements=[Replicate()])",
        RuntimeWarning,
        stacklevel=2,
    )
