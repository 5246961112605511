"""Point-to-point communication that compiles: batches of sends and receives, and patterns made of them.

In the order of imports, which go down only:

    batch         `batch`, `send`, `recv`, `wait`: messages that trace, forward and backward
    patterns      `shift`, `permute`, `halo_exchange`: communication between neighbours along an axis
    all_to_all_v  `all_to_all_v`: each rank sends a given number of rows to each rank along an axis
    torch_api     `batch_isend_irecv`, `P2POp`, with the arguments of those of torch
"""

from .all_to_all_v import all_to_all_v
from .batch import Peer, Receive, Send, batch, peer, recv, send, wait
from .patterns import halo_exchange, permute, shift
from .torch_api import P2POp, batch_isend_irecv

__all__ = [
    "P2POp",
    "Peer",
    "Receive",
    "Send",
    "all_to_all_v",
    "batch",
    "batch_isend_irecv",
    "halo_exchange",
    "peer",
    "permute",
    "recv",
    "send",
    "shift",
    "wait",
]
