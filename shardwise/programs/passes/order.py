"""`improve`: runs the graph passes on a local program, in their order.

`improve` takes the fx graph of a local program as AOTAutograd gives it, forward or backward, and rewrites it in place. Every
rank has the same graph and rewrites it in the same way. Where ranks hold shards of different shapes, and so have graphs of
their own, collectives stay as they are.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node

from ..._torch.compiler import inductor_pass as new_inductor_pass
from ...comm.tracing import is_of_one_rank
from ...propagation.table import library_key
from .all_reduces import bucket, reduce_later
from .graph import KEEP, WAIT, is_view, mutates, remove_dead
from .moves import expand_moves, merge_moves


def improve(gm: GraphModule) -> dict[str, int]:
    """Run all passes on a local program, and say how much each of them changed.

    >>> import torch
    >>> gm = torch.fx.symbolic_trace(lambda x: x + 1)
    >>> improve(gm)["bucket"]
    0
    """
    changes = _improve(gm.graph)
    gm.recompile()
    return changes


def inductor_pass() -> Any:
    """The same for Inductor: `options={"post_grad_custom_pre_pass": inductor_pass()}`. Programs are kept under a key of this
    library."""
    return new_inductor_pass(_improve, library_key())


def _improve(graph: Graph, decompositions: dict[Any, Any] | None = None) -> dict[str, int]:
    alike = not is_of_one_rank()
    changes = {"merge_moves": merge_moves(graph)} if alike else {}
    changes["expand_moves"] = expand_moves(graph, decompositions)
    for node in graph.find_nodes(op="call_function", target=KEEP):  # they have kept collectives alive this far
        graph.erase_node(node)
    dead = remove_dead(graph, alike)
    if alike:
        changes["reduce_later"] = reduce_later(graph)
        changes["bucket"] = bucket(graph)
    changes["wait_late"] = wait_late(graph)
    changes["remove_dead"] = dead + remove_dead(graph, alike)
    return changes


def wait_late(graph: Graph) -> int:
    """Every wait, and with it views of what it waits for, stands directly before what first uses it.

    It always applies, but no wait moves behind an operator that writes to a tensor: the collective might still read that one.
    Collectives run at the same time as whatever stands between their start and their wait.
    """
    return sum(_wait_later(node) for node in reversed(list(graph.nodes)) if _is_awaited(node))


def _is_awaited(node: Node) -> bool:
    while node.target is not WAIT and is_view(node):
        node = node.all_input_nodes[0]
    return node.target is WAIT


def _wait_later(node: Node) -> bool:
    place, passed = node.next, False
    while place.op != "output" and place not in node.users and not mutates(place):
        passed |= not _is_awaited(place)
        place = place.next
    if passed:
        while _is_awaited(place.prev):  # waits for the same user stay in their order
            place = place.prev
        place.prepend(node)
    return passed
