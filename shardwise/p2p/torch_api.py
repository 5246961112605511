"""`batch_isend_irecv`, `P2POp`: torch's batch of sends and receives, with its arguments, as a function that traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..base.argument_checks import a_tensor, instance, integer, optional, refuse, shown
from ..errors import OperatorError
from .batch import batch, recv, send


class P2POp:
    """What `torch.distributed.P2POp` says, and a compiled function may say, too: torch's own tracer refuses to make one."""

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if (peer is None) == (group_peer is None):
            raise OperatorError(
                "a P2POp names its peer by rank of the job or of the group, got "
                f"peer={shown(peer)}, group_peer={shown(group_peer)}"
            )
        if getattr(op, "__name__", "") not in (dist.isend.__name__, dist.irecv.__name__):
            refuse("P2POp: op", "torch.distributed.isend or torch.distributed.irecv", op)
        a_tensor(tensor, "P2POp: tensor")
        for name, rank in (("peer", peer), ("group_peer", group_peer)):
            optional(integer, rank, f"P2POp: {name}", 0)
        optional(instance, group, dist.ProcessGroup, "P2POp: group", "a torch.distributed.ProcessGroup")
        integer(tag, "P2POp: tag")
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        self.peer = peer if group_peer is None else group_peer if group is None else dist.get_global_rank(group, group_peer)


def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Tensor]:
    """For each operation of a list its tensor: the one that was sent, or what was received in the place of the given one, which
    is not written to. What is received waits when it is first used, or by `wait`.

    Peers are ranks of the job, so the program belongs to the rank that runs it. Takes torch's `P2POp` and, in compiled
    functions, the one here. Tags are left out: the n-th that one rank sends to another is the n-th that this one receives.
    """
    if not isinstance(p2p_op_list, list | tuple) or not p2p_op_list:
        refuse("batch_isend_irecv: p2p_op_list", "a list of P2POp", p2p_op_list)
    for op in p2p_op_list:
        instance(op, (P2POp, dist.P2POp), "batch_isend_irecv: one of p2p_op_list", "a P2POp")
    ops = [
        send(op.tensor, to=op.peer) if _sends(op) else recv(op.tensor.shape, op.tensor.dtype, source=op.peer)
        for op in p2p_op_list
    ]
    received = list(batch(ops))
    return [op.tensor if _sends(op) else received.pop(0) for op in p2p_op_list]


def _sends(op: Any) -> bool:
    return bool(op.op.__name__ == dist.isend.__name__)  # a tracer compares names, and not functions
