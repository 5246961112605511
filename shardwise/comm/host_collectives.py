"""Collectives on hosts, by messages to every peer: quicker than Gloo's own, which go around a ring, rank by rank.

Reads a tensor and a Gloo process group, gives a tensor. Results are combined in the order of the group, so that all ranks have
the same bits, and the same as in a simulated world. Knows nothing of meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import dispatch_modes
from .encoding import combine, combine_into

#: Marks what is ours: the group of the whole job also carries what its user sends.
TAG = 0x5357
#: Up to so many bytes of all ranks together are gathered and reduced by each: one round instead of two.
FEW = 1 << 20
_ORDINARY = (Tensor, torch.nn.Parameter)


def is_eager(x: Tensor) -> bool:
    """Whether a tensor is an ordinary one and nothing records what is done to it."""
    return not torch.compiler.is_compiling() and type(x) in _ORDINARY and not dispatch_modes()


def direct_all_gather(x: Tensor, group: Any) -> Tensor:
    """The group's tensors, concatenated along dim 0."""
    mine, me = _flat(x), group.rank()
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    parts = out.view(group.size(), -1).unbind()
    works = _swap([mine] * group.size(), parts, group)
    parts[me].copy_(mine)
    _wait(works)
    return out


def direct_reduce_scatter(x: Tensor, kind: str, group: Any) -> Tensor:
    """This rank's equal chunk of dim 0 of the group's tensors, reduced."""
    parts = _flat(x).view(group.size(), -1)
    part = _scatter(parts, torch.empty_like(parts), kind, group)
    return part.clone().view(x.shape[0] // group.size(), *x.shape[1:])


def direct_all_reduce(x: Tensor, kind: str, group: Any) -> Tensor:
    """The group's tensors, reduced."""
    flat, n = _flat(x), group.size()
    whole = flat.numel()
    if whole * n * x.element_size() <= FEW:
        return combine(direct_all_gather(flat[None], group).unbind(), kind).view(x.shape)
    if whole % n:
        flat = torch.cat([flat, flat.new_zeros(n - whole % n)])
    parts = flat.view(n, -1)
    out = torch.empty_like(parts)
    mine = _scatter(parts, out, kind, group)
    _wait(_swap([mine] * n, out.unbind(), group))
    return out.view(-1)[:whole].view(x.shape)


def _flat(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().reshape(-1).contiguous()


def _scatter(parts: Tensor, room: Tensor, kind: str, group: Any) -> Tensor:
    """This rank's part, reduced, in its own row of `room`; the other rows may be anything then."""
    me = group.rank()
    _wait(_swap(parts.unbind(), room.unbind(), group))
    every = [parts[me] if i == me else room[i] for i in range(group.size())]
    return combine_into(room[me], every, kind)


def _swap(going: Sequence[Tensor], coming: Sequence[Tensor], group: Any) -> list[Any]:
    """Begin to send a tensor to each other of the group and to receive one from each, nearest first."""
    n, me = group.size(), group.rank()
    peers = [(me + i) % n for i in range(1, n)]
    works = [group.recv([coming[peer]], peer, TAG) for peer in reversed(peers)]
    return works + [group.send([going[peer]], peer, TAG) for peer in peers]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
