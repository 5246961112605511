"""Nodes of a local program: what graph passes ask of them, and how they add some.

Reads and writes fx graphs of operators on local tensors whose nodes say in `meta["val"]` what they give. Knows nothing of
layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..._torch.compiler import keep_alive
from ..._torch.tensors import OpOverload, collectives, schema

WAIT = collectives.wait_tensor.default
CLONE = torch.ops.aten.clone.default
#: Under which name a node says that it computes what was computed before, so as not to hold it in between.
AGAIN = "shardwise_again"
#: What a new node has from the one in whose place it stands.
_HANDED_ON = ("stack_trace", "nn_module_stack", "seq_nr", "shardwise", AGAIN)
#: Where functions on numbers come from; they change nothing.
_ARITHMETIC = ("_operator", "operator", "math", "builtins", "torch")


def value(node: Node) -> Any:
    """What a node gives, as fake tensors."""
    return node.meta.get("val")


def nbytes(node: Node) -> int | None:
    """The bytes of a node's tensor; None where they are not known."""
    found = value(node)
    if not isinstance(found, Tensor):
        return None
    count = found.numel()
    return count * found.element_size() if type(count) is int else None


def order(found: Any) -> Any:
    """How the elements of fake tensors lie. Symbols are compared as they are written, so that no guard is needed."""
    if isinstance(found, list | tuple):
        return [order(item) for item in found]
    return str((*found.shape, *found.stride())) if isinstance(found, Tensor) else None


def is_view(node: Node) -> bool:
    """Whether what a node gives shares the memory of what it takes: the value under another shape, or a part of it."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = schema(node.target).returns
    return node.target is WAIT or any(out.alias_info is not None and not out.alias_info.is_write for out in returns)


def mutates(node: Node) -> bool:
    """Whether a node may change what other nodes read. Random numbers and collectives do not."""
    if isinstance(node.target, OpOverload):
        return bool(schema(node.target).is_mutable)
    return node.op == "call_function" and getattr(node.target, "__module__", "") not in _ARITHMETIC


def epochs(graph: Graph) -> dict[Node, int]:
    """For each node how many before it change what others read: a value may be read elsewhere in the same epoch only."""
    found, epoch = {}, 0
    for node in graph.nodes:
        found[node] = epoch
        epoch += mutates(node)
    return found


def escapes(node: Node) -> bool:
    """Whether the memory of a node's value is that of a result of the program."""
    return any(user.op == "output" or (is_view(user) and escapes(user)) for user in node.users)


def is_known_outside(node: Node) -> bool:
    """Whether the memory of a node's value is that of an input or a result of the program."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op != "call_function" or escapes(node)


def add(target: Callable[..., Any], args: tuple[Any, ...], like: Node, **kwargs: Any) -> Node:
    """A new node, where the graph inserts now, that stands for (a part of) what `like` does."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {name: like.meta[name] for name in _HANDED_ON if name in like.meta}
    node.meta["val"] = target(*map_arg(args, value), **kwargs)
    return node


def replace(node: Node, other: Node) -> None:
    """Use another node's value in place of a node's, which is contiguous.

    A copy of it where a result of the program would share memory with an input or another result, since who called it may
    write to one of them; or where its elements lie in another order, which what follows may rely on.
    """
    if (escapes(node) and is_known_outside(other)) or order(value(node)) != order(value(other)):
        with node.graph.inserting_before(node):
            other = add(CLONE, (other,), node, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def remove_dead(graph: Graph, collectives_too: bool = False) -> int:
    """Remove what nobody uses. Collectives only where asked for: every rank must remove the same."""
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        spared = node.is_impure() and not (collectives_too and node.target in COMMUNICATION)
        if not node.users and not spared:
            graph.erase_node(node)
    graph.lint()
    return before - len(graph.nodes)


# ── keeping what a rank does not need ─────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::keep", "(Tensor x) -> ()")
torch.library.impl("shardwise::keep", "CompositeExplicitAutograd", lambda x: None)
torch.library.register_fake("shardwise::keep", lambda x: None)
KEEP = torch.ops.shardwise.keep.default
keep_alive(KEEP)
#: What matters though nothing uses its result, only because other ranks take part in it.
COMMUNICATION = (WAIT, KEEP, torch.ops.shardwise.move.default, torch.ops.shardwise.exchange.default)


def hold(graph: Graph) -> None:
    """Let something use every wait. Who parts a graph into forward and backward removes collectives that this rank's graph does
    not need, taking it for that of every rank."""
    for node in [node for node in graph.nodes if node.target is WAIT]:
        with graph.inserting_after(node):
            graph.call_function(KEEP, (node,))


def release(graph: Graph) -> None:
    """Undo `hold`."""
    for node in [node for node in graph.nodes if node.target is KEEP]:
        graph.erase_node(node)
