"""Messages over a process group: one launch, and every received tensor registered with the work that fills it.

Reads tensors with peers; waiting for what arrives is left to `wait_tensor`, which a traced program holds. Knows nothing of
meshes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.groups import coalesce, coalesces, register_work
from .._torch.tensors import collectives, is_alias
from ..errors import WorldError
from .encoding import packed
from .failures import guarded

#: Marks messages of batches: groups also carry what collectives and the user send.
TAG = 0x5358
#: So many batches that only send may be under way before the oldest is waited for.
_UNDER_WAY = 256
_sent: deque[list[Any]] = deque()


class Message(NamedTuple):
    """A tensor, and the rank of the group that it goes to or comes from."""

    x: Tensor
    peer: int


def deliver(going: Sequence[Message], coming: Sequence[Message], outs: Sequence[Tensor], group: Any) -> None:
    """Begin to send and to receive into the given tensors, which are among `outs`; whoever waits for one of these waits for all
    that was sent with it. What is sent is packed, and may be written to only then."""
    going = [Message(x, peer) for x, peer in going if x.numel()]
    coming = [Message(x, peer) for x, peer in coming if x.numel()]
    device = next((x.device for x, _ in (*going, *coming)), None)
    if device is not None and coalesces(group, device):
        with coalesce(group, device) as launched:  # also a message to oneself is one of it
            for x, peer in coming:
                group.recv([packed(x)], peer, 0)
            for x, peer in going:
                group.send([x], peer, 0)
        for work, x in product(launched.works, outs):
            register_work(x, work)
        return
    me = group.rank()
    _copy([x for x, peer in going if peer == me], [x for x, peer in coming if peer == me])
    for x, peer in coming:
        if peer != me:
            register_work(x, group.recv([packed(x)], peer, _tag(x)))
    works = [group.send([x], peer, _tag(x)) for x, peer in going if peer != me]
    if outs:
        for work in works:
            register_work(outs[0], work)
    elif works:
        _sent.append(works)
        if len(_sent) > _UNDER_WAY:
            finish(1)


def copied(x: Tensor) -> Tensor:
    """A tensor to send, so that the given one may be written to at once."""
    out = packed(x)
    return out.clone() if is_alias(out, x) else out


def _copy(going: Sequence[Tensor], coming: Sequence[Tensor]) -> None:
    """Messages to oneself."""
    if [x.numel() * x.element_size() for x in going] != [x.numel() * x.element_size() for x in coming]:
        raise WorldError(
            f"p2p.batch: a rank sends itself {len(going)} tensors of shapes {[list(x.shape) for x in going]} and expects "
            f"{len(coming)} of shapes {[list(x.shape) for x in coming]}; let both say the same"
        )
    for x, out in zip(going, coming, strict=True):
        packed(out).copy_(x)


def _tag(x: Tensor) -> int:
    """Messages of different lengths never meet: Gloo would fill a part of a longer tensor without a word."""
    return (TAG ^ (x.numel() * x.element_size() * 2654435761)) & 0x3FFFFFFF


@guarded
def finish(count: int | None = None) -> None:
    """Wait for batches that only sent, the oldest first."""
    for _ in range(len(_sent) if count is None else count):
        for work in _sent.popleft():
            work.wait()


@guarded
def arrived(x: Tensor) -> Tensor:
    """What was received, when it is there."""
    return collectives.wait_tensor.default(x)
