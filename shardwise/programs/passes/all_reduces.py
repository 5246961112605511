"""Passes on all-reduces: reduce after linear operators where that is less, and join small all-reduces into buckets.

Works on the functional collectives of an fx graph. Decisions depend on the graph alone, so all ranks decide the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
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
    """An all-reduce: the nodes that wait for it and start it, what it reduces, by which kind, and over which group."""

    wait: Node
    start: Node
    x: Node
    kind: str
    group: str

    @property
    def sort(self) -> tuple[Any, ...]:
        """What all-reduces that become one must have in common."""
        return self.kind, self.group, value(self.x).dtype, value(self.x).device


def reduction(start: Any) -> Reduction | None:
    """The all-reduce that a node starts, if nothing but one wait uses it."""
    users = list(start.users) if is_(start, _ALL_REDUCE) else []
    return Reduction(users[0], start, *start.args) if [user.target for user in users] == [WAIT] else None


def _reduced(x: Node, like: Node, instead: Iterable[Reduction]) -> Node:
    """The all-reduce of a value by the kind and group of `like`, instead of others, and for the operators that those served."""
    start = add(_ALL_REDUCE, (x, *like.args[1:]), like)
    wait = add(WAIT, (start,), like)
    texts = [text for one in instead if (text := one.start.meta.get("shardwise"))]
    start.meta["shardwise"] = wait.meta["shardwise"] = "; ".join(dict.fromkeys(texts))
    return wait


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
        found = _linear(node)
        changed += found is not None and _pays(node, found) and _reduce_at(node, found)
    return changed


class Linear(NamedTuple):
    """A node as a linear function: of which reduced values, by which operators (in order), and what else these take."""

    leaves: tuple[Reduction, ...]
    through: tuple[Node, ...] = ()
    beside: tuple[Node, ...] = ()


def _linear(node: Node, depth: int = 0) -> Linear | None:
    """`node` as a linear function of all-reduced values, or None; what it is made of must have a single user."""
    if depth and (len(node.users) > 1 or depth > _DEPTH):
        return None
    if depth and node.target is WAIT and (leaf := reduction(node.args[0])):
        return Linear((leaf,))
    for operands in _operands(node):
        parts = [part for operand in operands if (part := _linear(operand, depth + 1))]
        if parts and len(parts) == len(operands):
            leaves, through, beside = (tuple(dict.fromkeys(itertools.chain(*every))) for every in zip(*parts, strict=True))
            others = [other for other in node.all_input_nodes if other not in operands]
            return Linear(leaves, (*through, node), (*beside, *others))
    return None


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


def _pays(node: Node, found: Linear) -> bool:
    """Whether reducing at a node instead gives the same values for less communication."""
    sort, here = found.leaves[0].sort, nbytes(node)
    before = sum(math.inf if (size := nbytes(one.x)) is None else size for one in found.leaves)
    if not here or not here <= before < math.inf or (len(found.leaves) == 1 and here == before):
        return False
    epoch = epochs(node.graph)
    involved = (*(one.start for one in found.leaves), *found.through, *found.beside)
    return (
        all(one.sort == sort for one in found.leaves)
        and all(getattr(value(through), "dtype", None) == sort[2] for through in found.through)
        and (sort[0] in _LINEAR or all(through.target in _PLACING | _JOINING for through in found.through))
        and len({epoch[one] for one in involved if one.op == "call_function"} | {epoch[node]}) == 1
        and (not found.beside or set(found.beside) <= _alike(node.graph, sort[1]))
    )


def _alike(graph: Graph, group: str) -> set[Node]:
    """The values that are surely the same on all ranks of a group: what was reduced or gathered over it, and what operators
    whose results depend on their arguments alone make of such values or of nothing."""
    found: set[Node] = set()
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload):
            continue
        gathered = target in (_ALL_REDUCE, _ALL_GATHER) and node.args[-1] == group
        facts = schema_of(target)
        varies = target.namespace not in ("aten", "prims") or facts.written or facts.random or "empty" in str(target)
        if gathered or ((target is WAIT or not varies) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _reduce_at(node: Node, found: Linear) -> bool:
    """Reduce a node instead of the values it is made of, if later nodes accept a contiguous value."""
    packed, graph = value(node).contiguous(), node.graph
    later = {} if order(packed) == order(value(node)) else _restrided(node, packed)
    if later is None:
        return False
    for one in found.leaves:
        with graph.inserting_before(one.start):
            same = order(value(one.x)) == order(value(one.wait))
            x = one.x if same else add(CLONE, (one.x,), one.start, memory_format=torch.contiguous_format)
        one.wait.replace_all_uses_with(x)
        graph.erase_node(one.wait)
        graph.erase_node(one.start)
    users = list(node.users)
    with graph.inserting_before(node.next):
        dense = add(CLONE, (node,), node, memory_format=torch.contiguous_format) if later else node
        wait = _reduced(dense, found.leaves[0].start, found.leaves)
    for user in users:
        user.replace_input_with(node, wait)
    for after, changed in later.items():
        after.meta["val"] = changed
    return True


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
    changed, gone = 0, set[Node]()
    for node in list(graph.nodes):
        members = _members(first) if node not in gone and (first := _small(node)) else []
        gone.update(one.start for one in members)
        if len(members) > 1:
            _put_together(members)
            changed += len(members) - 1
    return changed


def _small(start: Node) -> Reduction | None:
    """The all-reduce that a node starts, if it is small."""
    found = reduction(start)
    return found if found and 0 < (nbytes(start) or 0) <= SMALL else None


def _members(first: Reduction) -> list[Reduction]:
    """The all-reduces that are joined with the first."""
    members, late, total = [first], {first.start}, nbytes(first.start) or 0
    node = first.start.next
    while node.op != "output" and not mutates(node):
        size, other = nbytes(node), _small(node)
        if any(taken in late for taken in node.all_input_nodes):
            if size is None or size > SMALL:
                break
            late.add(node)
        elif size is not None and other and other.sort == first.sort and total + size <= BUCKET:
            members.append(other)
            late.add(node)
            total += size
        node = node.next
    return members


def _put_together(members: list[Reduction]) -> None:
    """Replace all-reduces by one of their concatenation, at the place of the last."""
    last = members[-1].start
    with last.graph.inserting_before(last):
        flat = []
        for one in members:
            packed = value(one.x).is_contiguous()
            x = one.x if packed else add(CLONE, (one.x,), one.start, memory_format=torch.contiguous_format)
            flat.append(add(aten.view.default, (x, [value(x).numel()]), one.start))
        wait = _reduced(add(aten.cat.default, (flat,), last), last, members)
        parts, begin = {}, 0
        for one in members:
            end = begin + value(one.start).numel()
            part = add(aten.slice.Tensor, (wait, 0, begin, end), one.start)
            part = add(aten.view.default, (part, list(value(one.start).shape)), one.start)
            # Results of the program are in memory of their own: the caller may write to one of them.
            parts[one.wait] = add(CLONE, (part,), one.start) if escapes(one.wait) else part
            begin = end
    _use_later(members[0].start, parts, flat[0])
    for one in members:
        last.graph.erase_node(one.start)


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
