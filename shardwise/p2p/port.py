"""`batch_isend_irecv`: torch's batch of sends and receives, with the same arguments, as tensors that trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .batch import batch, recv, send


def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Tensor]:
    """For each `torch.distributed.P2POp` of a list its tensor: the one that was sent, or what was received in the place of the
    given one, which is not written to. What is received waits when it is first used, or by `wait`.

    Peers are ranks of the job, so the program belongs to the rank that runs it.
    """
    ops = [
        send(op.tensor, to=op.peer) if op.op is dist.isend else recv(op.tensor.shape, op.tensor.dtype, source=op.peer)
        for op in p2p_op_list
    ]
    received = iter(batch(ops))
    return [op.tensor if op.op is dist.isend else next(received) for op in p2p_op_list]
