"""`calibrate`: the latency and the bandwidth of each axis, measured on the running world; every rank gets the same numbers.

What is measured is an all-gather through the transport in all groups over an axis at once, as in a run.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.mesh import Mesh
from ..planning.cost import PER_LOCAL_BYTE, Link, links, set_links
from .worlds import transport

WARM_UPS, ROUNDS = 1, 5
#: Bytes that a rank receives: few enough for latency alone, and enough for bandwidth alone, on a host and on an accelerator.
FEW, MANY_ON_HOST, MANY_ON_DEVICE = 64, 4 << 20, 64 << 20
#: All-gathers of few bytes in a row: ranks do not leave the one before at the same moment, and many hide that.
IN_A_ROW = 8
#: What noise may not go below: the shortest start that a clock tells, and local memory.
QUICKEST = Link(1e-7, PER_LOCAL_BYTE)


def calibrate(mesh: Mesh) -> dict[str, Link]:
    """Measure latency and bandwidth of every axis; decisions and plans on this mesh then reckon with them. Collective.

    Where time means nothing (simulated ranks, a fake process group) nothing is set, and the links are the ones assumed so far.

    >>> from shardwise import init_mesh
    >>> calibrate(init_mesh(dp=2, tp=4))["tp"]
    Link(latency=2e-05, per_byte=2e-11)
    """
    mesh = Mesh.from_torch(mesh)
    wide = [axis for axis in mesh.axes if mesh.axis_sizes[axis] > 1]
    has_clock = mesh.world == "processes" and not (dist.is_initialized() and dist.get_backend() == "fake")
    if has_clock and wide:
        many = MANY_ON_HOST if mesh.device == "cpu" else MANY_ON_DEVICE
        seconds = [(_seconds(mesh, axis, FEW, IN_A_ROW), _seconds(mesh, axis, many, 1)) for axis in wide]
        # A collective takes as long as its last rank; whatever else the machines do can only prolong it.
        agreed = _largest(torch.tensor(seconds, dtype=torch.float64, device=mesh.device), mesh).amin(-1).tolist()
        set_links(mesh, {axis: _link(short, long, many) for axis, (short, long) in zip(wide, agreed, strict=True)})
    return {axis: links(mesh)[axis] for axis in mesh.axes}


def _seconds(mesh: Mesh, axis: str, received: int, times: int) -> list[float]:
    """The time of an all-gather in which each rank receives so many bytes, or a few more, in every round."""
    x = torch.zeros(-(-received // (mesh.axis_sizes[axis] - 1)), dtype=torch.uint8, device=mesh.device)
    together = torch.zeros(1, device=mesh.device)
    finish = torch.get_device_module(torch.device(mesh.device)).synchronize
    found = []
    for _ in range(WARM_UPS + ROUNDS):
        _largest(together, mesh)
        finish()
        start = time.perf_counter()
        for _ in range(times):
            transport(mesh, "calibrate").all_gather(x, mesh, (axis,))
        finish()
        found.append((time.perf_counter() - start) / times)
    return found[WARM_UPS:]


def _largest(x: Tensor, mesh: Mesh) -> Tensor:
    """The largest on any rank, element by element; axis by axis, so that it needs no group that an axis does not have."""
    for axis in mesh.root.axes:
        x = transport(mesh, "calibrate").all_reduce(x, "max", mesh, (axis,))
    return x


def _link(short: float, long: float, received: int) -> Link:
    """Latency and seconds per byte, from the time that `FEW` bytes take and that of as many as were received.

    >>> _link(1e-4, 1.1e-3, FEW + 10**6)
    Link(latency=9.9936e-05, per_byte=1e-09)
    """
    per_byte = max((long - short) / (received - FEW), QUICKEST.per_byte)
    return Link(max(short - FEW * per_byte, QUICKEST.latency), per_byte)
