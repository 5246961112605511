"""`batch_isend_irecv`, `P2POp`: torch's batch of sends and receives, with the same arguments, as tensors that trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

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
                f"a P2POp names its peer by rank of the job or of the group, got peer={peer}, group_peer={group_peer}"
            )
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        self.peer = peer if group_peer is None else group_peer if group is None else dist.get_global_rank(group, group_peer)


def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Tensor]:
    """For each operation of a list its tensor: the one that was sent, or what was received in the place of the given one, which
    is not written to. What is received waits when it is first used, or by `wait`.

    Peers are ranks of the job, so the program belongs to the rank that runs it. Takes torch's `P2POp` and, in compiled
    functions, the one here. Tags are left out: the n-th that one rank sends to another is the n-th that this one receives.
    """
    ops = [
        send(op.tensor, to=op.peer) if _sends(op) else recv(op.tensor.shape, op.tensor.dtype, source=op.peer)
        for op in p2p_op_list
    ]
    received = list(batch(ops))
    return [op.tensor if _sends(op) else received.pop(0) for op in p2p_op_list]


def _sends(op: Any) -> bool:
    return bool(op.op.__name__ == dist.isend.__name__)  # a tracer compares names, and not functions
