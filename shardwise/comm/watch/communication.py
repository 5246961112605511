"""`Communication`: one communication that is about to happen, as logs record it and as ranks compare it in debug mode.

Made where a transport or a process group is asked for it. Knows nothing of logs and sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...layouts.dtypes import DTYPES
from ...layouts.layout import PerRank
from ...layouts.mesh import Mesh
from ...planning.cost import received
from ..messages import Batch
from ..simulated import Bundle
from ..transport import Counts

#: The shape and the dtype of one message.
Content = tuple[Sequence[int], torch.dtype]
#: For a place of the mesh: the messages that it sends to, or receives from, each other place, in order.
Messages = Callable[[int], Mapping[int, Sequence[Content]]]


class Communication(NamedTuple):
    """What is communicated, over which axes of a mesh.

    tensors        what this rank gives to a collective
    detail         the reduction, as `sum`, or who broadcasts
    operator       for which operator; `line`: the user's line, where a captured program knows it
    places         where ranks send each other different amounts: the places whose messages are known here
    send, receive  the messages of each place
    alone          whether a rank knows its own messages only
    """

    kind: str
    mesh: Mesh
    axes: tuple[str, ...]
    tensors: Sequence[Tensor] = ()
    detail: str = ""
    operator: str = ""
    line: str = ""
    places: Iterable[int] = ()
    send: Messages | None = None
    receive: Messages | None = None
    alone: bool = False

    def received(self) -> int:
        """The bytes that the worst rank receives from others; -1 where no rank does."""
        if self.receive is not None:
            return max(_from_others(self.receive(place), place) for place in self.places)
        ranks, size = len(self.mesh.peers(0, self.axes)), sum(map(self._size, self.tensors))
        if ranks == 1:
            return -1
        kind = "all_gather" if self.kind == "shapes" else self.kind
        return size if kind == "broadcast" else int(received(kind, size, ranks))

    def _size(self, x: Tensor) -> int:
        """The bytes of the largest shard; where ranks tell their shapes, those of a shape."""
        if self.kind == "shapes":
            return 8 * (x.ndim + 1)
        return x.element_size() * max(shard.numel() for shard in (x.shards if isinstance(x, Bundle) else (x,)))

    def value(self) -> str:
        """What this rank gives, as text."""
        if self.kind == "shapes":
            return DTYPES.get(self.tensors[0].dtype, str(self.tensors[0].dtype))
        return "" if self.send is not None else " and ".join(describe_tensor(x.shape, x.dtype) for x in self.tensors)


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A tensor as `f32[4, 2]`."""
    return f"{DTYPES.get(dtype, str(dtype))}[{', '.join(map(str, shape))}]"


def rows_for_each(counts: Counts, mesh: Mesh, axes: tuple[str, ...], x: Tensor) -> Messages:
    """Messages to or from each of a group, of so many rows of a tensor."""
    rest, dtype = x.shape[1:], x.dtype

    def at(place: int) -> Mapping[int, Sequence[Content]]:
        here = counts.at(place) if isinstance(counts, PerRank) else counts
        return {peer: [((n, *rest), dtype)] for peer, n in zip(mesh.root.peers(place, axes), here, strict=True)}

    return at


def _grouped(messages: Iterable[tuple[int, Content]]) -> Mapping[int, Sequence[Content]]:
    found: dict[int, list[Content]] = {}
    for place, content in messages:
        found.setdefault(place, []).append(content)
    return found


def _from_others(messages: Mapping[int, Sequence[Content]], place: int) -> int:
    others = [content for other, several in messages.items() if other != place for content in several]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in others) if others else -1


# ── the verbs of a transport ──────────────────────────────────────────────────────────────────────────────────────────


def _all_to_all(x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Communication:
    going, coming = (rows_for_each(counts, mesh, axes, x) for counts in (send, receive))
    return Communication("all_to_all", mesh, axes, (x,), places=range(len(mesh.ranks)), send=going, receive=coming)


def _exchange(sent: Sequence[Tensor], batch: Batch) -> Communication:
    def going(place: int) -> Mapping[int, Sequence[Content]]:
        return _grouped((goal, (tuple(sent[i].shape), sent[i].dtype)) for i, goal in batch.going(place))

    def coming(place: int) -> Mapping[int, Sequence[Content]]:
        return _grouped((source, (batch.shape(i, place), batch.dtypes[i])) for i, source in batch.coming(place))

    what = Communication("exchange", batch.mesh, batch.axes, send=going, receive=coming, alone=batch.alone)
    return what._replace(places=range(len(batch.mesh.ranks)))


#: What each verb of a transport that communicates is about to do, from its arguments.
COMMUNICATIONS: dict[str, Callable[..., Communication]] = {
    "all_reduce": lambda x, kind, mesh, axes: Communication("all_reduce", mesh, axes, (x,), kind),
    "all_gather": lambda x, mesh, axes: Communication("all_gather", mesh, axes, (x,)),
    "reduce_scatter": lambda x, kind, mesh, axes: Communication("reduce_scatter", mesh, axes, (x,), kind),
    "all_to_all": _all_to_all,
    "exchange": _exchange,
    "broadcast": lambda x, mesh, source=0: Communication("broadcast", mesh, mesh.sorted_axes(mesh.axes), (x,)),
    "shapes": lambda x, mesh: Communication("shapes", mesh, mesh.root.axes, (x,)),
}
