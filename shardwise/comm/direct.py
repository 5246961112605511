"""Collectives on hosts by sending straight to every peer: quicker than Gloo's own, which go around a ring, rank by rank.

Reads a tensor and a Gloo process group, gives a tensor. Results are combined in the order of the group, so that all ranks have
the same bits, and the same as in a simulated world. Knows nothing of meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import dispatch_modes
from .wire import combine

#: Marks what is ours: the group of the whole job also carries what its user sends.
TAG = 0x5357
#: Up to so many bytes are gathered from all and reduced by each: one round instead of two.
FEW = 1 << 14


def is_eager(x: Tensor) -> bool:
    """Whether a tensor is an ordinary one and nothing records what is done to it."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and not dispatch_modes()


def all_gather(x: Tensor, group: Any) -> Tensor:
    """The group's tensors, concatenated along dim 0."""
    mine = _flat(x)
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _swap([mine] * group.size(), out.view(group.size(), -1).unbind(), group)
    return out


def reduce_scatter(x: Tensor, kind: str, group: Any) -> Tensor:
    """This rank's equal chunk of dim 0 of the group's tensors, reduced."""
    shape = (x.shape[0] // group.size(), *x.shape[1:])
    return _scattered(_flat(x), kind, group).view(shape)


def all_reduce(x: Tensor, kind: str, group: Any) -> Tensor:
    """The group's tensors, reduced."""
    flat, n = _flat(x), group.size()
    if flat.numel() * x.element_size() <= FEW or flat.numel() < n:
        return combine(all_gather(flat[None], group).unbind(), kind).view(x.shape)
    whole = flat.numel()
    if whole % n:
        flat = torch.cat([flat, flat[: n - whole % n]])  # any values will do: they are cut off again
    return all_gather(_scattered(flat, kind, group), group)[:whole].view(x.shape)


def _flat(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().reshape(-1).contiguous()


def _scattered(flat: Tensor, kind: str, group: Any) -> Tensor:
    parts = flat.view(group.size(), -1).unbind()
    received = torch.empty_like(flat).view(group.size(), -1).unbind()
    _swap(parts, received, group)
    return combine(received, kind)


def _swap(going: Sequence[Tensor], coming: Sequence[Tensor], group: Any) -> None:
    """Send one tensor to each of the group and receive one from each, nearest first."""
    n, me = group.size(), group.rank()
    peers = [(me + i) % n for i in range(1, n)]
    works = [group.recv([coming[peer]], peer, TAG) for peer in reversed(peers)]
    works += [group.send([going[peer]], peer, TAG) for peer in peers]
    coming[me].copy_(going[me])
    for work in works:
        work.wait()
