"""Helpers of the graph passes: questions about the nodes of a local program, and how to add, replace and remove nodes.

Reads and writes fx graphs of operators on local tensors whose nodes hold their results as fake tensors in `meta["val"]`. Knows
nothing of layouts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..._torch.compiler import keep_alive
from ..._torch.tensors import OpOverload, collectives
from ...base.schema import schema_of

WAIT = collectives.wait_tensor.default
CLONE = torch.ops.aten.clone.default
#: The `meta` entry that marks nodes of a recomputation: they must not be merged with the first computation.
AGAIN = "shardwise_again"
#: The `meta` entries that a new node takes over from the one it replaces.
_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", "shardwise", AGAIN)
#: Modules whose functions compute with Python numbers, and change nothing.
_ARITHMETIC = ("_operator", "operator", "math", "builtins", "torch")


def value(node: Any) -> Any:
    """The result of a node as fake tensors; None for anything else than a node."""
    return node.meta.get("val") if isinstance(node, Node) else None


def is_(node: Any, *targets: Any) -> bool:
    """Whether something is a node that calls one of these functions."""
    return isinstance(node, Node) and node.target in targets


def result_index(node: Any) -> Any:
    """Which of several results of an operator a `getitem` node takes; None for anything else."""
    return node.args[1] if is_(node, operator.getitem) else None


def foreach_name(node: Node) -> tuple[str, str] | None:
    """Name and overload of an operator on lists of tensors: ("add_", "Scalar") of `aten._foreach_add_.Scalar`."""
    name, _, overload = str(node.target).removeprefix("aten._foreach_").partition(".")
    return (name, overload) if isinstance(node.target, OpOverload) and name != "aten" else None


def nbytes(node: Node) -> int | None:
    """The bytes of a node's tensor; None where they are not known."""
    found = value(node)
    count = found.numel() if isinstance(found, Tensor) else None
    return count * found.element_size() if type(count) is int else None


def order(found: Any) -> Any:
    """Shape and stride of fake tensors as text: symbols are compared as they are written, so that no guard is needed."""
    if isinstance(found, list | tuple):
        return [order(item) for item in found]
    return str((*found.shape, *found.stride())) if isinstance(found, Tensor) else None


def is_view(node: Node) -> bool:
    """Whether the result of a node is a view: it shares memory with an argument."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target is WAIT or schema_of(node.target).view


def mutates(node: Node) -> bool:
    """Whether a node may change what other nodes read. Random numbers and collectives do not."""
    if isinstance(node.target, OpOverload):
        return bool(schema_of(node.target).written)
    return node.op == "call_function" and getattr(node.target, "__module__", "") not in _ARITHMETIC


def epochs(graph: Graph) -> dict[Node, int]:
    """For each node how many nodes before it write to memory: a value may be read elsewhere only in the same epoch."""
    return dict(zip(graph.nodes, itertools.accumulate(map(mutates, graph.nodes), initial=0), strict=False))


def escapes(node: Node) -> bool:
    """Whether a result of the program shares memory with the result of a node."""
    return any(user.op == "output" or (is_view(user) and escapes(user)) for user in node.users)


def is_known_outside(node: Node) -> bool:
    """Whether an input or a result of the program shares memory with the result of a node."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op != "call_function" or escapes(node)


def add(target: Callable[..., Any], args: tuple[Any, ...], like: Node, **kwargs: Any) -> Node:
    """A new node at the graph's insertion point, which does (a part of) the work of `like`."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {name: like.meta[name] for name in _INHERITED if name in like.meta}
    node.meta["val"] = target(*map_arg(args, value), **kwargs)
    return node


def replace(node: Node, other: Node) -> None:
    """Use another node's value in place of a node's, which is contiguous, and erase the node.

    The value is copied where a result of the program would otherwise share memory with an input or another result, since the
    caller may write to one of them; and where its strides differ, since later nodes may rely on them.
    """
    if (escapes(node) and is_known_outside(other)) or order(value(node)) != order(value(other)):
        with node.graph.inserting_before(node):
            other = add(CLONE, (other,), node, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def remove_dead(graph: Graph, collectives_too: bool = False) -> int:
    """Remove unused nodes. Collectives only where asked for: every rank must remove the same ones."""
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        spared = node.is_impure() and not (collectives_too and node.target in COMMUNICATION)
        if not node.users and not spared:
            graph.erase_node(node)
    graph.lint()
    return before - len(graph.nodes)


# ── keeping unused collectives ─────────────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::keep", "(Tensor x) -> ()")
torch.library.impl("shardwise::keep", "CompositeExplicitAutograd", lambda x: None)
torch.library.register_fake("shardwise::keep", lambda x: None)
KEEP = torch.ops.shardwise.keep.default
keep_alive(KEEP)
#: Operators that other ranks take part in, and that stay therefore although nothing uses their results.
COMMUNICATION = (WAIT, KEEP, torch.ops.shardwise.move.default, torch.ops.shardwise.exchange.default)


def hold(graph: Graph) -> None:
    """Add a use of every wait: the partitioner, which splits forward and backward, would remove collectives whose result this
    rank does not use, although other ranks do."""
    for node in [node for node in graph.nodes if node.target is WAIT]:
        with graph.inserting_after(node):
            graph.call_function(KEEP, (node,))
