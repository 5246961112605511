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

from .._torch import keeps_graph, tree_flatten, tree_unflatten
from ..errors import RematError
from ..save import Policy
from .states import devices_of, from_states, get_states
from .values import ARGUMENT, OUTSIDE, Call, Run, Value, describe, tensors, version
from .watch import Record, Replay, given_back

#: All blocks whose backward may still come.
_blocks: weakref.WeakSet[Block] = weakref.WeakSet()


def kept_values() -> int:
    """How many results blocks keep now for backwards to come.

    >>> kept_values()
    0
    """
    return sum(call.kept is not None for block in _blocks for call in block.first.calls.values())


class Cell:
    """What the backward will ask for: a value, after so many writes to it."""

    __slots__ = ("__weakref__", "facts", "left", "packs", "value", "version")

    def __init__(self, facts: str) -> None:
        self.facts = facts
        self.packs, self.left = 0, 0
        self.value: Tensor | None = None
        self.version = 0

    def fill(self, x: Tensor) -> None:
        """Give it its value."""
        self.value, self.version, self.left = x, version(x), self.packs


class _Outside(NamedTuple):
    """A tensor from outside the block, which is simply kept."""

    tensor: Tensor
    version: int


class _Argument(NamedTuple):
    """An argument of the block."""

    place: int


class _Done(BaseException):
    """Everything that was asked for is there."""


class _Inputs(torch.autograd.Function):
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

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The first run."""
        leaves, self._spec = tree_flatten((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        self._constants = [None if isinstance(x, Tensor) else x for x in leaves]
        self._places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
        self._saved = _Inputs.apply(torch.empty(0, requires_grad=True), *given).grad_fn
        self._around = _Surroundings(given)
        _blocks.add(self)
        self._name_arguments(self.first, given)
        with saved_tensors_hooks(self._pack, self._unpack), Record(self.first, self.policy):
            return self.function(*args, **kwargs)

    def _name_arguments(self, run: Run, given: list[Tensor]) -> None:
        for index, x in enumerate(given):
            run.name(x, self.first.argument(index))

    # ── what autograd saves ───────────────────────────────────────────────────────────────────────────────────────────

    def _pack(self, x: Tensor) -> Any:
        run = self.first
        value, writes = run.value(x), run.written(x)
        if value.of == ARGUMENT:
            return _Argument(value.index)
        if value.of == OUTSIDE:
            return _Outside(x.detach() if x.grad_fn is not None else x, version(x))
        known = value.cells.get(writes)
        cell = known() if known is not None else None
        if cell is None:
            cell = Cell(describe(x))
            value.cells[writes] = weakref.ref(cell)
            self._cells.append((value, writes, value.cells[writes]))
        cell.packs += 1
        return cell

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Argument):
            return self._tensors()[packed.place]
        if isinstance(packed, _Outside):
            if version(packed.tensor) != packed.version:
                raise RematError(
                    f"{self.name}: the backward needs a tensor from outside the block, {describe(packed.tensor)}, which was "
                    f"written to {version(packed.tensor) - packed.version} times since; do the backward before that"
                )
            return packed.tensor
        return self._take(packed)

    def _take(self, cell: Cell) -> Tensor:
        if cell.value is None:
            self._run_again()
        x = cell.value
        assert x is not None
        if version(x) != cell.version:
            raise RematError(
                f"{self.name}: the backward needs {cell.facts}, which the block writes to afterwards; use an operator that "
                "does not write to it"
            )
        cell.left -= 1
        if not cell.left:
            cell.value = None
        return x

    # ── the second run ────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensors(self) -> list[Tensor]:
        try:
            return list(self._saved.saved_tensors)
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
        run = Run(self.name, self.first)
        given = self._tensors()
        self._name_arguments(run, given)
        leaves = list(self._constants)
        for place, x in zip(self._places, given, strict=True):
            leaves[place] = x
        args, kwargs = tree_unflatten(leaves, self._spec)
        with self._around.again(), saved_tensors_hooks(_filler(wanted, run), _same), Replay(run), contextlib.suppress(_Done):
            self.function(*args, **kwargs)
        if not run.strange:
            _fill_from_kept(wanted)
        if wanted:
            raise RematError(_mismatch(self.name, wanted, run))
        if not keeps_graph():
            self.first.drop()


def _same(x: Tensor) -> Tensor:
    return x


def _filler(wanted: dict[Any, Cell], run: Run) -> Callable[[Tensor], Tensor]:
    def pack(x: Tensor) -> Tensor:
        value, writes = run.value(x), run.written(x)
        kept = x.detach() if x.requires_grad else x  # with its graph it would keep itself alive
        cell = wanted.pop((value, writes), None)
        if cell is not None:
            if describe(x) != cell.facts:
                raise RematError(f"{value}: it was {cell.facts} in the forward, and is {describe(x)} in the recomputation")
            cell.fill(kept)
            if not wanted:
                raise _Done("nothing more is needed")
        return kept

    return pack


def _fill_from_kept(wanted: dict[Any, Cell]) -> None:
    """What a skipped call has kept is there without it."""
    for (value, writes), cell in list(wanted.items()):
        call = value.of
        if isinstance(call, Call) and call.kept is not None and not writes:
            cell.fill(list(tensors(given_back(call)))[value.index])
            del wanted[value, writes]


def _mismatch(name: str, wanted: dict[Any, Cell], run: Run) -> str:
    (value, _), cell = next(iter(wanted.items()))
    text = f"the backward needs {value}, {cell.facts}, which the recomputation did not make"
    if run.strange:
        alike = [call for call in run.strange if str(call) == str(value.source)]
        other = (alike or run.strange)[0]
        text += f"; the {'same' if alike else 'first'} call that the forward made otherwise is {other}, which gave {other.told}"
    return f"{name} is not the same the second time: {text}. A block has to do the same whenever it runs on the same values"


class _Surroundings:
    """What a run depends on beside its arguments: random states and autocast."""

    def __init__(self, given: list[Tensor]) -> None:
        kinds = sorted({"cpu", *(x.device.type for x in given)} - {"meta"})
        self.casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
        ]
        self.states = get_states(devices_of(given))
        if any(enabled for _, _, enabled, _ in self.casts):
            torch.clear_autocast_cache()  # what was cast before the block would not be there the second time

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same once more."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(from_states(self.states))
            for kind, dtype, enabled, cached in self.casts:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
                    torch.clear_autocast_cache()
            stack.enter_context(torch.enable_grad())
            yield
