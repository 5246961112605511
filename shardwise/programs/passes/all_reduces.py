"""Passes on all-reduces: reduce after linear operators where that is less, and join small all-reduces into buckets.

Works on the functional collectives of an fx graph. Decisions depend on the graph alone, so all ranks decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..._torch.tensors import OpOverload, collectives
from ...base.schema import schema_of
from .graph import CLONE, WAIT, add, epochs, escapes, is_, mutates, nbytes, order, value

aten = torch.ops.aten
_ALL_REDUCE = collectives.all_reduce.default
_ALL_GATHER = collectives.all_gather_into_tensor.default


class Reduction(NamedTuple):
    """An all-reduce: the node that starts it, what it reduces, by which kind, and over which group."""

    start: Node
    x: Node
    kind: str
    group: str

    @property
    def sort(self) -> tuple[str, str, torch.dtype]:
        """What all-reduces that become one must have in common."""
        return self.kind, self.group, value(self.x).dtype


def reduction(node: Any) -> Reduction | None:
    """The all-reduce that a node waits for."""
    start: Any = node.args[0] if node.target is WAIT else None
    return Reduction(start, *start.args) if is_(start, _ALL_REDUCE) and len(start.users) == 1 else None


# ── after linear operators ────────────────────────────────────────────────────────────────────────────────────────────

#: Operators that only rearrange elements of their first argument, so that any reduction commutes with them.
_PLACING = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.permute.default),
        *(aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim),
        *(aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.narrow.default, aten.diagonal.default),
        *(aten.flip.default, aten.detach.default, aten.alias.default, CLONE),
        *(aten.index_select.default, aten.gather.default, aten.index.Tensor),
    }
)
#: The same for operators whose first argument is a list of tensors.
_JOINING = frozenset({aten.cat.default, aten.stack.default})
#: Linear operators of one argument.
_SUMMING = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.neg.default})
_ADDING = frozenset({aten.add.Tensor, aten.sub.Tensor})
_TIMES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_OVER = frozenset({aten.div.Tensor, aten.div.Scalar})
#: Kinds that are linear: the reduction of sums and multiples is that of the reductions.
_LINEAR = ("sum", "avg")
#: The most operators that a reduction moves across.
_DEPTH = 16


def reduce_later(graph: Graph) -> int:
    """Reductions move behind linear operators where fewer or smaller ones are left: a + b reduced once instead of a and b, the
    sum, the mean or a slice of a value instead of the value.

    It applies where nothing else uses the reduced values, and to other factors that are surely the same on all ranks of the
    group (numbers, constants, and what was reduced or gathered over it). Other kinds than sums only move behind what picks and
    places elements. There are never more reductions, never more bytes, and the same local work; sums differ by rounding.
    """
    changed = 0
    for node in list(graph.nodes):
        found = _below(node, 0)
        if found is not None and _pays(node, found, graph):
            changed += _reduce_at(node, found)
    return changed


class Linear(NamedTuple):
    """A node as a linear function: of which reduced values, by which operators (in order), and what else these take."""

    leaves: tuple[Node, ...]
    through: tuple[Node, ...] = ()
    beside: tuple[Node, ...] = ()


def _linear(node: Node, depth: int) -> Linear | None:
    """`node` as a linear function of all-reduced values, or None; it must have a single user."""
    if len(node.users) > 1 or depth > _DEPTH:
        return None
    return Linear((node,)) if reduction(node) else _below(node, depth)


def _below(node: Node, depth: int) -> Linear | None:
    for operands in _operands(node):
        parts = [_linear(operand, depth + 1) for operand in operands]
        if parts and None not in parts:
            return _together(node, operands, [part for part in parts if part is not None])
    return None


def _together(node: Node, operands: Sequence[Node], parts: list[Linear]) -> Linear:
    beside = [other for other in node.all_input_nodes if other not in operands]
    every = [tuple(dict.fromkeys(item for part in parts for item in part[i])) for i in range(3)]
    return Linear(every[0], (*every[1], node), (*every[2], *beside))


def _operands(node: Any) -> list[list[Node]]:
    """The arguments in which an operator is linear: jointly in those of one list, while the others stay as they are."""
    target, args = node.target, node.args
    if target in _PLACING or target in _SUMMING:
        return [_nodes(args[:1])]
    if target in _JOINING:
        return [_nodes(args[0])]
    if target in _ADDING:
        return [_nodes(args[:2])] if len(_nodes(args[:2])) == 2 and _is_tame(node.kwargs.get("alpha", 1), node) else []
    if target in _TIMES:
        return [[factor] for factor in _nodes(args[:2])] if all(_is_tame(factor, node) for factor in args[:2]) else []
    if target in _OVER:
        return [_nodes(args[:1])] if isinstance(args[1], Node) or (args[1] and _is_tame(1 / args[1], node)) else []
    return []


def _nodes(values: Iterable[Any]) -> list[Node]:
    return [item for item in values if isinstance(item, Node)]


def _is_tame(factor: Any, node: Node) -> bool:
    """Whether multiplying before the reduction is as safe from overflow as after it."""
    if not isinstance(factor, int | float):
        return isinstance(factor, Node)
    narrow = getattr(value(node), "dtype", None) in (torch.float16, torch.bfloat16)
    return math.isfinite(factor) and (not narrow or abs(factor) <= 1)


def _pays(node: Node, found: Linear, graph: Graph) -> bool:
    """Whether reducing at a node instead gives the same values for less communication."""
    reductions = [one for leaf in found.leaves if (one := reduction(leaf))]
    sort, here = reductions[0].sort, nbytes(node)
    before = [nbytes(one.x) for one in reductions]
    sizes = [size for size in before if size is not None]
    if not here or len(sizes) < len(before) or here > sum(sizes) or (len(sizes) == 1 and here == sizes[0]):
        return False
    epoch = epochs(graph)
    involved = (*(one.start for one in reductions), *found.through, *found.beside)
    return (
        all(one.sort == sort for one in reductions)
        and all(getattr(value(through), "dtype", None) == sort[2] for through in found.through)
        and (sort[0] in _LINEAR or all(through.target in _PLACING | _JOINING for through in found.through))
        and len({epoch[one] for one in involved if one.op == "call_function"} | {epoch[node]}) == 1
        and (not found.beside or set(found.beside) <= _alike(graph, sort[1]))
    )


def _alike(graph: Graph, group: str) -> set[Node]:
    """The values that are surely the same on all ranks of a group: what was reduced or gathered over it, and what pure
    operators make of such values or of nothing."""
    found: set[Node] = set()
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload):
            continue
        gathered = target in (_ALL_REDUCE, _ALL_GATHER) and node.args[-1] == group
        pure = target is WAIT or (target.namespace in ("aten", "prims") and _is_function(target))
        if gathered or (pure and all(taken in found for taken in node.all_input_nodes)):
            found.add(node)
    return found


def _is_function(target: OpOverload) -> bool:
    """Whether an operator's result depends on its arguments alone."""
    return not (schema_of(target).written or schema_of(target).random or "empty" in str(target))


def _reduce_at(node: Node, found: Linear) -> bool:
    """Reduce a node instead of the values it is made of, if later nodes accept a contiguous value."""
    reductions = [one for leaf in found.leaves if (one := reduction(leaf))]
    packed = value(node).contiguous()
    later = {} if order(packed) == order(value(node)) else _restrided(node, packed)
    if later is None:
        return False
    graph = node.graph
    for leaf, one in zip(found.leaves, reductions, strict=True):
        with graph.inserting_before(one.start):
            same = order(value(one.x)) == order(value(leaf))
            x = one.x if same else add(CLONE, (one.x,), one.start, memory_format=torch.contiguous_format)
        leaf.replace_all_uses_with(x)
        graph.erase_node(leaf)
        graph.erase_node(one.start)
    users = list(node.users)
    with graph.inserting_before(node.next):
        dense = add(CLONE, (node,), node, memory_format=torch.contiguous_format) if later else node
        start = add(_ALL_REDUCE, (dense, reductions[0].kind, reductions[0].group), reductions[0].start)
        wait = add(WAIT, (start,), reductions[0].start)
    start.meta["shardwise"] = wait.meta["shardwise"] = _why(one.start for one in reductions)
    for user in users:
        user.replace_input_with(node, wait)
    for after, changed in later.items():
        after.meta["val"] = changed
    return True


def _why(nodes: Iterable[Node]) -> str:
    """The operators that joined all-reduces are made for, as text."""
    return "; ".join(dict.fromkeys(text for node in nodes if (text := node.meta.get("shardwise"))))


def _restrided(node: Node, now: Any) -> dict[Node, Any] | None:
    """The changed results of later nodes if a node gives `now`, with other strides; None if one of them refuses these, or if a
    result of the program would change its strides."""
    found = {node: now}
    after = node.next
    while after.op != "output" and len(found) <= 4 * _DEPTH:
        if any(taken in found for taken in after.all_input_nodes):
            args, kwargs = map_arg((after.args, after.kwargs), lambda taken: found.get(taken, value(taken)))
            target: Any = after.target
            try:
                given = target(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError):
                return None
            if order(given) != order(value(after)):
                found[after] = given
        after = after.next
    escaped = any(taken in found for taken in after.all_input_nodes)
    del found[node]
    return None if escaped or after.op != "output" else found


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Bytes up to which the launch latency of an all-reduce exceeds the copies of its tensor into a bucket and out of it.
SMALL = 256 << 10
#: Bytes that a bucket holds at most: it waits for the last of its tensors, and takes memory.
BUCKET = 25 << 20


def bucket(graph: Graph) -> int:
    """Join small all-reduces of the same kind, group and dtype into one, at the place of the last.

    It applies to those that do not need each other's results, where only small values have to wait for the last: gradients that
    are results of the program, norms, counts. It saves all launch latencies but one, and costs copies that take less.
    """
    changed = 0
    while found := _bucket_once(graph):
        changed += found
    return changed


def _bucket_once(graph: Graph) -> int:
    changed = 0
    gone: set[Node] = set()
    for node in list(graph.nodes):
        if node not in gone and _is_small(node):
            members = _members(node)
            gone.update(members)
            changed += len(members) - 1
            if len(members) > 1:
                _put_together(members)
    return changed


def _is_small(start: Node) -> bool:
    size = nbytes(start) if start.target is _ALL_REDUCE and [user.target for user in start.users] == [WAIT] else None
    return size is not None and 0 < size <= SMALL


def _members(first: Node) -> list[Node]:
    """The all-reduces that are joined with the first."""
    members, late = [first], {first}
    total, sort = nbytes(first) or 0, _sort(first)
    node = first.next
    while node.op != "output" and not mutates(node):
        size = nbytes(node)
        if any(taken in late for taken in node.all_input_nodes):
            if size is None or size > SMALL:
                break
            late.add(node)
        elif size is not None and _is_small(node) and _sort(node) == sort and total + size <= BUCKET:
            members.append(node)
            late.add(node)
            total += size
        node = node.next
    return members


def _sort(start: Node) -> tuple[Any, ...]:
    return *start.args[1:], value(start).dtype, value(start).device


def _put_together(members: list[Node]) -> None:
    """Replace all-reduces by one of their concatenation, at the place of the last."""
    first, last = members[0], members[-1]
    graph = first.graph
    with graph.inserting_before(last):
        flat = [_flat(start) for start in members]
        joined = add(aten.cat.default, (flat,), last)
        start = add(_ALL_REDUCE, (joined, *last.args[1:]), last)
        wait = add(WAIT, (start,), last)
        start.meta["shardwise"] = wait.meta["shardwise"] = _why(members)
        parts, begin = {}, 0
        for member in members:
            (result,) = member.users
            end = begin + value(member).numel()
            part = add(aten.slice.Tensor, (wait, 0, begin, end), member)
            part = add(aten.view.default, (part, list(value(member).shape)), member)
            # Results of the program are in memory of their own: the caller may write to one of them.
            parts[result] = add(CLONE, (part,), member) if escapes(result) else part
            begin = end
    _use_later(first, parts, flat[0])
    for member in members:
        graph.erase_node(member)


def _flat(start: Node) -> Node:
    x: Any = start.args[0]
    if not value(x).is_contiguous():
        x = add(CLONE, (x,), start, memory_format=torch.contiguous_format)
    return add(aten.view.default, (x, [value(x).numel()]), start)


def _use_later(first: Node, parts: dict[Node, Node], until: Node) -> None:
    """Use the parts of a bucket instead of the single results, and move the nodes that need them behind them."""
    late = set(parts.values())
    tail = list(parts.values())[-1]
    for result, part in parts.items():
        result.replace_all_uses_with(part)
    node = first
    while node is not until:
        following = node.next
        if any(taken in late for taken in node.all_input_nodes):
            tail.append(node)
            tail = node
            late.add(node)
        node = following
    for result in parts:
        result.graph.erase_node(result)
