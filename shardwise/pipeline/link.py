"""`Link`: what neighbouring stages of a pipeline send each other, shard by shard, and how the one learns what the other gives.

The rank at coordinate i of the pipeline's axis sends its shard to the rank at i + 1 that has the same coordinate along all
other axes, and its gradient comes back the same way.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tensors import tree_leaves, tree_map_only
from ..base.caches import memo
from ..comm import PerRank, transport
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..p2p import Receive, Send, batch, peer, recv, send, wait
from ..tensor.dtensor import DTensor, from_shards


@dataclass(frozen=True, slots=True)  # no tuple: it is one leaf of a structure
class Wire:
    """A tensor that a stage gives: its layout on the stage's mesh, nothing partial, and whether a gradient comes back."""

    layout: Layout
    flows: bool


class Contract(NamedTuple):
    """What a stage gives: a structure, in which wires stand for tensors."""

    value: Any

    @property
    def wires(self) -> list[Wire]:
        """The tensors."""
        return [leaf for leaf in tree_leaves(self.value) if isinstance(leaf, Wire)]

    @property
    def flowing(self) -> list[Wire]:
        """The tensors with gradients."""
        return [wire for wire in self.wires if wire.flows]

    @staticmethod
    def of(value: Any) -> tuple[Contract, list[DTensor]]:
        """The contract of what a stage gave, and the tensors in it."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensor)]
        return Contract(tree_map_only(DTensor, _wire, value)), tensors

    def filled(self, make: Callable[[Wire], Any]) -> Any:
        """The structure with what is made of each wire, in order, in its place."""
        return tree_map_only(Wire, make, self.value)


def _wire(x: DTensor) -> Wire:
    return Wire(x.layout.replace(stride=None), x.requires_grad)


class Message(NamedTuple):
    """A tensor that is sent, None on ranks that do not send it; and its layout on the mesh it is sent from."""

    x: DTensor | None
    layout: Layout


class Link(NamedTuple):
    """The ranks of two neighbouring stages as one mesh, and the meshes of both."""

    mesh: Mesh
    ends: tuple[Mesh, Mesh]

    @staticmethod
    def between(axis: Mesh, first: int) -> Link:
        """The link of the stages at `first` and behind it along an axis."""
        root, name = axis.root, axis.named(None)
        sizes = {**root.axis_sizes, name: 2}
        ranks = [rank for rank, (at,) in zip(root.ranks, root[name].coordinates, strict=True) if at in (first, first + 1)]
        mesh = Mesh(tuple(sizes), sizes.values(), ranks, root.device, root.world, None, root.slow, axis.grouping)
        return Link(mesh[name], (axis.at(first), axis.at(first + 1)))

    def exchange(self, forth: Sequence[Message], back: Sequence[Message]) -> tuple[list[Tensor], list[Tensor]]:
        """What comes of the messages in both directions, in one launch; it has to be waited for, also where it was sent."""
        ops = [op for end, several in enumerate((forth, back)) for message in several for op in self._ops(message, end)]
        found = list(batch(ops)) if ops else []
        return found[: len(forth)], found[len(forth) :]

    def _ops(self, message: Message, end: int) -> tuple[Send, Receive]:
        """A send and its receive; the first end sends to coordinate 1, the second to coordinate 0."""
        have, layout = self.ends[end], message.layout
        nothing = torch.empty(0, dtype=layout.dtype, device=self.mesh.device)
        with torch.no_grad():
            local = nothing if message.x is None else message.x.to_local()
        sent = transport(self.mesh).reseat(local, have, self.mesh.root, PerRank(lambda place: (0,)))
        ways = ([1, -1], [-1, 0]) if end == 0 else ([-1, 0], [1, -1])
        going, coming = (peer(self.mesh, permutation=way) for way in ways)
        return send(sent, going), recv(_landing(self, layout, 1 - end), layout.dtype, coming)

    def land(self, local: Tensor, layout: Layout, end: int) -> DTensor:
        """The tensor of which each rank of an end received its shard."""
        want = self.ends[end]
        target = layout.replace(mesh=want, stride=None)
        held = transport(self.mesh).reseat(wait(local), self.mesh.root, want, PerRank(target.local_shape))
        return from_shards(held.detach(), target)


@memo("pipeline shards", limit=1024)
def _landing(link: Link, layout: Layout, end: int) -> tuple[tuple[int, ...], ...]:
    """For each rank of a link the shape of what it receives; nothing at the end that sends."""
    want = link.ends[end]
    target, places = layout.replace(mesh=want), [want.place(rank) for rank in link.mesh.ranks]
    return tuple((0,) * target.ndim if place is None else target.local_shape(place) for place in places)


# ── what one stage tells others ───────────────────────────────────────────────────────────────────────────────────────


def announce(said: Contract | None, along: Mesh, speaker: int) -> Contract:
    """What the ranks at a coordinate of an axis say, on all ranks along it; others say None."""
    letters = b"" if said is None else pickle.dumps(said)
    mine = PerRank(lambda place: letters if along.coordinates[place] == (speaker,) else b"")
    world, device = transport(along, "pipeline"), torch.device(along.device)
    counts = world.all_reduce(world.each(_count, along, mine, device), "sum", along, along.axes)
    page = world.each(_page, along, mine, int(world.plain(counts)), device)
    return pickle.loads(bytes(world.plain(world.all_reduce(page, "sum", along, along.axes)).tolist()))


def _count(letters: bytes, device: torch.device) -> Tensor:
    return torch.tensor([len(letters)], device=device)


def _page(letters: bytes, count: int, device: torch.device) -> Tensor:
    return torch.tensor(list(letters or bytes(count)), dtype=torch.uint8, device=device)
