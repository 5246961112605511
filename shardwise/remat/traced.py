"""`remat` in traced programs: asks the policy, operator by operator, which results are saved and which are recomputed.

Dynamo turns a block into torch's checkpoint operator; while AOTAutograd traces it, the modes here see every operator, and on
DTensors also the local operators and redistributions that it consists of. If torch splits the program into forward and backward
afterwards, the nodes are tagged with the policy's choice, and the partitioner does the rest. If the backward is inside the
program (whole training steps), nothing is split: the block is then traced a second time when the backward needs it, and saved
results are taken from the first.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from .._torch.compiler import has_backward_inside, is_joint, order_kept, saved_hooks, snapshot, traced_graph
from .._torch.patches import install_patches
from .._torch.replacements import HOOKS
from .._torch.tensors import OpOverload, rule_for, tree_leaves
from ..base.schema import schema_of
from ..layouts.text import Form
from ..programs.passes.graph import AGAIN, WAIT
from ..propagation.table import library_key
from ..tensor.dtensor import DTensor
from .names import size_of, tensors
from .policies import Choice, Made, Policy
from .record_replay import RematMode, facts_of

KEY = torch.ops.shardwise.random_key.default
DRAW = torch.ops.shardwise.draw.default
MOVE = torch.ops.shardwise.move.default
#: Operators that start a collective, whose result has to be waited for, as torch's own do.
_STARTING = (torch.ops.shardwise.exchange.default, torch.ops.shardwise.messages.default)
#: The choices for torch's partitioner.
_TAGS = {
    **dict.fromkeys((Choice.SAVE, Choice.MUST_SAVE), CheckpointPolicy.MUST_SAVE),
    **{Choice.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE, Choice.MUST_RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE},
}
_numbers = itertools.count()


def traced_remat(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], save: Policy, region: str = ""
) -> Any:
    """`remat` as Dynamo traces it."""
    install_patches("tracing")

    def block(*args: Any) -> Any:
        return function(*args, **kwargs)

    return checkpoint(block, *args, use_reentrant=False, context_fn=functools.partial(contexts, save, region))


def contexts(policy: Policy, region: str) -> tuple[_Mode, _Mode]:
    """The modes in which a block is traced, the first time and the second."""
    kept: dict[_Place, Callable[[], Any]] = {}
    return _First(policy, region, kept), _Second(kept)


HOOKS.remat_contexts = contexts
HOOKS.remat_key = lambda policy, region: f"{library_key()} {policy!r} {region!r}"


# ── seeing the operators of a block ───────────────────────────────────────────────────────────────────────────────────


class _Place(NamedTuple):
    """The place of a call in a block: its operator, and how many calls of it came before."""

    func: Any
    number: int


class _Mode(RematMode):
    """Sees the operators of a block, and the local operators inside those on DTensors."""

    #: Called before the block; contexts entered there are left after it.
    begin: Callable[[ExitStack], None]
    #: Runs an operator on local tensors.
    call: Callable[[_Place, Any, Any], Any]

    def __init__(self, kept: dict[_Place, Callable[[], Any]]) -> None:
        super().__init__()
        self._kept = kept
        self._depth, self._counts, self._around, self._passes = 0, Counter[Any](), ExitStack(), False

    def __enter__(self) -> Any:
        if not self._depth:
            self._counts.clear()
            self.begin(self._around)
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if not self._depth:
            self._around.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._passes:
            self._passes = False
            return NotImplemented
        if DTensor in types or (not isinstance(func, OpOverload) and _distributed((args, kwargs))):
            return self.inside(func, args, kwargs)
        number = self._counts[func]
        self._counts[func] += 1
        return self.call(_Place(func, number), args, kwargs)

    def inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on DTensors, and see what it does."""
        with self:
            if not isinstance(func, OpOverload):
                return rule_for(func, DTensor)(*args, **kwargs)
            self._passes = True  # this very call
            return func(*args, **kwargs)

    @staticmethod
    def with_nodes(graph: Any, place: _Place, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The result of an operator, and the nodes that it adds to a graph, if there is one."""
        before = 0 if graph is None else len(graph.nodes)
        out = place.func(*args, **kwargs)
        return out, [] if graph is None else list(itertools.islice(reversed(graph.nodes), len(graph.nodes) - before))


def _distributed(value: Any) -> list[DTensor]:
    return [item for item in tree_leaves(value) if isinstance(item, DTensor)]


class _TracedCall(NamedTuple):
    place: _Place
    args: Any
    random: bool
    out: Any = None
    nodes: Sequence[Any] = ()


class _First(_Mode):
    """Asks the policy what becomes of each result."""

    def __init__(self, policy: Policy, region: str, kept: dict[_Place, Callable[[], Any]]) -> None:
        super().__init__(kept)
        self._policy, self._region = policy, region
        self._open: list[list[_TracedCall]] = []  # the local calls of each running operator on DTensors
        self._started: dict[int, tuple[Any, _Place, Choice]] = {}  # collectives, by what their wait takes

    def begin(self, around: ExitStack) -> None:
        self._tags = is_joint(traced_graph()) and not has_backward_inside()
        self._id = next(_numbers)
        self._kept.clear()
        if has_backward_inside():
            around.enter_context(saved_hooks())

    def inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        calls: list[_TracedCall] = []
        self._open.append(calls)
        try:
            out = super().inside(func, args, kwargs)
        finally:
            self._open.pop()
        results = _distributed(out)
        nbytes = sum(x._layout.concrete.nbytes for x in results) if results else None
        number = self._counts[func, DTensor]
        self._counts[func, DTensor] += 1
        choice = self._choose(_TracedCall(_Place(func, number), args, _is_random(func, args, kwargs)), nbytes or 0)
        locals_ = {id(x._local) for x in results}
        for call in calls:
            own = self._choose(call, nbytes)
            is_result = any(id(x) in locals_ for x in tree_leaves(call.out))
            self._apply(call, choice if is_result and choice.saves and not own.saves else own)
        return out

    def call(self, place: _Place, args: Any, kwargs: Any) -> Any:
        out, nodes = self.with_nodes(traced_graph() if self._tags else None, place, args, kwargs)
        call = _TracedCall(place, args, _is_random(place.func, args, kwargs), out, nodes)
        if self._open:
            self._open[-1].append(call)
        else:
            self._apply(call, self._choose(call))
        return out

    def _choose(self, call: _TracedCall, nbytes: int | None = None) -> Choice:
        func, args = call.place.func, call.args
        if func is KEY or (call.random and not self._tags):  # a second draw would give other numbers
            return Choice.MUST_SAVE
        if facts_of(func).views:
            return Choice.RECOMPUTE
        if func is MOVE:
            nbytes = Form.read(args[3]).layout(args[1], args[0].dtype).concrete.nbytes
        elif nbytes is None:
            nbytes = sum(map(size_of, tensors(call.out)))
        made = Made(str(func), self._region, call.place.number, nbytes, call.random or func is DRAW)
        return self._policy.choose(made, func, args)

    def _apply(self, call: _TracedCall, choice: Choice) -> None:
        """Tag the nodes of a call with the choice, or save its result for the second trace."""
        place, func, writes = call.place, call.place.func, bool(facts_of(call.place.func).writes)
        if func is WAIT and id(call.args[0]) in self._started:
            _, start, choice = self._started[id(call.args[0])]
            if choice.saves and not self._tags:
                self._kept[start] = self._kept[place] = snapshot(call.out)
        elif func in _STARTING or (func is not WAIT and getattr(func, "namespace", "") == "_c10d_functional"):
            self._started[id(call.out)] = call.out, place, choice
        elif choice.saves and not self._tags and (call.random or not writes):
            in_place = writes and traced_graph() is None
            self._kept[place] = snapshot(call.out.clone() if in_place else call.out)
        # torch's partitioner may recompute pointwise operators after all where it can fuse them
        fuses = choice is Choice.SAVE and torch.Tag.pointwise in getattr(func, "tags", ())
        for node in call.nodes:
            node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE if fuses else _TAGS[choice]
            node.meta["ac_graph_id"] = self._id


class _Second(_Mode):
    """Gives the saved results, and computes the rest."""

    def begin(self, around: ExitStack) -> None:
        around.enter_context(saved_hooks())
        around.enter_context(order_kept())

    def call(self, place: _Place, args: Any, kwargs: Any) -> Any:
        if place in self._kept:
            value = self._kept[place]()
            return args[0].copy_(value) if facts_of(place.func).writes else value
        out, nodes = self.with_nodes(traced_graph(), place, args, kwargs)
        for node in nodes:
            node.meta[AGAIN] = True
        return out


# ── facts of operators ────────────────────────────────────────────────────────────────────────────────────────────────


def _is_random(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: attention only with dropout, and those that take functions possibly."""
    if not isinstance(func, OpOverload) or not facts_of(func).random:
        return not isinstance(func, OpOverload)
    about = schema_of(func)
    return "dropout_p" not in about.names or about.named(args, kwargs).get("dropout_p", 0.0) != 0.0
