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

#: Collectives that write into a copy of what they are given, and those that read it until they are waited for.
WRITING = ("all_reduce", "broadcast", "all_reduce_coalesced")
READING = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
_OPERATORS: dict[Any, Any] = {}


def _define(name: str, known: Any, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator `shardwise::NAME` of the signature of a known one, which it replaces."""
    torch.library.define(f"shardwise::{name}", f"({str(schema(known)).partition('(')[2]}")
    torch.library.impl(f"shardwise::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"shardwise::{name}", fake)
    _OPERATORS[known] = getattr(torch.ops.shardwise, name).default


def _of_a_copy(begin: Any) -> Callable[..., Any]:
    """A collective that reads a copy: no compiler knows that the memory is in use until the wait."""

    def now(given: Tensor | list[Tensor], *args: Any) -> Any:
        return begin(given.clone() if isinstance(given, Tensor) else [x.clone() for x in given], *args)

    return now


for _name in (*WRITING, *READING):
    _known = getattr(collectives, _name).default
    _define(f"begin_{_name}", _known, _of_a_copy(_known) if _name in READING else _known, _known)
_WAIT = collectives.wait_tensor.default
# A copy: the result of an operator must not share memory with its argument.
_define("end_collective", _WAIT, lambda x: torch.clone(_WAIT(x)), torch.clone)


def carry(graph: Graph) -> None:
    """Replace the collectives of a program by these operators."""
    for node in graph.nodes:
        node.target = _OPERATORS.get(node.target, node.target)
