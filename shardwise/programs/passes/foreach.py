"""Many small operators become few: for programs that are run operator by operator, where every call costs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch.tensors import OpOverload

aten = torch.ops.aten


def batch(graph: Graph) -> dict[str, int]:
    """Run these passes, and say how much each of them changed."""
    return {"split_once": split_once(graph), "lerp": lerp(graph), "as_vectors": as_vectors(graph)}


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets


def _number(node: Any) -> Any:
    """Which of an operator's results a node takes."""
    return node.args[1] if isinstance(node, Node) and getattr(node.target, "__name__", "") == "getitem" else None


# ── shards of one buffer ──────────────────────────────────────────────────────────────────────────────────────────────


def split_once(graph: Graph) -> int:
    """Copies of all slices of a buffer, one behind the other, are made by one operator."""
    count, every = 0, list[Any](graph.nodes)
    for node in every:
        copies = _copied_slices(node)
        if len(copies) < 2:
            continue
        sizes = [copy.meta["val"].numel() for copy in copies]
        with graph.inserting_after(node):
            shards = graph.call_function(aten.split_with_sizes_copy.default, (node, sizes))
        for number, copy in enumerate(copies):
            with graph.inserting_before(copy):
                shard = graph.call_function(operator.getitem, (shards, number))
                view = graph.call_function(aten.view.default, (shard, list(copy.meta["val"].shape)))
            view.meta = dict(copy.meta)
            copy.replace_all_uses_with(view)
        count += len(copies)
    return count


def _copied_slices(node: Any) -> list[Any]:
    """The copies of all slices of a 1-D value, in order; none where something else uses it."""
    value = node.meta.get("val")
    parts = [user for user in node.users if _is(user, aten.slice.Tensor) and len(user.args) == 4]
    if not isinstance(value, Tensor) or value.ndim != 1 or len(parts) < len(node.users):
        return []
    parts.sort(key=lambda part: int(part.args[2]))
    ends = [0, *(part.args[3] for part in parts)]
    copies = [_copy_of(part) for part in parts]
    in_a_row = ends[-1] == value.shape[0] and all(part.args[1:3] == (0, end) for part, end in zip(parts, ends, strict=False))
    return copies if in_a_row and None not in copies else []


def _copy_of(part: Any) -> Any:
    """The copy, which alone uses a slice, or a view that alone uses it."""
    user = next(iter(part.users)) if len(part.users) == 1 else None
    if _is(user, aten.view.default):
        return _copy_of(user)
    return user if _is(user, aten.clone.default) else None


# ── interpolation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def lerp(graph: Graph) -> int:
    """`x += w * (y - x)` with a number w, as tracing writes it for lists, is one operator."""
    count, every = 0, list[Any](graph.nodes)
    for node in every:
        if not _is(node, aten._foreach_addcmul_.Scalar) or len(node.args) != 3 or node.kwargs:
            continue
        weights, parts = node.args[1], node.args[2]
        weight, differences = _same_fill(weights), _all_of(parts, aten._foreach_sub.List)
        if weight is None or differences is None or list(differences.args[1]) != list(node.args[0]):
            continue
        with graph.inserting_before(node):
            graph.call_function(aten._foreach_lerp_.Scalar, (node.args[0], differences.args[0], weight))
        graph.erase_node(node)
        count += 1
    return count


def _same_fill(nodes: Any) -> Any:
    """The number that all these are filled with, or None."""
    if not nodes or not all(_is(node, aten.full_like.default) for node in nodes):
        return None
    fills = {node.args[1] for node in nodes}
    return fills.pop() if len(fills) == 1 else None


def _all_of(nodes: Any, target: Any) -> Any:
    """The operator of which these are all results, in order."""
    numbers = [_number(node) for node in nodes]
    source: Any = nodes[0].args[0] if numbers == list(range(len(nodes))) and nodes else None
    same = _is(source, target) and all(node.args[0] is source for node in nodes)
    return source if same and len(source.args[0]) == len(nodes) else None


# ── numbers in lists ──────────────────────────────────────────────────────────────────────────────────────────────────


def as_vectors(graph: Graph) -> int:
    """An operator on a list of numbers (0-d tensors of one kind) is one on a vector."""
    vectors: dict[Any, Any] = {}
    count, every = 0, list[Any](graph.nodes)
    for node in every:
        alone = _on_one_tensor(node)
        if alone is None or not all(_is_numbers(arg) for arg in node.args if isinstance(arg, list | tuple)):
            continue
        with graph.inserting_before(node):
            args = tuple(_vector(arg, vectors, graph) if isinstance(arg, list | tuple) else arg for arg in node.args)
            vector = graph.call_function(alone, args)
            shards = graph.call_function(aten.unbind.int, (vector,))
        for user in list(node.users):
            user.args = (shards, user.args[1])
        vectors[shards] = vector
        graph.erase_node(node)
        count += 1
    return count + _as_scalars(graph, vectors)


def _as_scalars(graph: Graph, vectors: dict[Any, Any]) -> int:
    """Numbers on the host that a list is combined with, one by one, are read there: a device gets them with its kernel."""
    count, every = 0, list[Any](graph.nodes)
    lists: dict[Any, Any] = {}
    for node in every:
        operator_ = _with_scalars(node, vectors)
        if operator_ is None:
            continue
        source = node.args[1][0].args[0]
        if source not in lists:
            with graph.inserting_after(source):
                lists[source] = graph.call_function(numbers, (vectors[source],))
        node.target, node.args = operator_, (node.args[0], lists[source])
        count += 1
    return count


def numbers(vector: Tensor) -> list[float]:
    """The elements of a vector."""
    return vector.tolist()


def _with_scalars(node: Any, vectors: dict[Any, Any]) -> Any:
    """`_foreach_div.ScalarList` for `_foreach_div.List` where the second list is that of a vector on the host."""
    target: Any = node.target
    others: Any = node.args[1] if len(node.args) == 2 else None
    named = isinstance(target, OpOverload) and target._overloadname == "List" and not node.kwargs
    if not named or target._schema.name.removeprefix("aten::_foreach_").removesuffix("_") not in ("add", "sub", "mul", "div"):
        return None
    source = others[0].args[0] if others and _number(others[0]) == 0 else None
    if source not in vectors or [_number(x) for x in others] != list(range(len(others))):
        return None
    value = others[0].meta.get("val")
    on_host = isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype.is_floating_point
    return target.overloadpacket.ScalarList if on_host and all(x.args[0] is source for x in others) else None


_ALONE = ("add", "sub", "mul", "div", "pow", "neg", "sqrt", "reciprocal")


def _on_one_tensor(node: Any) -> Any:
    """`add.Scalar` for `_foreach_add.Scalar`, `add.Tensor` for `_foreach_add.List`."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not target._schema.name.startswith("aten::_foreach_") or node.kwargs:
        return None
    name = target._schema.name.removeprefix("aten::_foreach_")
    overloads = {"List": "Tensor", "ScalarAndTensor": "Scalar", "Scalar": "Tensor_Scalar" if name == "pow" else "Scalar"}
    wanted = overloads.get(target._overloadname, target._overloadname)
    known = name in ("add", "sub", "mul", "div", "pow", "neg", "sqrt", "reciprocal") and wanted in (
        *overloads.values(),
        "default",
    )
    return getattr(getattr(aten, name), wanted, None) if known and all(_number(u) is not None for u in node.users) else None


def _is_numbers(nodes: Any) -> bool:
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in nodes]
    if len(values) < 2 or not all(isinstance(value, Tensor) and not value.ndim for value in values):
        return False
    return len({(value.dtype, value.device) for value in values if value is not None}) == 1


def _vector(nodes: Any, vectors: dict[Any, Any], graph: Graph) -> Any:
    source = nodes[0].args[0] if _number(nodes[0]) == 0 else None
    in_order = all(node.args[:1] == (source,) and _number(node) == i for i, node in enumerate(nodes)) if source else False
    return vectors[source] if in_order and source in vectors else graph.call_function(aten.stack.default, (list(nodes),))
