"""What a change of layout costs on a mesh: seconds, from the latency and the bytes of each axis's links. Arithmetic on sizes.

The defaults describe nodes of accelerators; what matters for decisions is the ratio of a collective's latency to a byte.
`calibrate` puts measured numbers in their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..base.caches import CHOICES, cache_clear, memo
from ..layouts.mesh import Mesh


class Link(NamedTuple):
    """Launch latency of a collective in seconds, and seconds for each byte that a rank receives in it."""

    latency: float
    per_byte: float


#: An axis inside a machine: 50 GB/s to each rank.
ORDINARY = Link(2e-5, 1 / 50e9)
#: An axis between machines: 12.5 GB/s (100 Gbit/s) to each rank.
SLOW = Link(5e-5, 1 / 12.5e9)
#: Seconds to read or write a byte of local memory.
PER_LOCAL_BYTE = 1 / 1000e9
#: Seconds for one multiply-add.
PER_WORK = 1 / 50e12

#: What was measured, by the text of a mesh's root: it outlives the mesh, which may be made again.
_measured: dict[str, dict[str, Link]] = {}


def links(mesh: Mesh) -> dict[str, Link]:
    """The link of each axis of a mesh's root, as measured or else by whether the axis is slow.

    >>> links(Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated", slow="dp"))["dp"]
    Link(latency=5e-05, per_byte=8e-11)
    """
    root = mesh.root
    return _measured.get(root.text) or {axis: SLOW if axis in root.slow else ORDINARY for axis in root.axes}


def set_links(mesh: Mesh, measured: Mapping[str, Link]) -> None:
    """Let decisions and plans reckon with these links from now on; every rank must set the same."""
    for axis in measured:
        mesh.size_of(axis)
    _measured[mesh.root.text] = {**links(mesh), **measured}
    cache_clear(*CHOICES, "links of axes")


@memo("links of axes", limit=4096)
def route(mesh: Mesh, axes: tuple[str, ...]) -> Link:
    """What a collective over several axes together costs: their latencies' largest, and the mean second per byte received.

    A rank receives equally much from each of its peers, over the slowest link of those along which the two differ.

    >>> mesh = Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated", slow="dp")
    >>> route(mesh, ("dp", "tp")).latency, round(1e-9 / route(mesh, ("dp", "tp")).per_byte, 1)  # 4 of 7 peers are far: GB/s
    (5e-05, 18.4)
    """
    known, sizes = links(mesh), mesh.root.axis_sizes
    crossed = [axis for axis in axes if sizes[axis] > 1]
    ranks = near = math.prod([sizes[axis] for axis in crossed])
    peers: dict[float, int] = {}  # how many are reached at each speed
    for axis in sorted(crossed, key=lambda axis: -known[axis].per_byte):
        nearer = near // sizes[axis]
        speed = known[axis].per_byte
        peers[speed] = peers.get(speed, 0) + near - nearer
        near = nearer
    latency = max([known[axis].latency for axis in crossed], default=0.0)
    per_byte = sum(speed * (count / (ranks - 1)) for speed, count in peers.items())
    return Link(latency, float(per_byte))


def received(kind: str, nbytes: float, ranks: int) -> float:
    """Bytes that a rank receives in a collective to which each of `ranks` gives `nbytes`: an all_gather brings what the others
    hold, a reduce_scatter and an all_to_all bring one share from each of them, an all_reduce is a reduce_scatter of shares and
    an all_gather of their sums.

    >>> [received(kind, 8, 4) for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")]
    [24, 6.0, 6.0, 12.0]
    """
    if kind == "all_gather":
        return nbytes * (ranks - 1)
    return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


def collective(kind: str, nbytes: float, ranks: int, link: Link) -> float:
    """Seconds of a collective to which each of `ranks` gives `nbytes`."""
    return 0.0 if ranks == 1 else link.latency + received(kind, nbytes, ranks) * link.per_byte


def local(nbytes: float) -> float:
    """A local pass over `nbytes`."""
    return 1e-7 + nbytes * PER_LOCAL_BYTE


def change(have: int | str | None, want: int | str | None, nbytes: float, ranks: int, link: Link) -> float:
    """Moving an axis from one state to another: a dim (shard), a kind (partial) or None (replicated); a rank holds `nbytes`."""
    if have == want:
        return 0.0
    if have is None:
        return local(nbytes)
    if isinstance(have, str):
        if isinstance(want, int):
            return collective("reduce_scatter", nbytes, ranks, link)
        return collective("all_reduce", nbytes, ranks, link) + (0.0 if want is None else local(nbytes))
    if isinstance(want, int):
        return collective("all_to_all", nbytes, ranks, link)
    return collective("all_gather", nbytes, ranks, link) + (0.0 if want is None else local(nbytes * ranks))
