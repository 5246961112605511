"""`remat` in traced programs: a block's operators are told apart, one by one, into those kept and those computed a second time.

Dynamo makes torch's checkpoint operator of a block; while AOTAutograd traces it, the modes here see every operator, and on
DTensors also the local operators and the moves that it is made of, and ask the policy. Where torch parts the program into
forward and backward afterwards, nodes are tagged with the choice, and the partitioner does the rest. Where the backward is
inside the program (whole training steps), no one parts it: the block is then traced a second time when the backward needs it,
and what is kept is taken from the first.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from .._torch.compiler import order_kept
from .._torch.symbols import hint
from .._torch.tensors import OpOverload, TorchDispatchMode, rule_for, schema, tree_leaves
from .._torch.tracer import has_backward_inside, is_joint, saved_hooks, snapshot, teach_checkpoint, traced_graph
from ..layouts.text import Form
from ..programs.passes.graph import AGAIN, WAIT
from ..propagation.fingerprint import library_key
from ..tensor.dtensor import DTensor
from .policies import Choice, Made, Policy

KEY = torch.ops.shardwise.random_key.default
DRAW = torch.ops.shardwise.draw.default
MOVE = torch.ops.shardwise.move.default
_numbers = itertools.count()


def traced_remat(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], save: Policy, region: str = ""
) -> Any:
    """`remat` as Dynamo traces it."""
    teach_checkpoint(contexts, _key)

    def block(*args: Any) -> Any:
        return function(*args, **kwargs)

    return checkpoint(block, *args, use_reentrant=False, context_fn=functools.partial(contexts, save, region))


def contexts(policy: Policy, region: str) -> tuple[_Mode, _Mode]:
    """What a block is traced in, the first time and the second."""
    kept: dict[_Place, Callable[[], Any]] = {}
    return _First(policy, region, kept), _Second(kept)


def _key(policy: Policy, region: str) -> str:
    return f"{library_key()} {policy!r} {region!r}"


# ── seeing the operators of a block ───────────────────────────────────────────────────────────────────────────────────


class _Place(NamedTuple):
    """A call in a block: its operator, and which call of this operator it is."""

    func: Any
    number: int


class _Mode(TorchDispatchMode):
    """Sees the operators of a block; of those on DTensors what they do with local tensors."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch asks whether a mode minds its compiler."""
        return True

    def __init__(self) -> None:
        super().__init__()
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

    def begin(self, around: ExitStack) -> None:
        """Before the block; what is entered is left after it."""

    def inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on DTensors, and see what it does."""
        with self:
            if not isinstance(func, OpOverload):
                return rule_for(func, DTensor)(*args, **kwargs)
            self._passes = True  # this very call
            return func(*args, **kwargs)

    def call(self, place: _Place, args: Any, kwargs: Any) -> Any:
        """Run an operator on local tensors."""
        raise NotImplementedError(f"{type(self).__name__} does not say how operators run")


def _distributed(value: Any) -> list[DTensor]:
    return [item for item in tree_leaves(value) if isinstance(item, DTensor)]


class _Call(NamedTuple):
    place: _Place
    args: Any
    random: bool
    out: Any = None
    nodes: Sequence[Any] = ()


class _First(_Mode):
    """Asks the policy what becomes of each result."""

    def __init__(self, policy: Policy, region: str, kept: dict[_Place, Callable[[], Any]]) -> None:
        super().__init__()
        self._policy, self._region, self._kept = policy, region, kept
        self._open: list[list[_Call]] = []  # the calls of each operator on DTensors that is at work
        self._started: dict[int, tuple[Any, _Place, Choice]] = {}  # collectives, by what their wait takes

    def begin(self, around: ExitStack) -> None:
        self._tags = is_joint(traced_graph()) and not has_backward_inside()
        self._id = next(_numbers)
        self._kept.clear()
        if has_backward_inside():
            around.enter_context(saved_hooks())

    def inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        calls: list[_Call] = []
        self._open.append(calls)
        try:
            out = super().inside(func, args, kwargs)
        finally:
            self._open.pop()
        results = _distributed(out)
        nbytes = sum(x._layout.concrete.nbytes for x in results) if results else None
        number = self._counts[func, DTensor]
        self._counts[func, DTensor] += 1
        choice = self._choose(_Call(_Place(func, number), args, _is_random(func, args, kwargs)), nbytes or 0)
        locals_ = {id(x._local) for x in results}
        for call in calls:
            own = self._choose(call, _bytes(call) if nbytes is None else nbytes)
            is_result = any(id(x) in locals_ for x in tree_leaves(call.out))
            self._settle(call, choice if is_result and choice.saves and not own.saves else own)
        return out

    def call(self, place: _Place, args: Any, kwargs: Any) -> Any:
        graph = traced_graph() if self._tags else None
        before = 0 if graph is None else len(graph.nodes)
        out = place.func(*args, **kwargs)
        nodes = [] if graph is None else list(itertools.islice(reversed(graph.nodes), len(graph.nodes) - before))
        call = _Call(place, args, _is_random(place.func, args, kwargs), out, nodes)
        if self._open:
            self._open[-1].append(call)
        else:
            self._settle(call, self._choose(call, _bytes(call)))
        return out

    def _choose(self, call: _Call, nbytes: int) -> Choice:
        func, args = call.place.func, call.args
        if func is KEY or (call.random and not self._tags):  # drawn again, it would be another one
            return Choice.MUST_SAVE
        if _is_view(func):
            return Choice.RECOMPUTE
        if func is MOVE:
            nbytes = Form.read(args[3]).layout(args[1], args[0].dtype).concrete.nbytes
        made = Made(str(func), self._region, call.place.number, nbytes, call.random or func is DRAW)
        return self._policy.choose(made, func, args)

    def _settle(self, call: _Call, choice: Choice) -> None:
        place = call.place
        if place.func is WAIT and id(call.args[0]) in self._started:
            _, start, choice = self._started[id(call.args[0])]
            if choice.saves and not self._tags:
                self._kept[start] = self._kept[place] = snapshot(call.out)
        elif _starts(place.func):
            self._started[id(call.out)] = call.out, place, choice
        elif choice.saves and not self._tags and (call.random or not _writes(place.func)):
            in_place = _writes(place.func) and traced_graph() is None
            self._kept[place] = snapshot(call.out.clone() if in_place else call.out)
        for node in call.nodes:
            node.meta["recompute"], node.meta["ac_graph_id"] = _tag(choice, place.func), self._id


class _Second(_Mode):
    """Gives what was kept, and computes the rest."""

    def __init__(self, kept: dict[_Place, Callable[[], Any]]) -> None:
        super().__init__()
        self._kept = kept

    def begin(self, around: ExitStack) -> None:
        around.enter_context(saved_hooks())
        around.enter_context(order_kept())

    def call(self, place: _Place, args: Any, kwargs: Any) -> Any:
        if place in self._kept:
            value = self._kept[place]()
            return args[0].copy_(value) if _writes(place.func) else value
        graph = traced_graph()
        before = 0 if graph is None else len(graph.nodes)
        out = place.func(*args, **kwargs)
        for node in [] if graph is None else itertools.islice(reversed(graph.nodes), len(graph.nodes) - before):
            node.meta[AGAIN] = True
        return out


# ── what operators are ────────────────────────────────────────────────────────────────────────────────────────────────


def _tag(choice: Choice, func: Any) -> CheckpointPolicy:
    """What torch's partitioner is told. What it can fuse with others it may compute again though it is to be saved."""
    if choice is Choice.SAVE:
        fuses = torch.Tag.pointwise in getattr(func, "tags", ())
        return CheckpointPolicy.PREFER_SAVE if fuses else CheckpointPolicy.MUST_SAVE
    return _TAGS[choice]


_TAGS = {
    Choice.MUST_SAVE: CheckpointPolicy.MUST_SAVE,
    Choice.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    Choice.MUST_RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
}


def _bytes(call: _Call) -> int:
    """The bytes of the results of an operator on local tensors; of several ranks in one process, of the first."""
    tensors = [x for x in tree_leaves(call.out) if isinstance(x, Tensor)]
    return sum(hint(x.numel()) * x.element_size() for x in tensors)


def _is_random(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers. Attention does only if it drops something; of those that take functions none
    tells."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return not isinstance(func, OpOverload)
    given = dict(zip((argument.name for argument in schema(func).arguments), args, strict=False)) | kwargs
    names = [argument.name for argument in schema(func).arguments]
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _is_view(func: Any) -> bool:
    returns = schema(func).returns if isinstance(func, OpOverload) else ()
    return any(out.alias_info is not None and not out.alias_info.is_write for out in returns)


def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and bool(schema(func).is_mutable)


def _starts(func: Any) -> bool:
    """Whether an operator gives what a wait takes."""
    if not isinstance(func, OpOverload) or func is WAIT:
        return False
    own = (torch.ops.shardwise.exchange.default, torch.ops.shardwise.messages.default)
    return func.namespace == "_c10d_functional" or func in own
