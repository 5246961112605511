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
from ...layouts.text import Form
from ...planning.plan import Plan, plan
from ...redistribution.run import move
from .graph import AGAIN, CLONE, epochs, mutates, order, remove_dead, replace, value

MOVE = torch.ops.shardwise.move.default
#: Operators that give the value of their argument.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, CLONE)


class Move(NamedTuple):
    """The arguments of a move node. A size that is a symbol is a node."""

    x: Node
    shape: Sequence[Any]
    have: str
    want: str
    operator: str

    def plan(self, have: str, want: str) -> Plan | None:
        """The plan from one layout to another, given as texts; None where there is none, or where a size is symbolic."""
        if any(isinstance(size, Node) for size in self.shape):
            return None
        try:
            before, after = (Form.read(form).layout(tuple(self.shape), value(self.x).dtype) for form in (have, want))
            return plan(before, after)
        except PlanError:
            return None

    def cost(self, have: str, want: str) -> float:
        """Estimated seconds from one layout to another; nobody knows where there is no plan."""
        steps = None if have == want else self.plan(have, want)
        return steps.cost if steps is not None else 0.0 if have == want else math.inf


def moves(graph: Graph) -> list[Any]:
    """The moves of a program, in order."""
    return list(graph.find_nodes(op="call_function", target=MOVE))


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
        it = Move(*node.args)
        source = it.x
        while source.target in _SAME and epoch[source.all_input_nodes[0]] == epoch[source]:
            source = source.all_input_nodes[0]
        known = first.setdefault((source, tuple(it.shape), it.have, it.want, epoch[node], node.meta.get(AGAIN)), node)
        if known is not node:
            replace(node, known)
    return len(every) - len(first)


def _join(graph: Graph) -> int:
    """Move straight from where a value was before another move, where that costs no more."""
    epoch = epochs(graph)
    changed = 0
    for node in moves(graph):
        inner = Move(*node.args)
        users, only = _onward(node, epoch)
        outer = {user: it for user in users if _continues(inner, it := Move(*user.args))}
        for user in (chosen := _worthwhile(inner, outer, only and len(outer) == len(users))):
            if inner.have == outer[user].want:
                replace(user, inner.x)
            else:
                user.args = tuple(outer[user]._replace(x=inner.x, have=inner.have))
        changed += len(chosen)
    if changed:
        remove_dead(graph, collectives_too=True)
    return changed


def _onward(node: Node, epoch: dict[Node, int]) -> tuple[list[Any], bool]:
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


def _worthwhile(inner: Move, outer: dict[Node, Move], only: bool) -> list[Node]:
    """Those of the moves after `inner` that should not start from where it ends. If `only` they use it, it need not be made."""
    direct = [inner.cost(inner.have, one.want) for one in outer.values()]
    after = [inner.cost(inner.want, one.want) for one in outer.values()]
    if only and outer and sum(direct) <= inner.cost(inner.have, inner.want) + sum(after) < math.inf:
        return list(outer)
    return [user for user, one, other in zip(outer, direct, after, strict=True) if one < other]


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def expand_moves(graph: Graph, decompositions: dict[Any, Any] | None = None) -> int:
    """Every move becomes the operators and collectives of its plan's steps; these say in `meta["shardwise"]` what they serve.

    A move stays whole, and finds its steps when it runs, where sizes are symbols; where it shards or joins shards of different
    sizes, since ranks would then have different programs; and where its steps write into buffers.
    """
    known: dict[Any, Graph] = {}
    changed = 0
    for node in moves(graph):
        it = Move(*node.args)
        steps = it.plan(it.have, it.want)
        if steps is None or not _is_alike(steps):
            continue
        key = (steps.have, steps.want, order(value(it.x)))
        if key not in known:
            known[key] = _traced(steps, value(it.x), decompositions)
        if not any(map(mutates, known[key].nodes)):
            _splice(node, it, known[key])
            changed += 1
    return changed


def _is_alike(steps: Plan) -> bool:
    """Whether steps are the same on all ranks: shards of a dim may differ in size only if no step changes it."""
    pairs = [dims for step in steps.steps for dims in zip(step.before.dims, step.after.dims, strict=True)]
    return all(min(part.sizes) == max(part.sizes) for dims in pairs if dims[0] != dims[1] for dim in dims for part in dim)


def _traced(steps: Plan, x: Tensor, decompositions: dict[Any, Any] | None) -> Graph:
    with tracing(whole_moves=False):
        found: Graph = trace_local(lambda x: move(x, steps.have, steps.want).contiguous(), x, decompositions)
    return found


def _splice(node: Node, it: Move, steps: Graph) -> None:
    """Put the nodes of steps in place of a move."""
    why = f"{it.operator}: {Form.read(it.have)} → {Form.read(it.want)}"
    place = {old: it.x for old in steps.nodes if old.op == "placeholder"}
    with node.graph.inserting_before(node):
        for old in steps.nodes:
            if old.op == "call_function":
                place[old] = new = node.graph.node_copy(old, place.__getitem__)
                new.meta = {"val": value(old), "shardwise": why, "stack_trace": node.meta.get("stack_trace")}
    (result,) = steps.output_node().all_input_nodes
    replace(node, place[result])
