"""The two runs of a block under eager `remat`: `FirstRun` saves the results that the policy chooses, `SecondRun` replays them.

Both are dispatch modes that see every operator before it runs (on DTensors, not on their shards), every redistribution of a
DTensor, and every compiled region as one operator. Neither changes the result of an operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from .._torch.compiler import untraced
from .._torch.tensors import OpOverload, TorchDispatchMode, alias, tree_map_only
from ..base.schema import schema_of
from ..comm.interception import watchers
from ..errors import RematError
from .names import ARGUMENT, OUTSIDE, Invocation, Names, Value, describe, facts_of_tensor, size_of, tensors, version
from .policies import Made, Policy

# ── states of random number generators ────────────────────────────────────────────────────────────────────────────────

States = list[tuple[Generator, Tensor]]


def get_states(values: Iterable[Tensor] = (), generator: Generator | None = None) -> States:
    """The states of the generators of the host, of the devices of some tensors and the one in use, and of one of the user's."""
    found = [torch.default_generator, *([] if generator is None else [generator])]
    if torch.cuda.is_initialized():
        devices = {torch.cuda.current_device(), *(x.device.index for x in values if x.device.type == "cuda")} - {None}
        found += [torch.cuda.default_generators[device] for device in sorted(devices)]
    return [(one, one.get_state()) for one in found]


def set_states(states: States) -> None:
    """Restore saved states."""
    for one, state in states:
        one.set_state(state)


@contextlib.contextmanager
def from_states(states: States) -> Iterator[None]:
    """In the block, draw from saved states; afterwards generators are as if nothing had been drawn.

    >>> _ = torch.manual_seed(0); before = get_states(); first = torch.rand(1)
    >>> with from_states(before):
    ...     again = torch.rand(1)
    >>> bool(again == first)
    True
    """
    now = [(one, one.get_state()) for one, _ in states]
    set_states(states)
    try:
        yield
    finally:
        set_states(now)


# ── cells, and facts of operators ─────────────────────────────────────────────────────────────────────────────────────


class Cell:
    """The place of a value that the backward will ask for; the second run fills it."""

    __slots__ = ("__weakref__", "facts", "left", "of", "packs", "value", "version")

    def __init__(self, of: Value, facts: tuple[Any, ...]) -> None:
        self.of, self.facts = of, facts
        self.packs, self.left = 0, 0  #: how often autograd saved it, and will still ask for it
        self.value: Tensor | None = None
        self.version = 0

    def fill(self, x: Tensor) -> None:
        """Set its value."""
        self.value, self.version, self.left = x, version(x), self.packs


#: Saved for a call that wrote to a tensor from outside, which the second run must not do again.
_WRITTEN = object()


@dataclass(eq=False, slots=True)
class Facts:
    """What `remat` has to know of an operator.

    writes  the arguments it writes to, by position or by name
    hidden  positions of the arguments that it writes to although its schema does not say so
    views   whether its result shares memory with an argument
    kind    what sets it apart from others (see `_KINDS`)
    plain   whether nothing of all this holds, nor is it random
    """

    name: str
    op: Any = None
    writes: tuple[int | str, ...] = ()
    hidden: tuple[int, ...] = ()
    views: bool = False
    random: bool = False
    kind: str = ""
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.plain = not (self.writes or self.hidden or self.views or self.random or self.kind)


#: Redistributions, new random numbers and compiled regions, as policies and errors name them.
MOVE, DRAW, REGION = Facts("shardwise.move"), Facts("shardwise.draw", random=True), Facts("higher_order.inductor_compiled_code")
#: Running statistics.
_HIDDEN = {f"aten.{name}": (3, 4) for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")}
_SAME = ("detach.", "alias.", "sym_", "is_", "size.", "stride.", "storage_offset.")
#: By the start of an operator's name: its result is the "same" value as its argument, or no tensor; it "sends" to other
#: processes in place; it "lifts" a tensor just made of Python numbers; it gives "empty" memory; it "casts" to another dtype.
_KINDS = {
    **dict.fromkeys(("prim.", *(f"aten.{name}" for name in _SAME)), "same"),
    **{"c10d.": "sends", "aten.lift_fresh.": "lifts", "aten._to_copy.default": "casts"},
    **dict.fromkeys(("aten.empty", "aten.new_empty"), "empty"),
}
#: By the id of an operator, which is quicker to look up than by the operator.
_facts: dict[int, Facts] = {}


def facts_of(op: Any) -> Facts:
    """The facts of an operator, from its schema."""
    if id(op) not in _facts:
        _facts[id(op)] = _read(op) if isinstance(op, OpOverload) else Facts(f"higher_order.{op.name()}", op)
    return _facts[id(op)]


def _read(op: Any) -> Facts:
    about = schema_of(op)
    kind = next((kind for start, kind in _KINDS.items() if str(op).startswith(start)), "")
    written = about.tensors if kind == "sends" else about.written  # these write to all their tensors, and do not say so
    writes = tuple(name if name in about.keywords else about.names.index(name) for name in written)
    return Facts(str(op), op, writes, _HIDDEN.get(about.name, ()), about.view and not writes, about.random, kind)


class RematMode(TorchDispatchMode):
    """A dispatch mode of `remat`, which sees operators that take functions, and under which compiled functions run compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch asks."""
        return True


class BlockRun(RematMode):
    """One run of a block."""

    #: Given a call, its facts and its arguments: the result of an operator.
    operate: Callable[[Invocation, Facts, Any, dict[str, Any]], Any]
    #: Given a call, its facts and what runs it: the result of a redistribution, a draw or a compiled region.
    whole: Callable[[Invocation, Facts, Callable[[], Any]], Any]

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names
        self._quiet = False
        self._draws = 0
        self._current: Invocation | None = None
        self._others: Any = ()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it does, in a quicker way than torch's

    def __enter__(self) -> Any:
        self._others, watchers.now = watchers.now, (*watchers.now, self.result)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        watchers.now = self._others

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        facts = _facts.get(id(func)) or facts_of(func)
        if facts.kind == "same":
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                value, writes = self.names.value_now(args[0])
                self.names.name(out, value, -writes)
            return out
        key = self.names.key(facts, (_content(args[0]),) if facts.kind == "lifts" else args, kwargs)
        if facts.random:
            self._draws += 1
            key = (self._draws, key)  # its result depends on what was drawn before
        call = self.names.call(key, facts.name, self.names.region)
        outer, self._current = self._current, call
        try:
            out = self.operate(call, facts, args, kwargs)
        finally:
            self._current = outer
        if (facts.plain or facts.views) and type(out) is Tensor:
            value = call.results[0]
            if facts.views:
                value.root = self.names.value(args[0]).root
            self._give(out, value)
        else:
            self._name(call, facts, out, args, kwargs)
        if self.names.strange and call is self.names.strange[-1]:
            call.gives = ", ".join(describe(facts_of_tensor(x)) for x in tensors(out)) or repr(out)
        return out

    def result(self, operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], Any]) -> Any:
        """The result of a communication of local tensors or of a draw, inside the operator that is running or on its own."""
        if self._quiet:
            return run()
        facts = DRAW if operator == DRAW.name else MOVE
        what = self._current or (None if x is None else tuple(map(self.names.value, tensors(x))))
        call = self.names.call((facts, what, key), facts.name, self.names.region)
        with self.unseen():
            out = self.whole(call, facts, run)
        for place, made in enumerate(tensors(out)):
            self._give(made, call.result(place))
        return out

    def region(self, region: Any, name: str, inputs: Sequence[Any], writes: Sequence[int], run: Callable[[], Any]) -> Any:
        """The result of a compiled region."""
        if self._quiet:
            return run()
        self.names.regions[id(region)] = region  # as long as it lives, no other has its id
        call = self.names.call((id(region), self.names.key(REGION, inputs)), REGION.name, f"{self.names.region}/{name}")
        written = [inputs[place] for place in writes]
        self._writes_outside(call, written)
        with self.unseen():
            out = self.whole(call, REGION, run)
        self._name_written(call, written)
        for place, x in enumerate(tensors(out), len(written)):
            if not self.names.knows(x):
                self._give(x, call.result(place))
        return out

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """In the block this mode sees nothing."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # ── which values tensors are ──────────────────────────────────────────────────────────────────────────────────────

    def _give(self, x: Tensor, value: Value) -> None:
        self.names.name(x, value)

    def _name(self, call: Invocation, facts: Facts, out: Any, args: Any, kwargs: dict[str, Any]) -> None:
        written = written_by(facts, args, kwargs) if facts.writes else ()
        self._name_written(call, written)
        if written and out is written[0]:
            return
        if facts.kind == "casts" and self.names.value(args[0]).of in (ARGUMENT, OUTSIDE):
            # A weight in another dtype is one value, whether autocast has it from before the block or makes it here.
            if call in self.names.strange[-1:]:
                self.names.strange.pop()
            return self._give(out, self.names.cast(args[0], out.dtype))
        root = self.names.value(args[0]).root if facts.views and args and isinstance(args[0], Tensor) else None
        for place, x in enumerate(tensors(out), len(written)):
            if not any(x is other for other in written):
                value = call.result(place)
                value.root = root or value
                self._give(x, value)

    def _name_written(self, call: Invocation, written: Sequence[Tensor]) -> None:
        for place, x in enumerate(written):
            value = call.result(place)
            value.root = self.names.value(x).root
            value.written = True
            self.names.name(x, value, writes=1)

    def _writes_outside(self, call: Invocation, written: Sequence[Tensor]) -> bool:
        """Whether a call writes to tensors from outside the block; an error where that would change a second run."""
        outside = [x for x in written if self.names.value(x).root.of in (ARGUMENT, OUTSIDE)]
        for x in outside:
            if x.is_floating_point() or x.is_complex():
                what = f"{self.names.value(x).root.origin}, {describe(facts_of_tensor(x))}"
                raise RematError(
                    f"{self.names.describe(call)}: it writes to {what}. The backward computes the block a second time, from "
                    "that tensor as it is then; use an operator that does not write to it"
                )
        return bool(outside)


def written_by(facts: Facts, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if facts.writes == (0,) and isinstance(args[0], Tensor):
        return [args[0]]
    found = [kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None for at in facts.writes]
    return [x for item in found for x in tensors(item)]


def _content(x: Tensor) -> Hashable:
    """What a tensor that was just made of Python numbers is known by."""
    small = type(x) is Tensor and x.device.type == "cpu" and x.nbytes <= 2**20
    return tuple(x.shape), x.dtype, x.device, x.flatten().view(torch.uint8).numpy().tobytes() if small else None


# ── the first run ─────────────────────────────────────────────────────────────────────────────────────────────────────


class FirstRun(BlockRun):
    """Runs a block, and saves what a policy chooses."""

    def __init__(self, names: Names, policy: Policy, states: States) -> None:
        super().__init__(names)
        self._policy = policy
        #: Whether a second run may have drawn less than this one, and the last known states of generators.
        self._astray, self._last = False, states
        self._choices: dict[Facts, bool] = {}

    def operate(self, call: Invocation, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator, and save its result if the policy says so."""
        if facts.views:
            return facts.op(*args, **kwargs)
        if not facts.plain:
            return self._operate(call, facts, args, kwargs)
        out = facts.op(*args, **kwargs)
        if type(out) is not Tensor and not tensors(out):
            call.kept = None if out is None else (out,)  # a number that the program may decide on
        elif self._keeps(call, facts, out, args):
            call.keep(_aliases(out))
        return out

    def _operate(self, call: Invocation, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        written = written_by(facts, args, kwargs) if facts.writes else []
        outside = self._writes_outside(call, written) if written else False
        for x in written:
            made_by = self.names.value(x).root.of
            if isinstance(made_by, Invocation) and made_by.versions:  # what is saved of it stays as it is
                made_by.keep(tree_map_only(Tensor, torch.clone, made_by.kept[0]))
        if facts.random and (self._astray or kwargs.get("generator") is not None):
            call.before = self._states(args, kwargs.get("generator"))
        out = facts.op(*args, **kwargs)
        if outside:
            call.kept = _WRITTEN
        elif facts.kind == "sends":
            if self._keeps(call, facts, out, args):  # what a collective in place wrote, once it has
                for work in [work for work in out if hasattr(work, "wait")] if isinstance(out, tuple) else [out]:
                    work.wait()
                call.kept = (out, [x.clone() for x in written])
        elif not (written or facts.kind == "empty") and self._keeps(call, facts, out, args):
            call.keep(_aliases(out))
            call.before, self._astray = None, self._astray or facts.random
        return out

    def _states(self, args: Any, generator: Generator | None = None) -> States:
        """The states of generators, for the second run to continue from; equal states are held once."""
        now, self._astray = get_states(tensors(args), generator), False
        pairs = zip(now, self._last, strict=False)
        if len(now) != len(self._last) or any(a[0] != b[0] or not torch.equal(a[1], b[1]) for a, b in pairs):
            self._last = now
        return self._last

    def whole(self, call: Invocation, facts: Facts, run: Callable[[], Any]) -> Any:
        """Run it, and save its result if the policy says so."""
        if facts is REGION and self._astray:
            call.before = self._states(())
        out = run()
        self._astray |= facts is REGION  # which may draw, and be kept or left out the second time
        if not tensors(out):
            call.kept = (out,)
        elif self._keeps(call, facts, out, ()):
            call.keep(_aliases(out))
        return out

    def _keeps(self, call: Invocation, facts: Facts, out: Any, args: Sequence[Any]) -> bool:
        known = self._choices.get(facts)
        if known is not None:
            return known
        if self._policy.by_operator:
            made = Made(facts.name, call.region, random=facts.random)
            return self._choices.setdefault(facts, self._policy.choose(made, facts.op, args).saves)
        made = Made(facts.name, call.region, self.names.number(call), sum(map(size_of, tensors(out))), facts.random)
        return self._policy.choose(made, facts.op, args).saves


def _aliases(out: Any) -> Any:
    return alias(out) if isinstance(out, Tensor) else tree_map_only(Tensor, alias, out)


# ── the second run ────────────────────────────────────────────────────────────────────────────────────────────────────


class Done(BaseException):
    """Raised to end the second run: all cells are filled."""


class SecondRun(BlockRun):
    """Runs a block again, with the results that the first run saved, and fills the cells of values as they are made."""

    def __init__(self, names: Names, wanted: dict[tuple[Value, int], Cell]) -> None:
        super().__init__(names)
        self.wanted = wanted

    def _give(self, x: Tensor, value: Value) -> None:
        self.names.name(x, value)
        if value.cells:
            self.fill(value, 0, x)

    def fill(self, value: Value, writes: int, x: Tensor) -> None:
        """Fill the cell of a value after so many writes to it; ends the run if that was the last cell."""
        cell = self.wanted.pop((value, writes), None)
        if cell is None:
            return
        facts = facts_of_tensor(x)
        if facts != cell.facts:
            was, now = describe(cell.facts), describe(facts)
            raise RematError(f"{self.names.tell(value)}: it was {was} in the forward, and is {now} in the recomputation")
        cell.fill(alias(x))
        if not self.wanted:
            raise Done("nothing more is needed")

    def operate(self, call: Invocation, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        """The saved result of the operator, or its result now."""
        if call.kept is not None and (call.kept is _WRITTEN or facts.kind == "sends"):
            return self._written(call, facts, args, kwargs)
        if facts.hidden:
            args = [x.clone() if at in facts.hidden and x is not None else x for at, x in enumerate(args)]
        return self.whole(call, facts, lambda: facts.op(*args, **kwargs))

    def _written(self, call: Invocation, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operator that wrote to its arguments: from outside, they hold it already; else they get it."""
        written = written_by(facts, args, kwargs)
        if call.kept is _WRITTEN:
            return None if not schema_of(facts.op).returns else written[0] if len(written) == 1 else written
        for x, sent in zip(written, call.kept[1], strict=True):
            x.copy_(sent)
        return call.kept[0]

    def whole(self, call: Invocation, facts: Facts, run: Callable[[], Any]) -> Any:
        """The saved result, or the result now."""
        if call.kept is not None:
            return given_back(self.names, call)
        if call.before is not None:
            set_states(call.before)
        return run()


def given_back(names: Names, call: Invocation) -> Any:
    """The saved result of a call; an error if it was written to since."""
    (kept,) = call.kept
    for x, known in zip(tensors(kept), call.versions, strict=False):
        if version(x) != known:
            raise RematError(
                f"{names.describe(call)}: its result {describe(facts_of_tensor(x))} was kept for the backward, and written to "
                "afterwards; use an operator that does not write to it, or a policy that does not keep it"
            )
    return _aliases(kept)
