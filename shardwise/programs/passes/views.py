"""Passes for captured programs: remove operators that do nothing, and update inputs in place.

Captured programs run operator by operator, so every operator costs a call. A compiler does all of this by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .graph import WAIT, escapes, foreach_name, is_, is_view, remove_dead, result_index, value

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten.expand.default, aten.reshape.default, aten._unsafe_view.default)
_ALIASES = (aten.detach.default, aten.alias.default)
_EMPTY = (aten.empty_like.default, aten.empty.memory_format, aten.empty_strided.default)
_VIEWS = (*_SHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default)


def tidy(graph: Graph) -> dict[str, int]:
    """Run these passes; gives the number of changes each of them made."""
    changes = {one.__name__: one(graph) for one in (drop_idle, join_views, same_views, turn_back, in_place, copy_together)}
    remove_dead(graph)
    return changes


def _use_instead(node: Node, other: Any) -> int:
    """Use another node's value instead of a node's, unless that is a result of the program: results stay apart from what they
    are views of. Gives 1 if it is done, else 0."""
    if any(user.op == "output" for user in node.users):
        return 0
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
    return 1


def drop_idle(graph: Graph) -> int:
    """Use the input of a view of the same shape and stride, of a detach, and of a copy into new memory."""
    count = 0
    for node in list(graph.nodes):
        if node.target is aten.copy.default and is_(node.args[0], *_EMPTY) and not escapes(node):
            source = node.args[1]
        elif node.target in (*_SHAPES, *_ALIASES):
            source = node.args[0]
        else:
            continue
        have, want = value(source), value(node)
        same = isinstance(have, Tensor) and have.shape == want.shape and have.stride() == want.stride()
        if same and have.dtype == want.dtype:
            count += _use_instead(node, source)
    return count


def join_views(graph: Graph) -> int:
    """Turn a view of a view of a contiguous tensor into a view of that tensor."""
    count = 0
    for node in graph.nodes:
        if node.target is aten.view.default and is_(node.args[0], aten.view.default):
            have = value(source := node.args[0].args[0])
            if isinstance(have, Tensor) and have.is_contiguous():
                node.args = (source, *node.args[1:])
                count += 1
    return count


def same_views(graph: Graph) -> int:
    """Take the same view of the same tensor once."""
    count, known = 0, dict[str, Node]()
    for node in list(graph.nodes):
        if node.target in _VIEWS and not node.kwargs:
            first = known.setdefault(repr((str(node.target), node.args)), node)
            count += _use_instead(node, first) if first is not node else 0
    return count


def turn_back(graph: Graph) -> int:
    """Use what was transposed instead of its transposed transpose."""
    transposes = [node for node in graph.nodes if node.target is aten.t.default]
    return sum(_use_instead(node, node.args[0].args[0]) for node in transposes if is_(node.args[0], aten.t.default))


# ── updates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _copies(graph: Graph) -> dict[Node, Node]:
    """For each input that the program writes its new value to at the end, the node that does so."""
    copies = [node for node in graph.nodes if node.target is aten.copy_.default]
    return {node.args[0]: node for node in copies if node.args[0].op == "placeholder"}


def in_place(graph: Graph) -> int:
    """Run an operator on a list of inputs in place, if all of them are written to at the end and not read after it."""
    written, count = _copies(graph), 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        operator = _in_place_form(node)
        targets: Any = node.args[0] if operator is not None else ()
        if not targets or not all(isinstance(x, Node) and x in written for x in targets):
            continue
        if any(_reads_later(x, node, written[x], order) for x in targets) or not _fits(node, targets):
            continue
        with graph.inserting_before(node):
            graph.call_function(operator, node.args, node.kwargs)
        for result in list(node.users):
            target: Node = targets[result.args[1]]
            result.replace_all_uses_with(target)
            if written[target].args[1] is target:
                graph.erase_node(written.pop(target))
            graph.erase_node(result)
        graph.erase_node(node)
        count += 1
    return count


def _in_place_form(node: Node) -> Any:
    """`_foreach_add_` for `_foreach_add`."""
    name, overload = foreach_name(node) or ("_", "")
    packet = None if name.endswith("_") else getattr(aten, f"_foreach_{name}_", None)
    return getattr(packet, overload, None) if packet is not None and isinstance(node.args[0], list | tuple) else None


def _reads_later(target: Node, node: Node, write: Node, order: dict[Node, int]) -> bool:
    """Whether the old value of an input is read at `node` or after it (beside that operator's own update)."""
    lists = [arg for arg in node.args if isinstance(arg, list | tuple)]
    if sum(arg.count(target) for arg in lists) > 1:
        return True
    return any(reader not in (node, write) and order.get(reader, -1) > order[node] for reader in _readers(target))


def _readers(target: Node) -> list[Node]:
    """The nodes that read an input, also through views; a collective reads until its wait."""
    found = []
    for user in target.users:
        if is_view(user):
            found += _readers(user)
        elif getattr(user.target, "namespace", "") == "_c10d_functional":
            found += [user, *(after for wait in user.users for after in (wait, *wait.users) if wait.target is WAIT)]
        else:
            found.append(user)
    return found


def _fits(node: Node, targets: Any) -> bool:
    """Whether every result is taken by its index, is no result of the program, and has the shape and dtype of its target."""
    for result in node.users:
        if result_index(result) is None or any(user.op == "output" for user in result.users):
            return False
        have, want = value(result), value(targets[result.args[1]])
        if not isinstance(have, Tensor) or have.shape != want.shape or have.dtype != want.dtype:
            return False
    return True


def copy_together(graph: Graph) -> int:
    """Write to several inputs at the end by one operator."""
    copies = list(_copies(graph).values())
    fresh = [node for node in copies if not node.users and isinstance(node.args[1], Node) and node.args[1].op != "placeholder"]
    if len(fresh) < 2:
        return 0
    with graph.inserting_before(copies[-1]):
        graph.call_function(aten._foreach_copy_.default, ([n.args[0] for n in fresh], [n.args[1] for n in fresh]))
    for node in fresh:
        graph.erase_node(node)
    return len(fresh)
