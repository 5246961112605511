"""A block under eager `remat`: autograd saves empty cells in its forward, and a second run fills them when the backward starts.

The first run names values (`names.py`); autograd saves a `Cell` for each name instead of the tensor. The first cell that the
backward reads starts the second run, which fills all cells, and ends as soon as it has. A value of another name never gets into
a cell; a cell that stays empty is an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch.compiler import Function, OldestFirst
from .._torch.tensors import keeps_graph, tree_flatten, tree_unflatten
from ..errors import RematError
from ..tensor.dtensor import DTensor
from .names import ARGUMENT, OUTSIDE, Invocation, Names, Value, describe, facts_of_tensor, tensors, version
from .policies import Policy
from .record_replay import Cell, Done, FirstRun, SecondRun, from_states, get_states, given_back

#: Arguments that hold no others.
_PLAIN = (Tensor, torch.nn.Parameter, DTensor, int, float, bool, str, type(None))
#: Stands for a tensor among the arguments of a block.
_ARGUMENT = object()
#: All blocks whose backward may still come.
_blocks: weakref.WeakSet[Block] = weakref.WeakSet()


def kept_values() -> int:
    """How many results all blocks together save at this moment for their backwards.

    >>> kept_values()
    0
    """
    return sum(call.kept is not None for block in _blocks for call in block.first.calls.values())


class _Outside(NamedTuple):
    """A tensor from outside the block, which is saved as it is."""

    of: Value
    tensor: Tensor
    version: int


class _Inputs(Function):
    """Saves the arguments of a block by autograd itself, so that an outer block handles them as its own saved tensors."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RematError("the inputs of a block have no gradients of their own")


class Block:
    """One call of a function under `remat`."""

    def __init__(self, function: Callable[..., Any], name: str, policy: Policy) -> None:
        self.function, self.name, self.policy = function, name, policy
        self.first = Names(name)
        self._cells: list[tuple[Value, int, Any]] = []
        self._record: FirstRun | None = None  #: during the first run
        self._has_backward = False
        self._oldest_first = OldestFirst()  # as long as the second run may come

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The first run."""
        if not kwargs and all(type(x) in _PLAIN for x in args):
            leaves, self._spec = list(args), None
        else:
            leaves, self._spec = tree_flatten((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        self._arguments = [Value(ARGUMENT, index) for index in range(len(given))]
        self._constants = [_ARGUMENT if isinstance(x, Tensor) else x for x in leaves]
        self._saved = _Inputs.apply(torch.empty(0, requires_grad=True), *given)
        self._states = get_states(given)
        self._casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in sorted({"cpu", *(x.device.type for x in given)} - {"meta"})
        ]
        _blocks.add(self)
        for value, x in zip(self._arguments, given, strict=True):
            self.first.name(x, value)
        self._record = FirstRun(self.first, self.policy, self._states)
        try:
            with saved_tensors_hooks(self._pack, self._unpack), self._record:
                return self.function(*args, **kwargs)
        finally:
            self._record = None

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
            raise RematError(
                f"{self.name}: the backward needs a tensor from outside the block, {describe(facts_of_tensor(packed.tensor))}, "
                f"which was written to {writes} times since; do the backward before that"
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
        replay = SecondRun(Names(self.name, self.first), wanted)
        given = self._tensors()
        following = iter(given)
        leaves = [next(following) if x is _ARGUMENT else x for x in self._constants]
        args, kwargs = (leaves, {}) if self._spec is None else tree_unflatten(leaves, self._spec)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Done))
            self._restore(stack)
            if self._record is not None:
                stack.enter_context(self._record.unseen())
            for value, x in zip(self._arguments, given, strict=True):
                replay.names.name(x, value)
                replay.fill(value, 0, x)
            stack.enter_context(saved_tensors_hooks(_filler(replay, self._has_backward), lambda x: x))
            stack.enter_context(replay)
            self.function(*args, **kwargs)
        if not replay.names.strange:
            _fill_from_kept(wanted, self.first)
        if wanted:
            raise RematError(self._mismatch(wanted, replay.names))
        if not keeps_graph():
            for call in self.first.calls.values():
                call.kept = None

    def _restore(self, stack: contextlib.ExitStack) -> None:
        """Enter the state that generators and autocast had at the start of the block."""
        stack.enter_context(from_states(self._states))
        for kind, dtype, enabled, cached in self._casts:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        stack.enter_context(torch.enable_grad())

    def _mismatch(self, wanted: dict[Any, Cell], names: Names) -> str:
        (value, _), cell = next(iter(wanted.items()))
        text = f"the backward needs {self.first.tell(value)}, {describe(cell.facts)}, which the recomputation did not make"
        if names.strange:
            needed = self.first.describe(value.source) if isinstance(value.source, Invocation) else ""
            alike = [call for call in names.strange if names.describe(call) == needed]
            other = (alike or names.strange)[0]
            which = f"the {'same' if alike else 'first'} call that the forward made otherwise is {names.describe(other)}"
            text += f"; {which}, which gave {other.gives}"
        rule = "A block has to do the same whenever it runs on the same values"
        return f"{self.name} is not the same the second time: {text}. {rule}"


def _filler(replay: SecondRun, whole: bool) -> Callable[[Tensor], Any]:
    """The hook for tensors that autograd saves in the second run, whose own graph is used only if the block has a backward
    inside: otherwise nothing is saved, since a tensor with its graph would keep itself alive."""
    others = any(value.written or writes or not isinstance(value.of, Invocation) for value, writes in replay.wanted)

    def pack(x: Tensor) -> Any:
        if others:
            replay.fill(*replay.names.value_now(x), x)
        return x.detach() if whole else None

    return pack


def _fill_from_kept(wanted: dict[Any, Cell], names: Names) -> None:
    """Fill cells with saved results of calls that the second run skipped, and with tensors that are still alive."""
    there = {value: x for known, value, then in names.known.values() if (x := known()) is not None and version(x) == then}
    for (value, writes), cell in list(wanted.items()):
        call = value.of
        if value in there and not writes:
            cell.fill(there[value].detach())
        elif isinstance(call, Invocation) and call.kept is not None and not writes:
            cell.fill(tensors(given_back(names, call))[value.index])
        else:
            continue
        del wanted[value, writes]
