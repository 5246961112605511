"""Passes for captured programs, where every call costs: replace many small operators by few."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from .graph import foreach_name, is_, result_index, value

aten = torch.ops.aten


def batch(graph: Graph) -> dict[str, int]:
    """Run these passes; gives the number of changes each of them made."""
    return {"split_once": split_once(graph), "lerp": lerp(graph), "as_vectors": as_vectors(graph)}


# ── slices of one buffer ──────────────────────────────────────────────────────────────────────────────────────────────


def split_once(graph: Graph) -> int:
    """Copy all slices of a buffer by one operator."""
    count = 0
    for node in list[Any](graph.nodes):
        copies = _copied_slices(node)
        if len(copies) < 2:
            continue
        sizes = [copy.meta["val"].numel() for copy in copies]
        with graph.inserting_after(node):
            slices = graph.call_function(aten.split_with_sizes_copy.default, (node, sizes))
        for index, copy in enumerate(copies):
            with graph.inserting_before(copy):
                one = graph.call_function(operator.getitem, (slices, index))
                view = graph.call_function(aten.view.default, (one, list(copy.meta["val"].shape)))
            view.meta = dict(copy.meta)
            copy.replace_all_uses_with(view)
        count += len(copies)
    return count


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


def lerp(graph: Graph) -> int:
    """Replace `x += w * (y - x)` with a number w, as tracing writes it for lists, by one operator."""
    count = 0
    for node in list[Any](graph.nodes):
        if not is_(node, aten._foreach_addcmul_.Scalar) or len(node.args) != 3 or node.kwargs:
            continue
        weight, differences = _same_fill(node.args[1]), _all_of(node.args[2], aten._foreach_sub.List)
        if weight is None or differences is None or list(differences.args[1]) != list(node.args[0]):
            continue
        with graph.inserting_before(node):
            graph.call_function(aten._foreach_lerp_.Scalar, (node.args[0], differences.args[0], weight))
        graph.erase_node(node)
        count += 1
    return count


def _same_fill(nodes: Any) -> Any:
    """The number that all these are filled with, or None."""
    fills = {node.args[1] if is_(node, aten.full_like.default) else None for node in nodes}
    return fills.pop() if len(fills) == 1 else None


def _all_of(nodes: Any, target: Any) -> Any:
    """The operator of this kind of which these are all results, in order."""
    source = _unpacked(nodes)
    return source if is_(source, target) and len(source.args[0]) == len(nodes) else None


def _unpacked(nodes: Any) -> Any:
    """The node of which these are the first results, in order; None where they are not."""
    source = nodes[0].args[0] if nodes and result_index(nodes[0]) == 0 else None
    same = all(result_index(node) == index and node.args[0] is source for index, node in enumerate(nodes))
    return source if same else None


# ── numbers in lists ──────────────────────────────────────────────────────────────────────────────────────────────────


def as_vectors(graph: Graph) -> int:
    """Run an operator on a list of numbers (0-d tensors of one dtype and device) as one operator on a vector."""
    vectors: dict[Any, Any] = {}
    count = 0
    for node in list[Any](graph.nodes):
        alone = _on_one_tensor(node)
        if alone is None or not all(_is_numbers(arg) for arg in node.args if isinstance(arg, list | tuple)):
            continue
        with graph.inserting_before(node):
            args = tuple(_vector(arg, vectors, graph) if isinstance(arg, list | tuple) else arg for arg in node.args)
            vector = graph.call_function(alone, args)
            elements = graph.call_function(aten.unbind.int, (vector,))
        for user in list(node.users):
            user.args = (elements, user.args[1])
        count_of = next(len(arg) for arg in node.args if isinstance(arg, list | tuple))  # the first may be a number
        vectors[elements, count_of] = vector
        graph.erase_node(node)
        count += 1
    return count + _as_scalars(graph, vectors)


def _as_scalars(graph: Graph, vectors: dict[Any, Any]) -> int:
    """Read numbers on the host, with which a list is combined one by one, there: a device gets them with its kernel."""
    count, lists = 0, dict[Any, Any]()
    for node in list[Any](graph.nodes):
        operator_ = _with_scalars(node, vectors)
        if operator_ is None:
            continue
        source = node.args[1][0].args[0]
        if source not in lists:
            with graph.inserting_after(source):
                lists[source] = graph.call_function(numbers, (vectors[source, len(node.args[1])],))
        node.target, node.args = operator_, (node.args[0], lists[source])
        count += 1
    return count


def numbers(vector: Tensor) -> list[float]:
    """The elements of a vector."""
    return vector.tolist()


def _with_scalars(node: Any, vectors: dict[Any, Any]) -> Any:
    """`_foreach_div.ScalarList` for `_foreach_div.List` where the second list is that of a vector on the host."""
    name, overload = foreach_name(node) or ("", "")
    if overload != "List" or name.removesuffix("_") not in ("add", "sub", "mul", "div") or node.kwargs or len(node.args) != 2:
        return None
    first = value(node.args[1][0]) if (_unpacked(node.args[1]), len(node.args[1])) in vectors else None
    on_host = isinstance(first, Tensor) and first.device.type == "cpu" and first.dtype.is_floating_point
    return node.target.overloadpacket.ScalarList if on_host else None


#: Operators on lists that are the same, element by element, as those on one tensor.
_ELEMENTWISE = ("add", "sub", "mul", "div", "pow", "neg", "sqrt", "reciprocal")


def _on_one_tensor(node: Any) -> Any:
    """`add.Scalar` for `_foreach_add.Scalar`, `add.Tensor` for `_foreach_add.List`."""
    name, overload = foreach_name(node) or ("", "")
    overloads = {"List": "Tensor", "ScalarAndTensor": "Scalar", "Scalar": "Tensor_Scalar" if name == "pow" else "Scalar"}
    wanted = overloads.get(overload, overload)
    known = name in _ELEMENTWISE and wanted in (*overloads.values(), "default") and not node.kwargs
    return getattr(getattr(aten, name), wanted, None) if known and None not in map(result_index, node.users) else None


def _is_numbers(nodes: Any) -> bool:
    values = [value(node) for node in nodes]
    if len(values) < 2 or not all(isinstance(x, Tensor) and not x.ndim for x in values):
        return False
    return len({(x.dtype, x.device) for x in values}) == 1


def _vector(nodes: Any, vectors: dict[Any, Any], graph: Graph) -> Any:
    known = vectors.get((_unpacked(nodes), len(nodes)))
    return graph.call_function(aten.stack.default, (list(nodes),)) if known is None else known
