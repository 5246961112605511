"""A block that is run twice: what autograd saves in it is not kept but computed again when the backward asks for it.

The first run gives names to values (`values.py`); what autograd saves is a `Cell`, which waits for the value of such a name.
The first cell that is asked for starts the second run, which fills all of them, and ends as soon as it has. A value of another
name never gets into a cell; a cell that stays empty is an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch.compiler import Function
from .._torch.tensors import keeps_graph, tree_flatten, tree_unflatten
from ..errors import RematError
from ..tensor.dtensor import DTensor
from .generators import devices_of, from_states, get_states
from .names import OUTSIDE, Call, Run, Value, describe, facts_of_tensor, tensors, version
from .policies import Policy
from .record_replay import Cell, Done, Record, Replay, given_back

#: Arguments that hold no others.
_PLAIN = (Tensor, torch.nn.Parameter, DTensor, int, float, bool, str, type(None))
#: All blocks whose backward may still come.
_blocks: weakref.WeakSet[Block] = weakref.WeakSet()


def kept_values() -> int:
    """How many results blocks keep now for backwards to come.

    >>> kept_values()
    0
    """
    return sum(call.kept is not None for block in _blocks for call in block.first.calls.values())


class _Outside(NamedTuple):
    """A tensor from outside the block, which is simply kept."""

    of: Value
    tensor: Tensor
    version: int


class _Inputs(Function):
    """Saves tensors as autograd does: if a block outside this one saves its tensors in its own way, also these."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        """Save tensors."""
        ctx.save_for_backward(*tensors)
        return start.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Never asked."""
        raise RematError("the inputs of a block have no gradients of their own")


class Block:
    """One call of a function under `remat`."""

    def __init__(self, function: Callable[..., Any], name: str, policy: Policy) -> None:
        self.function, self.name, self.policy = function, name, policy
        self.first = Run(name)
        self._cells: list[tuple[Value, int, Any]] = []
        self._record: Record | None = None  #: while the first run goes on
        self._has_backward = False

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The first run."""
        if not kwargs and all(type(x) in _PLAIN for x in args):
            leaves, self._spec = list(args), None
        else:
            leaves, self._spec = tree_flatten((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        self._constants = [None if isinstance(x, Tensor) else x for x in leaves]
        self._places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
        self._saved = _Inputs.apply(torch.empty(0, requires_grad=True), *given)
        self._around = _Surroundings(given)
        _blocks.add(self)
        self._name_arguments(self.first, given)
        self._record = Record(self.first, self.policy, self._around.states)
        try:
            with saved_tensors_hooks(self._pack, self._unpack), self._record:
                return self.function(*args, **kwargs)
        finally:
            self._record = None

    def _name_arguments(self, run: Run, given: list[Tensor]) -> None:
        for index, x in enumerate(given):
            run.name(x, self.first.argument(index))

    # ── what autograd saves ───────────────────────────────────────────────────────────────────────────────────────────

    def _pack(self, x: Tensor) -> Any:
        value, writes = self.first.value_now(x)
        if value.of == OUTSIDE:
            return _Outside(value, x.detach() if x.grad_fn is not None else x, version(x))
        if value.cells is None:
            value.cells = {}
        known = value.cells.get(writes)
        cell = known() if known is not None else None
        if cell is None:
            cell = Cell(value, facts_of_tensor(x))
            value.cells[writes] = known = weakref.ref(cell)
            self._cells.append((value, writes, known))
        cell.packs += 1
        return cell

    def _unpack(self, packed: Cell | _Outside) -> Tensor:
        x = self._take(packed) if isinstance(packed, Cell) else self._unchanged(packed)
        if self._record is not None:  # a backward inside the block
            self._has_backward = True
            self.first.name(x, packed.of)
        return x

    def _unchanged(self, packed: _Outside) -> Tensor:
        writes = version(packed.tensor) - packed.version
        if writes:
            told = describe(facts_of_tensor(packed.tensor))
            raise RematError(
                f"{self.name}: the backward needs a tensor from outside the block, {told}, which was written to {writes} times "
                "since; do the backward before that"
            )
        return packed.tensor

    def _take(self, cell: Cell) -> Tensor:
        if cell.value is None:
            self._run_again()
        x = cell.value
        assert x is not None
        if version(x) != cell.version:
            raise RematError(
                f"{self.name}: the backward needs {describe(cell.facts)}, which the block writes to afterwards; use an "
                "operator that does not write to it"
            )
        cell.left -= 1
        if not cell.left:
            cell.value = None
        return x

    # ── the second run ────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensors(self) -> list[Tensor]:
        try:
            return list(self._saved.grad_fn.saved_tensors)
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise RematError(
                f"{self.name}: an argument of the block was written to before the backward, which computes the block a second "
                f"time from it; use an operator that does not write to it ({str(error).splitlines()[0]})"
            ) from error

    def _run_again(self) -> None:
        cells = [(value, writes, cell()) for value, writes, cell in self._cells]
        wanted = {(value, writes): cell for value, writes, cell in cells if cell is not None and cell.value is None}
        replay = Replay(Run(self.name, self.first), wanted)
        given, leaves = self._tensors(), list(self._constants)
        for place, x in zip(self._places, given, strict=True):
            leaves[place] = x
        args, kwargs = (leaves, {}) if self._spec is None else tree_unflatten(leaves, self._spec)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Done))
            stack.enter_context(self._around.again())
            if self._record is not None:
                stack.enter_context(self._record.unseen())
            self._name_arguments(replay.run, given)
            for index, x in enumerate(given):
                replay.fill(self.first.argument(index), 0, x)
            stack.enter_context(saved_tensors_hooks(_filler(replay, self._has_backward), _same))
            stack.enter_context(replay)
            self.function(*args, **kwargs)
        if not replay.run.strange:
            _fill_from_kept(wanted, self.first)
        if wanted:
            raise RematError(self._mismatch(wanted, replay.run))
        if not keeps_graph():
            self.first.drop()

    def _mismatch(self, wanted: dict[Any, Cell], run: Run) -> str:
        (value, _), cell = next(iter(wanted.items()))
        text = f"the backward needs {self.first.tell(value)}, {describe(cell.facts)}, which the recomputation did not make"
        if run.strange:
            needed = self.first.describe(value.source) if isinstance(value.source, Call) else ""
            alike = [call for call in run.strange if run.describe(call) == needed]
            other = (alike or run.strange)[0]
            told = f"the {'same' if alike else 'first'} call that the forward made otherwise is {run.describe(other)}"
            text += f"; {told}, which gave {other.told}"
        rule = "A block has to do the same whenever it runs on the same values"
        return f"{self.name} is not the same the second time: {text}. {rule}"


def _same(x: Tensor) -> Tensor:
    return x


def _filler(replay: Replay, whole: bool) -> Callable[[Tensor], Any]:
    """What the second run does with a tensor that autograd saves. As a rule nothing is done with its own graph, and nothing is
    saved for that: a tensor with its graph would keep itself alive."""
    others = any(value.written or writes or not isinstance(value.of, Call) for value, writes in replay.wanted)

    def pack(x: Tensor) -> Any:
        if others:
            replay.fill(*replay.run.value_now(x), x)
        return x.detach() if whole else None

    return pack


def _fill_from_kept(wanted: dict[Any, Cell], run: Run) -> None:
    """What a skipped call has kept is there without it, and so is what has been remembered."""
    there = {value: x for known, value, then in run.known.values() if (x := known()) is not None and version(x) == then}
    for (value, writes), cell in list(wanted.items()):
        call = value.of
        if value in there and not writes:
            cell.fill(there[value].detach())
        elif isinstance(call, Call) and call.kept is not None and not writes:
            cell.fill(list(tensors(given_back(run, call)))[value.index])
        else:
            continue
        del wanted[value, writes]


class _Surroundings:
    """What a run depends on beside its arguments: random states and autocast."""

    def __init__(self, given: list[Tensor]) -> None:
        kinds = sorted({"cpu", *(x.device.type for x in given)} - {"meta"})
        self.casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
        ]
        self.states = get_states(devices_of(given))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same once more."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(from_states(self.states))
            for kind, dtype, enabled, cached in self.casts:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            stack.enter_context(torch.enable_grad())
            yield
