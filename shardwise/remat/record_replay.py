"""What watches the two runs of a block: `Record` the first, and keeps what the policy says; `Replay` the second, and gives it
back.

Both see every operator before it runs (on DTensors, not on their shards), every move of a DTensor, and every compiled region as
one operator. Neither changes what an operator gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import untraced
from .._torch.tensors import TorchDispatchMode, alias, schema
from ..comm.interception import watch, watch_as_before
from ..errors import RematError
from .generators import States, devices_of, get_states, set_states
from .names import ARGUMENT, OUTSIDE, Call, Run, Value, describe, facts_of_tensor, mapped, size_of, tensors, version
from .policies import Made, Policy


class Cell:
    """What the backward will ask for: a value, after so many writes to it."""

    __slots__ = ("__weakref__", "facts", "left", "of", "packs", "value", "version")

    def __init__(self, of: Value, facts: tuple[Any, ...]) -> None:
        self.of, self.facts = of, facts
        self.packs, self.left = 0, 0  #: how often autograd saved it, and will still ask for it
        self.value: Tensor | None = None
        self.version = 0

    def fill(self, x: Tensor) -> None:
        """Give it its value."""
        self.value, self.version, self.left = x, version(x), self.packs


#: Kept of a call that wrote to a tensor from outside: the second run does not do so again.
_WRITTEN = object()


@dataclass(eq=False, slots=True)
class Facts:
    """What has to be known of an operator: what it writes to, also without saying so, whether it gives views, draws random
    numbers, gives just what it is given, takes a tensor that was just made of Python numbers, sends to other processes, or
    gives memory that is still to be written."""

    name: str
    op: Any = None
    writes: tuple[int | str, ...] = ()
    hidden: tuple[int, ...] = ()
    views: bool = False
    random: bool = False
    ignored: bool = False
    lifts: bool = False
    sends: bool = False
    empty: bool = False
    #: nothing of all this
    plain: bool = True


#: How moves between layouts, new random numbers and compiled regions are called in policies and errors.
MOVE, DRAW, REGION = Facts("shardwise.move"), Facts("shardwise.draw", random=True), Facts("higher_order.inductor_compiled_code")
#: Running statistics that are updated.
_HIDDEN = {f"aten.{name}": (3, 4) for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")}
_IGNORED = (
    "aten.detach.",
    "aten.alias.",
    "prim.",
    "aten.sym_",
    "aten.is_",
    "aten.size.",
    "aten.stride.",
    "aten.storage_offset.",
)
#: By the id of an operator, which is quicker to look up than by the operator.
_facts: dict[int, Facts] = {}


def facts_of(op: Any) -> Facts:
    """What an operator's schema says."""
    found = _facts[id(op)] = _read(op) if hasattr(op, "_schema") else Facts(f"higher_order.{op.name()}", op)
    return found


def _read(op: Any) -> Facts:
    name, told = str(op), schema(op)
    writes: list[int | str] = [
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(told.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    sends = name.startswith("c10d.")
    if sends:  # these write to all their tensors, and do not say so
        writes = [place for place, argument in enumerate(told.arguments) if "Tensor" in str(argument.type)]
    facts = Facts(
        name,
        op,
        tuple(writes),
        _HIDDEN.get(name.rpartition(".")[0], ()),
        views=not writes and any(result.alias_info is not None for result in told.returns),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        ignored=name.startswith(_IGNORED) and not writes,
        lifts=name.startswith("aten.lift_fresh."),
        sends=sends,
        empty=name.startswith(("aten.empty", "aten.new_empty")),
    )
    facts.plain = name != "aten._to_copy.default" and not any(getattr(facts, field.name) for field in fields(facts)[2:-1])
    return facts


_CAST = facts_of(torch.ops.aten._to_copy.default)


class Watch(TorchDispatchMode):
    """One run of a block."""

    supports_higher_order_operators = True

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._quiet = False
        self._draws = 0
        self._current: Call | None = None
        self._others: Any = ()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as such where this watches; torch asks."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it does, in a quicker way than torch's

    def __enter__(self) -> Any:
        self._others = watch(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        watch_as_before(self._others)

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        facts = _facts.get(id(func)) or facts_of(func)
        if facts.ignored:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                self.run.rename(out, args[0])
            return out
        key = self.run.key(facts, (_content(args[0]),) if facts.lifts else args, kwargs)
        if facts.random:
            self._draws += 1
            key = (self._draws, key)  # what it gives depends on what was drawn before
        call = self.run.call(key, facts.name, self.run.region)
        outer, self._current = self._current, call
        try:
            out = self.operate(call, facts, args, kwargs)
        finally:
            self._current = outer
        if (facts.plain or facts.views) and type(out) is Tensor:
            value = call.results[0]
            if facts.views:
                value.lie_in(self.run.value(args[0]).root)
            self._give(out, value)
        else:
            self._name(call, facts, out, args, kwargs)
        if self.run.strange and call is self.run.strange[-1]:
            call.told = ", ".join(describe(facts_of_tensor(x)) for x in tensors(out)) or repr(out)
        return out

    def result(self, operator: str, key: Hashable, x: Tensor | tuple[Tensor, ...] | None, run: Callable[[], Any]) -> Any:
        """What comes of a communication of a local value or a draw, for the operator that is running, or for the user."""
        if self._quiet:
            return run()
        facts = DRAW if operator == DRAW.name else MOVE
        what = self._current or (None if x is None else tuple(map(self.run.value, tensors(x))))
        call = self.run.call((facts, what, key), facts.name, self.run.region)
        with self.unseen():
            out = self.whole(call, facts, run)
        for place, made in enumerate(tensors(out)):
            self._give(made, call.result(place))
        return out

    def region(self, region: Any, name: str, inputs: Sequence[Any], writes: Sequence[int], run: Callable[[], Any]) -> Any:
        """What comes of a compiled region."""
        if self._quiet:
            return run()
        self.run.regions[id(region)] = region  # as long as it lives, no other has its id
        call = self.run.call((id(region), self.run.key(REGION, inputs)), REGION.name, f"{self.run.region}/{name}")
        written = [inputs[place] for place in writes]
        self._writes_outside(call, written)
        with self.unseen():
            out = self.whole(call, REGION, run)
        self._name_written(call, written)
        for place, x in enumerate(tensors(out), len(written)):
            if not self.run.knows(x):
                self._give(x, call.result(place))
        return out

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """In the block, nothing is watched."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def operate(self, call: Call, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        """What comes of an operator."""
        raise NotImplementedError(f"{type(self).__name__} watches nothing")

    def whole(self, call: Call, facts: Facts, run: Callable[[], Any]) -> Any:
        """What comes of a move or a region."""
        raise NotImplementedError(f"{type(self).__name__} watches nothing")

    # ── which values tensors are ──────────────────────────────────────────────────────────────────────────────────────

    def _give(self, x: Tensor, value: Value) -> None:
        self.run.name(x, value)

    def _name(self, call: Call, facts: Facts, out: Any, args: Any, kwargs: dict[str, Any]) -> None:
        written = written_by(facts, args, kwargs) if facts.writes else ()
        self._name_written(call, written)
        if written and out is written[0]:
            return
        if facts is _CAST and self.run.value(args[0]).of in (ARGUMENT, OUTSIDE):
            return self._give_cast(call, out, self.run.cast(args[0], out.dtype))
        root = self.run.value(args[0]).root if facts.views and args and isinstance(args[0], Tensor) else None
        for place, x in enumerate(tensors(out), len(written)):
            if not any(x is other for other in written):
                value = call.result(place)
                value.lie_in(root)
                self._give(x, value)

    def _give_cast(self, call: Call, x: Tensor, value: Value) -> None:
        """A weight in another dtype is one value, whether autocast has it from before the block or makes it here."""
        if self.run.strange and self.run.strange[-1] is call:
            self.run.strange.pop()
        self._give(x, value)

    def _name_written(self, call: Call, written: Sequence[Tensor]) -> None:
        for place, x in enumerate(written):
            value = call.result(place)
            value.lie_in(self.run.value(x).root)
            value.written = True
            self.run.name(x, value, writes=1)

    def _writes_outside(self, call: Call, written: Sequence[Tensor]) -> bool:
        """Whether a call writes to tensors from outside the block; an error where that would change a second run."""
        outside = [x for x in written if self.run.value(x).root.of in (ARGUMENT, OUTSIDE)]
        for x in outside:
            if x.is_floating_point() or x.is_complex():
                what = f"{self.run.value(x).root.origin}, {describe(facts_of_tensor(x))}"
                raise RematError(
                    f"{self.run.describe(call)}: it writes to {what}. The backward computes the block a second time, from that "
                    "tensor as it is then; use an operator that does not write to it"
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


class Record(Watch):
    """Watches the first run, and keeps what a policy says."""

    def __init__(self, run: Run, policy: Policy, states: States) -> None:
        super().__init__(run)
        self._policy = policy
        #: Whether a second run may have drawn less than this one, and the states of generators that were last looked at.
        self._astray, self._last = False, states
        self._choices: dict[Facts, bool] = {}

    def operate(self, call: Call, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator, and keep what it gives if the policy says so."""
        if facts.views:
            return facts.op(*args, **kwargs)
        if not facts.plain:
            return self._operate(call, facts, args, kwargs)
        out = facts.op(*args, **kwargs)
        if type(out) is not Tensor and not any(True for _ in tensors(out)):
            call.kept = None if out is None else (out,)  # a number that the program may decide on
        elif self._keeps(call, facts, out, args):
            _keep(call, out)
        return out

    def _operate(self, call: Call, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        written = written_by(facts, args, kwargs) if facts.writes else []
        outside = self._writes_outside(call, written) if written else False
        for x in written:
            _copy_kept(self.run.value(x).root.of)
        if facts.random and (self._astray or kwargs.get("generator") is not None):
            call.before = self._states(args, kwargs.get("generator"))
        out = facts.op(*args, **kwargs)
        if outside:
            call.kept = _WRITTEN
        elif facts.sends:
            _keep_sent(call, self._keeps(call, facts, out, args), out, written)
        elif not (written or facts.empty) and self._keeps(call, facts, out, args):
            _keep(call, out)
            call.before, self._astray = None, self._astray or facts.random
        return out

    def _states(self, args: Any, generator: torch.Generator | None = None) -> States:
        """The states of generators, which the second run goes on from; those known already are not held twice."""
        now, self._astray = get_states(devices_of(tensors(args)), generator), False
        pairs = zip(now, self._last, strict=False)
        if len(now) != len(self._last) or any(a[0] != b[0] or not torch.equal(a[1], b[1]) for a, b in pairs):
            self._last = now
        return self._last

    def whole(self, call: Call, facts: Facts, run: Callable[[], Any]) -> Any:
        """Run a move or a region, and keep what it gives if the policy says so."""
        if facts is REGION and self._astray:
            call.before = self._states(())
        out = run()
        self._astray |= facts is REGION  # which may draw, and be kept or left out the second time
        if not any(True for _ in tensors(out)):
            call.kept = (out,)
        elif self._keeps(call, facts, out, ()):
            _keep(call, out)
        return out

    def _keeps(self, call: Call, facts: Facts, out: Any, args: Sequence[Any]) -> bool:
        known = self._choices.get(facts)
        if known is not None:
            return known
        policy = self._policy
        size = 0 if policy.by_operator else sum(map(size_of, tensors(out)))
        number = 0 if policy.by_operator else self.run.number(call)
        made = Made(facts.name, call.region, number, size, facts.random)
        keeps = policy.choose(made, facts.op, args).saves
        if policy.by_operator:
            self._choices[facts] = keeps
        return keeps


def _keep(call: Call, out: Any) -> None:
    if type(out) is Tensor:
        kept = alias(out)
        call.kept, call.versions = (kept,), (version(kept),)
    else:
        call.kept = (mapped(alias, out),)
        call.versions = [version(x) for x in tensors(call.kept)]


def _copy_kept(made_by: Any) -> None:
    """What is kept of a call stays as it is when the block goes on to write to it."""
    if isinstance(made_by, Call) and made_by.versions:
        made_by.kept = mapped(torch.clone, made_by.kept)
        made_by.versions = [version(x) for x in tensors(made_by.kept)]


def _keep_sent(call: Call, keeps: bool, out: Any, written: Sequence[Tensor]) -> None:
    """A collective in place: what it wrote, when it has done so."""
    if keeps:
        works = [work for work in out if hasattr(work, "wait")] if isinstance(out, tuple) else [out]
        for work in works:
            work.wait()
        call.kept = (out, [x.clone() for x in written])


# ── the second run ────────────────────────────────────────────────────────────────────────────────────────────────────


class Done(BaseException):
    """Everything that the backward waits for is there."""


class Replay(Watch):
    """Watches the second run, gives what the first kept, and fills the cells of values as they are made."""

    def __init__(self, run: Run, wanted: dict[tuple[Value, int], Cell]) -> None:
        super().__init__(run)
        self.wanted = wanted

    def _give(self, x: Tensor, value: Value) -> None:
        self.run.name(x, value)
        if value.cells:
            self.fill(value, 0, x)

    def fill(self, value: Value, writes: int, x: Tensor) -> None:
        """Give a value, after so many writes to it, to the cell that waits for it; that may have been all."""
        cell = self.wanted.pop((value, writes), None)
        if cell is None:
            return
        facts = facts_of_tensor(x)
        if facts != cell.facts:
            was, now = describe(cell.facts), describe(facts)
            raise RematError(f"{self.run.tell(value)}: it was {was} in the forward, and is {now} in the recomputation")
        cell.fill(alias(x))
        if not self.wanted:
            raise Done("nothing more is needed")

    def operate(self, call: Call, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        """What was kept of the operator, or what it gives now."""
        if call.kept is not None:
            return self._kept(call, facts, args, kwargs)
        if call.before is not None:
            set_states(call.before)
        if facts.hidden:
            args = [x.clone() if at in facts.hidden and x is not None else x for at, x in enumerate(args)]
        return facts.op(*args, **kwargs)

    def _kept(self, call: Call, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        if call.kept is _WRITTEN:
            written = written_by(facts, args, kwargs)
            return None if not schema(facts.op).returns else written[0] if len(written) == 1 else written
        if facts.sends:
            for x, sent in zip(written_by(facts, args, kwargs), call.kept[1], strict=True):
                x.copy_(sent)
            return call.kept[0]
        return given_back(self.run, call)

    def whole(self, call: Call, facts: Facts, run: Callable[[], Any]) -> Any:
        """What was kept of a move or a region, or what it gives now."""
        if call.kept is not None:
            return given_back(self.run, call)
        if call.before is not None:
            set_states(call.before)
        return run()


def given_back(run: Run, call: Call) -> Any:
    """What was kept of a call, if it still is what it was."""
    (kept,) = call.kept
    for x, known in zip(tensors(kept), call.versions, strict=False):
        if version(x) != known:
            told = describe(facts_of_tensor(x))
            raise RematError(
                f"{run.describe(call)}: its result {told} was kept for the backward, and written to afterwards; use an "
                "operator that does not write to it, or a policy that does not keep it"
            )
    return alias(kept) if type(kept) is Tensor else mapped(alias, kept)
