"""Point-to-point communication that compiles: batches of sends and receives, and what is made of them."""

from .batch import Peer, Receive, Send, batch, peer, recv, send, wait
from .moves import halo_exchange, permute, shift
from .port import batch_isend_irecv

__all__ = [
    "Peer",
    "Receive",
    "Send",
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
