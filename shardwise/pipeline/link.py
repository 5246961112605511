"""Communication between neighbouring stages of a pipeline: activations, gradients, and what a stage's outputs look like.

The rank at coordinate i of the pipeline's axis sends its shard to the rank at i + 1 that has the same coordinates along all
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
class OutputSpec:
    """An output tensor of a stage: its layout on the stage's mesh, nothing partial, and whether a gradient comes back."""

    layout: Layout
    flows: bool


class Contract(NamedTuple):
    """The outputs of a stage: a nested structure with an `OutputSpec` for each tensor."""

    value: Any

    def specs(self, flowing: bool = False) -> list[OutputSpec]:
        """The tensors, or only those with gradients."""
        return [leaf for leaf in tree_leaves(self.value) if isinstance(leaf, OutputSpec) and leaf.flows >= flowing]

    @staticmethod
    def of(value: Any) -> tuple[Contract, list[DTensor]]:
        """The contract of the outputs of a stage, and the tensors in them."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensor)]
        specs = tree_map_only(DTensor, lambda x: OutputSpec(x.layout.replace(stride=None), x.requires_grad), value)
        return Contract(specs), tensors

    def filled(self, make: Callable[[OutputSpec], Any]) -> Any:
        """The structure with what `make` gives for each spec, in order."""
        return tree_map_only(OutputSpec, make, self.value)


#: A tensor to send, None on ranks that do not send it; and its layout on the mesh it is sent from.
Outgoing = tuple[DTensor | None, Layout]


class StageLink(NamedTuple):
    """The ranks of two neighbouring stages as one mesh, and the meshes of both."""

    mesh: Mesh
    ends: tuple[Mesh, Mesh]

    @staticmethod
    def between(axis: Mesh, first: int) -> StageLink:
        """The link of the stages `first` and `first + 1` along an axis."""
        root, name = axis.root, axis.named(None)
        sizes = {**root.axis_sizes, name: 2}
        ranks = [rank for rank, (at,) in zip(root.ranks, root[name].coordinates, strict=True) if at in (first, first + 1)]
        mesh = Mesh(tuple(sizes), sizes.values(), ranks, root.device, root.world, None, root.slow, axis.grouping)
        return StageLink(mesh[name], (axis.at(first), axis.at(first + 1)))

    def exchange(self, forth: Sequence[Outgoing], back: Sequence[Outgoing]) -> tuple[list[Tensor], list[Tensor]]:
        """Send tensors in both directions, in one launch; gives what arrives, to be waited for, also by the senders."""
        ops = [op for end, several in enumerate((forth, back)) for message in several for op in self._ops(*message, end)]
        found = list(batch(ops)) if ops else []
        return found[: len(forth)], found[len(forth) :]

    def _ops(self, x: DTensor | None, layout: Layout, end: int) -> tuple[Send, Receive]:
        """A send and its receive; the first end sends to coordinate 1, the second to coordinate 0."""
        with torch.no_grad():
            local = torch.empty(0, dtype=layout.dtype, device=self.mesh.device) if x is None else x.to_local()
        sent = transport(self.mesh).reseat(local, self.ends[end], self.mesh.root, PerRank(lambda place: (0,)))
        going, coming = (peer(self.mesh, permutation=way) for way in (([1, -1], [-1, 0]), ([-1, 0], [1, -1]))[end])
        return send(sent, going), recv(_landing(self, layout, 1 - end), layout.dtype, coming)

    def land(self, local: Tensor, layout: Layout, end: int) -> DTensor:
        """The tensor at an end of the link whose shards its ranks received."""
        want = self.ends[end]
        target = layout.replace(mesh=want, stride=None)
        held = transport(self.mesh).reseat(wait(local), self.mesh.root, want, PerRank(target.local_shape))
        return from_shards(held.detach(), target)


@memo("pipeline shards", limit=1024)
def _landing(link: StageLink, layout: Layout, end: int) -> tuple[tuple[int, ...], ...]:
    """The shape that each rank of a link receives; empty at the end that sends."""
    want = link.ends[end]
    target, places = layout.replace(mesh=want), [want.place(rank) for rank in link.mesh.ranks]
    return tuple((0,) * target.ndim if place is None else target.local_shape(place) for place in places)


# ── announcing contracts ──────────────────────────────────────────────────────────────────────────────────────────────


def announce(contract: Contract | None, along: Mesh, speaker: int) -> Contract:
    """The contract that the ranks at coordinate `speaker` of an axis give, on all ranks along it; others give None."""
    text = b"" if contract is None else pickle.dumps(contract)
    mine = PerRank(lambda place: text if along.coordinates[place] == (speaker,) else b"")
    world = transport(along, "pipeline")

    def summed(make: Callable[[bytes], list[int]], dtype: torch.dtype) -> Tensor:
        each = world.each(lambda own: torch.tensor(make(own), dtype=dtype, device=along.device), along, mine)
        return world.plain(world.all_reduce(each, "sum", along, along.axes))

    count = int(summed(lambda own: [len(own)], torch.int64))
    return pickle.loads(bytes(summed(lambda own: list(own or bytes(count)), torch.uint8).tolist()))
