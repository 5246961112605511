"""Passes on moves, the redistributions of a local program: remove redundant ones, and turn the others into the steps of plans.

Works on `shardwise::move` nodes, which name the layouts they move between; `expand_moves` replaces them by operators and
collectives, and from then on the program has no layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch.compiler import trace_local
from ...comm.tracing import tracing
from ...errors import PlanError
from ...layouts.layout import Layout
from ...layouts.text import Form
from ...planning.plan import plan
from ...redistribution.run import move
from .graph import AGAIN, CLONE, epochs, mutates, order, remove_dead, replace, value

MOVE = torch.ops.shardwise.move.default
#: Operators that give the value of their argument.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, CLONE)


class Move(NamedTuple):
    """The arguments of a move node. A size that is a symbol is a node."""

    x: Node
    shape: Sequence[int | Node]
    have: str
    want: str
    operator: str

    @property
    def symbolic(self) -> bool:
        """Whether a size is symbolic."""
        return any(isinstance(size, Node) for size in self.shape)

    def layout(self, form: str) -> Layout:
        """The layout that the text of a form stands for; no size may be symbolic."""
        shape: Any = tuple(self.shape)
        return Form.read(form).layout(shape, value(self.x).dtype)

    def __str__(self) -> str:
        return f"{self.operator}: {Form.read(self.have)} → {Form.read(self.want)}"


def moves(graph: Graph) -> list[Node]:
    """The moves of a program, in order."""
    return [node for node in graph.nodes if node.target is MOVE]


def read(node: Any) -> Move:
    """The arguments of a move node."""
    return Move(*node.args)


# ── merging ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def merge_moves(graph: Graph) -> int:
    """The same move of the same value is made once, and one move after another becomes one move, or none.

    It applies where the value is not written to in between and the moves that remain do not cost more by their plans. What it
    leaves never communicates more; a sum that was reduced and is partial again may stay partial, and differ by rounding.
    """
    changed = 0
    while found := _make_once(graph) + _join(graph):
        changed += found
    return changed


def _make_once(graph: Graph) -> int:
    """Moves of one value between the same layouts become the first of them."""
    epoch = epochs(graph)
    first: dict[tuple[Any, ...], Node] = {}
    every = moves(graph)
    for node in every:
        it = read(node)
        source = _source(it.x, epoch)
        known = first.setdefault((source, tuple(it.shape), it.have, it.want, epoch[node], node.meta.get(AGAIN)), node)
        if known is not node:
            replace(node, known)
    return len(every) - len(first)


def _source(node: Node, epoch: dict[Node, int]) -> Node:
    """The node from which a node has its value unchanged."""
    while node.target in _SAME and epoch[node.all_input_nodes[0]] == epoch[node]:
        node = node.all_input_nodes[0]
    return node


def _join(graph: Graph) -> int:
    """Move straight from where a value was before another move, where that costs no more."""
    epoch = epochs(graph)
    changed = 0
    for node in moves(graph):
        inner = read(node)
        outer, only = _onward(node, epoch)
        fitting = [user for user in outer if _continues(inner, read(user))]
        chosen = _worthwhile(inner, fitting, only and len(fitting) == len(outer))
        for user in chosen:
            _skip(inner, user)
        changed += len(chosen)
    if changed:
        remove_dead(graph, collectives_too=True)
    return changed


def _onward(node: Node, epoch: dict[Node, int]) -> tuple[list[Node], bool]:
    """The moves of a node's value, and whether nothing else uses it."""
    found, only = [], True
    for user in node.users:
        if epoch[user] != epoch[node]:
            only = False
        elif user.target is MOVE:
            found.append(user)
        elif user.target in _SAME:
            more, alone = _onward(user, epoch)
            found += more
            only &= alone
        else:
            only = False
    return found, only


def _continues(inner: Move, outer: Move) -> bool:
    """Whether one move starts where another one ends, and both are on one mesh, or parts of it."""
    meshes = [Form.read(form).mesh.root for form in (inner.have, inner.want, outer.want)]
    same = inner.want == outer.have and tuple(inner.shape) == tuple(outer.shape)
    return same and meshes[0] is meshes[1] is meshes[2]


def _worthwhile(inner: Move, outer: list[Node], only: bool) -> list[Node]:
    """Those of the moves after `inner` that should not start from where it ends. If `only` they use it, it need not be made."""
    others = [read(user) for user in outer]
    direct = [_cost(inner, inner.have, one.want) for one in others]
    after = [_cost(inner, inner.want, one.want) for one in others]
    if only and outer and sum(direct) <= _cost(inner, inner.have, inner.want) + sum(after) < math.inf:
        return outer
    return [user for user, one, other in zip(outer, direct, after, strict=True) if one < other]


def _cost(it: Move, have: str, want: str) -> float:
    """Estimated seconds from one layout to another; nobody knows where there is no plan, or no shape."""
    if have == want:
        return 0.0
    try:
        return math.inf if it.symbolic else plan(it.layout(have), it.layout(want)).cost
    except PlanError:
        return math.inf


def _skip(inner: Move, node: Node) -> None:
    """Let a move start from where `inner` starts."""
    outer = read(node)
    if inner.have == outer.want:
        replace(node, inner.x)
    else:
        node.args = (inner.x, outer.shape, inner.have, outer.want, outer.operator)


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def expand_moves(graph: Graph, decompositions: dict[Any, Any] | None = None) -> int:
    """Every move becomes the operators and collectives of its plan's steps; these say in `meta["shardwise"]` what they serve.

    A move stays whole, and finds its steps when it runs, where sizes are symbols; where it shards or joins shards of different
    sizes, since ranks would then have different programs; and where its steps write into buffers.
    """
    known: dict[Any, Graph] = {}
    changed = 0
    for node in moves(graph):
        it = read(node)
        if it.symbolic or not _is_alike(it):
            continue
        x = value(it.x)
        key = (*map(str, (it.shape, it.have, it.want)), order(x), x.dtype)
        if key not in known:
            known[key] = _steps(it, decompositions)
        if not any(map(mutates, known[key].nodes)):
            _splice(node, known[key])
            changed += 1
    return changed


def _is_alike(it: Move) -> bool:
    """Whether the steps of a move are the same on all ranks: shards of a dim may differ in size only if no step changes it."""
    steps = plan(it.layout(it.have), it.layout(it.want)).steps
    changed = [dims for step in steps for dims in zip(step.before.dims, step.after.dims, strict=True) if dims[0] != dims[1]]
    return all(min(factor.sizes) == max(factor.sizes) for dims in changed for dim in dims for factor in dim)


def _steps(it: Move, decompositions: dict[Any, Any] | None) -> Graph:
    have, want = it.layout(it.have), it.layout(it.want)

    def program(x: Tensor) -> Tensor:
        return move(x, have, want).contiguous()

    with tracing(whole_moves=False):
        steps: Graph = trace_local(program, value(it.x), decompositions)
    return steps


def _splice(node: Node, steps: Graph) -> None:
    """Put the nodes of steps in place of a move."""
    it, graph = read(node), node.graph
    place = {old: it.x for old in steps.nodes if old.op == "placeholder"}
    with graph.inserting_before(node):
        for old in steps.nodes:
            if old.op == "call_function":
                place[old] = new = graph.node_copy(old, place.__getitem__)
                new.meta = {"val": value(old), "shardwise": str(it), "stack_trace": node.meta.get("stack_trace")}
    (result,) = steps.output_node().all_input_nodes
    replace(node, place[result])
