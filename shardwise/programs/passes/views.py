"""What only a program that is run operator by operator needs: operators that do nothing go, updates happen in place.

A compiler does this by itself; here every operator that is left costs its call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch.tensors import OpOverload
from .graph import WAIT, is_view, remove_dead

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten.expand.default, aten.reshape.default, aten._unsafe_view.default)
_ALIASES = (aten.detach.default, aten.alias.default)
_EMPTY = (aten.empty_like.default, aten.empty.memory_format, aten.empty_strided.default)
_VIEWS = (*_SHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default)


def tidy(graph: Graph) -> dict[str, int]:
    """Run these passes, and say how much each of them changed."""
    changes = {"drop_idle": drop_idle(graph), "join_views": join_views(graph), "same_views": same_views(graph)}
    changes["turn_back"] = turn_back(graph)
    changes["in_place"] = in_place(graph)
    changes["copy_together"] = copy_together(graph)
    remove_dead(graph)
    return changes


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _is_output(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def drop_idle(graph: Graph) -> int:
    """A view of the same shape and stride, a detach, and a copy into new memory, are their input. Results stay apart from what
    they are views of."""
    count = 0
    for node in list(graph.nodes):
        if node.target is aten.copy.default and getattr(node.args[0], "target", None) in _EMPTY:
            source = node.args[1]
        elif node.target in _SHAPES or node.target in _ALIASES:
            source = node.args[0]
        else:
            continue
        have, want = _value(source), _value(node)
        same = isinstance(have, Tensor) and have.shape == want.shape and have.stride() == want.stride()
        if same and have.dtype == want.dtype and not _is_output(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            count += 1
    return count


def join_views(graph: Graph) -> int:
    """A view of a view of a contiguous tensor is a view of that tensor."""
    count = 0
    for node in graph.nodes:
        if node.target is aten.view.default and getattr(node.args[0], "target", None) is aten.view.default:
            source = node.args[0].args[0]
            value = _value(source)
            if isinstance(value, Tensor) and value.is_contiguous():
                node.args = (source, *node.args[1:])
                count += 1
    return count


def same_views(graph: Graph) -> int:
    """The same view of the same tensor is taken once."""
    count = 0
    known: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.target not in _VIEWS or node.kwargs:
            continue
        key = repr((str(node.target), node.args))
        if key not in known:
            known[key] = node
        elif not _is_output(node):
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
            count += 1
    return count


def turn_back(graph: Graph) -> int:
    """A transpose of a transpose is what was transposed. Results stay apart from what they are views of."""
    count = 0
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.target is aten.t.default else None
        if getattr(source, "target", None) is aten.t.default and not _is_output(node):
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
            count += 1
    return count


# ── updates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _copies(graph: Graph) -> dict[Node, Node]:
    """For each input that is written to at the end, the node that does it."""
    copies = [node for node in graph.nodes if node.target is aten.copy_.default]
    return {node.args[0]: node for node in copies if node.args[0].op == "placeholder"}


def in_place(graph: Graph) -> int:
    """An operator on a list of inputs that are all written to at the end, and not read after it, runs in place."""
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
    target: Any = node.target
    if not isinstance(target, OpOverload) or not target._schema.name.startswith("aten::_foreach_"):
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = None if name.endswith("_") else getattr(aten, f"{name}_", None)
    return None if packet is None or not isinstance(node.args[0], list | tuple) else getattr(packet, target._overloadname, None)


def _reads_later(target: Node, node: Node, write: Node, order: dict[Node, int]) -> bool:
    """Whether something needs what an input held before `node`, at or after it (beside that operator's own update)."""
    others = [arg for arg in node.args[1:] if isinstance(arg, list | tuple)]
    if any(target in arg for arg in others) or list(node.args[0]).count(target) > 1:  # type: ignore[arg-type]
        return True
    return any(reader not in (node, write) and order.get(reader, -1) > order[node] for reader in _readers(target))


def _readers(target: Node) -> list[Node]:
    """Who reads what an input held, also through views; a collective reads until it was waited for."""
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
    """Whether every result is taken by number, and has the shape and dtype of what is updated."""
    for result in node.users:
        if getattr(result.target, "__name__", "") != "getitem" or _is_output(result):
            return False
        have, want = _value(result), _value(targets[result.args[1]])
        if not isinstance(have, Tensor) or have.shape != want.shape or have.dtype != want.dtype:
            return False
    return True


def copy_together(graph: Graph) -> int:
    """Writes to several inputs at the end become one."""
    copies = list(_copies(graph).values())
    fresh = [node for node in copies if not node.users and isinstance(node.args[1], Node) and node.args[1].op != "placeholder"]
    if len(fresh) < 2:
        return 0
    with graph.inserting_before(copies[-1]):
        graph.call_function(aten._foreach_copy_.default, ([n.args[0] for n in fresh], [n.args[1] for n in fresh]))
    for node in fresh:
        graph.erase_node(node)
    return len(fresh)
