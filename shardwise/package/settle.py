"""How programs in packages wait for a collective: by an operator in Python, which lets other threads have the interpreter.

What runs a package holds the interpreter's lock. Were a wait in C++ to sleep with it, the backend's thread, which drops tensors
that Python knows of, could wait for the lock while the program waits for the thread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph

from .._torch import collectives

WAIT = collectives.wait_tensor.default

torch.library.define("shardwise::settle", "(Tensor x) -> Tensor")


def _settle(x: Tensor) -> Tensor:
    return torch.clone(WAIT(x))  # an operator gives back nothing that shares memory with what it took


torch.library.impl("shardwise::settle", "CompositeExplicitAutograd", _settle)
torch.library.register_fake("shardwise::settle", torch.clone)


def settle_all(graph: Graph) -> None:
    """Have a program wait by this operator."""
    for node in graph.nodes:
        if node.target is WAIT:
            node.target = torch.ops.shardwise.settle.default
