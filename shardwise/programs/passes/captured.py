"""Passes for captured programs, which run operator by operator: fewer operators, since each costs a call, and updates in place.

A compiler does all of this by itself.
"""

from __future__ import annotations

import operator
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


def reduce_calls(graph: Graph) -> None:
    """Run these passes."""
    for passes in ((drop_idle, join_views, same_views, turn_back, in_place, copy_together), (split_once, lerp, as_vectors)):
        for one in passes:
            one(graph)
        remove_dead(graph)


def _calls(graph: Graph, target: Any) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=target))


# ── views ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _use_instead(node: Node, other: Any) -> None:
    """Use another node's value instead of a node's, unless that is a result of the program: results stay apart from what they
    are views of."""
    if not any(user.op == "output" for user in node.users):
        node.replace_all_uses_with(other)
        node.graph.erase_node(node)


def drop_idle(graph: Graph) -> None:
    """Use the input of a view of the same shape and stride, of a detach, and of a copy into new memory."""
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
            _use_instead(node, source)


def join_views(graph: Graph) -> None:
    """Turn a view of a view of a contiguous tensor into a view of that tensor."""
    for node in _calls(graph, aten.view.default):
        if is_(node.args[0], aten.view.default):
            have = value(source := node.args[0].args[0])
            if isinstance(have, Tensor) and have.is_contiguous():
                node.args = (source, *node.args[1:])


def same_views(graph: Graph) -> None:
    """Take the same view of the same tensor once."""
    known = dict[str, Node]()
    for node in list(graph.nodes):
        if node.target in _VIEWS and not node.kwargs:
            first = known.setdefault(repr((str(node.target), node.args)), node)
            if first is not node:
                _use_instead(node, first)


def turn_back(graph: Graph) -> None:
    """Use what was transposed instead of its transposed transpose."""
    for node in _calls(graph, aten.t.default):
        if is_(node.args[0], aten.t.default):
            _use_instead(node, node.args[0].args[0])


# ── updates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _copies(graph: Graph) -> dict[Node, Any]:
    """For each input that the program writes its new value to at the end, the node that does so."""
    return {node.args[0]: node for node in _calls(graph, aten.copy_.default) if node.args[0].op == "placeholder"}


def in_place(graph: Graph) -> None:
    """Run an operator on a list of inputs in place, if all of them are written to at the end and not read after it."""
    written = _copies(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        form = _in_place_form(node)
        targets: Any = node.args[0] if form is not None else ()
        if not targets or not all(isinstance(x, Node) and x in written for x in targets):
            continue
        if any(_reads_later(x, node, written[x], order) for x in targets) or not _fits(node, targets):
            continue
        with graph.inserting_before(node):
            graph.call_function(form, node.args, node.kwargs)
        for result in list(node.users):
            target: Node = targets[result.args[1]]
            result.replace_all_uses_with(target)
            if written[target].args[1] is target:
                graph.erase_node(written.pop(target))
            graph.erase_node(result)
        graph.erase_node(node)


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
            continue
        found.append(user)
        if getattr(user.target, "namespace", "") == "_c10d_functional":
            found += [after for wait in user.users for after in (wait, *wait.users) if wait.target is WAIT]
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


def copy_together(graph: Graph) -> None:
    """Write to several inputs at the end by one operator."""
    copies = list(_copies(graph).values())
    fresh = [node for node in copies if not node.users and isinstance(node.args[1], Node) and node.args[1].op != "placeholder"]
    if len(fresh) > 1:
        with graph.inserting_before(copies[-1]):
            graph.call_function(aten._foreach_copy_.default, ([n.args[0] for n in fresh], [n.args[1] for n in fresh]))
        for node in fresh:
            graph.erase_node(node)


# ── slices of one buffer ──────────────────────────────────────────────────────────────────────────────────────────────


def split_once(graph: Graph) -> None:
    """Copy all slices of a buffer by one operator."""
    for node in list[Any](graph.nodes):
        copies = _copied_slices(node)
        if len(copies) < 2:
            continue
        sizes = [value(copy).numel() for copy in copies]
        with graph.inserting_after(node):
            slices = graph.call_function(aten.split_with_sizes_copy.default, (node, sizes))
        for index, copy in enumerate(copies):
            with graph.inserting_before(copy):
                one = graph.call_function(operator.getitem, (slices, index))
                view = graph.call_function(aten.view.default, (one, list(value(copy).shape)))
            view.meta = dict(copy.meta)
            copy.replace_all_uses_with(view)


def _copied_slices(node: Any) -> list[Any]:
    """The copies of all slices of a 1-D value, in order; none where something else uses it."""
    whole = value(node)
    parts = [user for user in node.users if is_(user, aten.slice.Tensor) and len(user.args) == 4]
    if not isinstance(whole, Tensor) or whole.ndim != 1 or len(parts) < len(node.users):
        return []
    parts.sort(key=lambda part: int(part.args[2]))
    ends = [0, *(part.args[3] for part in parts)]
    copies = [_copy_of(part) for part in parts]
    in_a_row = ends[-1] == whole.shape[0] and all(part.args[1:3] == (0, end) for part, end in zip(parts, ends, strict=False))
    return copies if in_a_row and None not in copies else []


def _copy_of(part: Any) -> Any:
    """The copy of a slice that nothing else uses, seen through views."""
    user = next(iter(part.users)) if len(part.users) == 1 else None
    if is_(user, aten.view.default):
        return _copy_of(user)
    return user if is_(user, aten.clone.default) else None


# ── interpolation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def lerp(graph: Graph) -> None:
    """Replace `x += w * (y - x)` with a number w, as tracing writes it for lists, by one operator."""
    for node in _calls(graph, aten._foreach_addcmul_.Scalar):
        if len(node.args) != 3 or node.kwargs:
            continue
        x, factors, differences = node.args
        weights = {one.args[1] if is_(one, aten.full_like.default) else None for one in factors}
        minus: Any = _unpacked(differences)
        if None in weights or len(weights) != 1 or not is_(minus, aten._foreach_sub.List):
            continue
        if len(minus.args[0]) == len(differences) and list(minus.args[1]) == list(x):
            with graph.inserting_before(node):
                graph.call_function(aten._foreach_lerp_.Scalar, (x, minus.args[0], *weights))
            graph.erase_node(node)


def _unpacked(nodes: Any) -> Any:
    """The node of which these are the first results, in order; None where they are not."""
    source = nodes[0].args[0] if nodes and result_index(nodes[0]) == 0 else None
    same = all(result_index(node) == index and node.args[0] is source for index, node in enumerate(nodes))
    return source if same else None


# ── numbers in lists ──────────────────────────────────────────────────────────────────────────────────────────────────

#: Operators on lists that are the same, element by element, as those on one tensor.
_ELEMENTWISE = ("add", "sub", "mul", "div", "pow", "neg", "sqrt", "reciprocal")


def as_vectors(graph: Graph) -> None:
    """Run an operator on a list of numbers (0-d tensors of one dtype and device) as one operator on a vector.

    Numbers on the host, with which a list is then combined one by one, are read there: a device gets them with its kernel.
    """
    vectors: dict[Any, Any] = {}
    for node in list[Any](graph.nodes):
        alone = _on_one_tensor(node)
        lists = [arg for arg in node.args if isinstance(arg, list | tuple)]
        if alone is None or not all(map(_is_numbers, lists)):
            continue
        with graph.inserting_before(node):
            args = tuple(_vector(arg, vectors, graph) if isinstance(arg, list | tuple) else arg for arg in node.args)
            vector = graph.call_function(alone, args)
            elements = graph.call_function(aten.unbind.int, (vector,))
        for user in list(node.users):
            user.args = (elements, user.args[1])
        vectors[elements, len(lists[0])] = vector
        graph.erase_node(node)
    _as_scalars(graph, vectors)


def _as_scalars(graph: Graph, vectors: dict[Any, Any]) -> None:
    lists = dict[Any, Any]()
    for node in list[Any](graph.nodes):
        if not _takes_numbers(node, vectors):
            continue
        source = node.args[1][0].args[0]
        if source not in lists:
            with graph.inserting_after(source):
                lists[source] = graph.call_function(Tensor.tolist, (vectors[source, len(node.args[1])],))
        node.target, node.args = node.target.overloadpacket.ScalarList, (node.args[0], lists[source])


def _takes_numbers(node: Any, vectors: dict[Any, Any]) -> bool:
    """Whether a node is an operator such as `_foreach_div.List`, whose second list is that of a vector on the host."""
    name, overload = foreach_name(node) or ("", "")
    if overload != "List" or name.removesuffix("_") not in ("add", "sub", "mul", "div") or node.kwargs or len(node.args) != 2:
        return False
    first = value(node.args[1][0]) if (_unpacked(node.args[1]), len(node.args[1])) in vectors else None
    return isinstance(first, Tensor) and first.device.type == "cpu" and first.dtype.is_floating_point


def _on_one_tensor(node: Any) -> Any:
    """`add.Scalar` for `_foreach_add.Scalar`, `add.Tensor` for `_foreach_add.List`."""
    name, overload = foreach_name(node) or ("", "")
    overloads = {"List": "Tensor", "ScalarAndTensor": "Scalar", "Scalar": "Tensor_Scalar" if name == "pow" else "Scalar"}
    wanted = overloads.get(overload, overload)
    known = name in _ELEMENTWISE and wanted in (*overloads.values(), "default") and not node.kwargs
    return getattr(getattr(aten, name), wanted, None) if known and None not in map(result_index, node.users) else None


def _is_numbers(nodes: Any) -> bool:
    values = [value(node) for node in nodes]
    scalars = [x for x in values if isinstance(x, Tensor) and not x.ndim]
    return len(scalars) == len(values) > 1 and len({(x.dtype, x.device) for x in scalars}) == 1


def _vector(nodes: Any, vectors: dict[Any, Any], graph: Graph) -> Any:
    known = vectors.get((_unpacked(nodes), len(nodes)))
    return graph.call_function(aten.stack.default, (list(nodes),)) if known is None else known
