"""Collectives of packages as Python operators, which release the interpreter's lock while they wait.

The thread that runs a package holds that lock. A backend's thread needs it to free tensors known to Python, possibly while it
holds a lock of the backend. If a collective began or waited in C++, the program would wait for the backend's lock while holding
the interpreter's, and the two threads would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from .._torch.tensors import collectives, schema

WAIT = collectives.wait_tensor.default
#: Collectives that write into a copy of what they are given, and those that read it until they are waited for.
WRITING = ("all_reduce", "broadcast", "all_reduce_coalesced")
READING = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)

# ── to begin ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _begins(begin: Any, reading: bool) -> Callable[..., Any]:
    def now(given: Tensor | list[Tensor], *args: Any) -> Any:
        if reading:  # of a copy: no compiler knows that the memory is in use until the wait
            given = given.clone() if isinstance(given, Tensor) else [x.clone() for x in given]
        return begin(given, *args)

    return now


_BEGIN: dict[Any, Any] = {}
for _name in (*WRITING, *READING):
    _known = getattr(collectives, _name).default
    _signature = str(schema(_known)).partition("(")[2]
    torch.library.define(f"shardwise::begin_{_name}", f"({_signature}")
    torch.library.impl(f"shardwise::begin_{_name}", "CompositeExplicitAutograd", _begins(_known, _name in READING))
    torch.library.register_fake(f"shardwise::begin_{_name}", _known)
    _BEGIN[_known] = getattr(torch.ops.shardwise, f"begin_{_name}").default

# ── to wait ───────────────────────────────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::end_collective", "(Tensor x) -> Tensor")
# a copy: the result of an operator must not share memory with its argument
torch.library.impl("shardwise::end_collective", "CompositeExplicitAutograd", lambda x: torch.clone(WAIT(x)))
torch.library.register_fake("shardwise::end_collective", torch.clone)


def carry(graph: Graph) -> None:
    """Replace the collectives of a program by these operators."""
    table = {**_BEGIN, WAIT: torch.ops.shardwise.end_collective.default}
    for node in graph.nodes:
        node.target = table.get(node.target, node.target)
