"""Point-to-point communication that compiles: batches of sends and receives, and what is made of them."""

from .batch import Peer, Receive, Send, batch, peer, recv, send, wait
from .halo import halo_exchange
from .moves import permute, shift
from .port import P2POp, batch_isend_irecv
from .rows import all_to_all_v

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
