"""Values by how they are made, so that two runs of one function can be told to have made the same one.

A call is known by its operator and by what it is given: constants as they are, tensors by the value that they are, that is, by
the call that made them. Calls that are alike in all of this are told apart by their order. So what a run leaves out, or does in
another order, changes no other value; and a value has the name of another only if it is computed in the same way.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch import is_wrapper
from ..comm import Bundle
from ..tensor import DTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Value:
    """What a tensor is: a result of a call, an argument of the block, a tensor from outside, or a part of another value."""

    __slots__ = ("__weakref__", "_parts", "cells", "index", "of", "root")

    def __init__(self, of: Any, index: Any, root: Value | None = None) -> None:
        self.of, self.index = of, index
        #: The value whose memory this one has.
        self.root: Value = self if root is None else root.root
        #: By how often it was written to since: what waits for it in the backward.
        self.cells: dict[int, Any] = {}
        self._parts: dict[Hashable, Value] = {}

    def part(self, name: Hashable) -> Value:
        """A tensor inside this one, or one made around it."""
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = Value(self, name, self)
        return found

    @property
    def source(self) -> Any:
        """The call it comes from, or the text "argument" or "outside"."""
        return self.of.source if isinstance(self.of, Value) else self.of

    def __str__(self) -> str:
        if isinstance(self.of, Value):
            return str(self.of)
        if isinstance(self.of, Call):
            return f"result {self.index} of {self.of}"
        return f"argument {self.index} of the block" if self.of == ARGUMENT else "a tensor from outside the block"


ARGUMENT, OUTSIDE = "argument", "outside"


class Call:
    """One call of an operator in a region: the `number`-th there."""

    __slots__ = ("kept", "number", "operator", "region", "results", "state", "told", "versions")

    def __init__(self, operator: str, region: str, number: int) -> None:
        self.operator, self.region, self.number = operator, region, number
        self.results: list[Value] = []
        self.kept: Any = None  #: what is kept of it, if anything is
        self.versions: list[int] = []  #: how often the tensors in there had been written to
        self.told = ""  #: its results in words, where they are no values of the first run
        self.state: Any = None  #: of the random number generators before it, and after

    def result(self, index: int) -> Value:
        """One of the values it gives."""
        while len(self.results) <= index:
            self.results.append(Value(self, len(self.results)))
        return self.results[index]

    def __str__(self) -> str:
        return f"{self.operator}, call {self.number} of it in {self.region}"


def version(x: Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if x.is_inference() else x._version


def _members(x: Any) -> tuple[Tensor, ...]:
    """The tensors that a tensor of a subclass wraps."""
    if isinstance(x, Bundle):
        return x.pieces
    if isinstance(x, DTensor):
        return (x._local,)
    return tuple(getattr(x, name) for name in x.__tensor_flatten__()[0]) if is_wrapper(type(x)) else ()


class Run:
    """One run of a block: which value each tensor is. The second run looks at the first: what that made and is still there may
    come up again."""

    def __init__(self, region: str, first: Run | None = None) -> None:
        self.region, self.first = region, first
        self.calls: dict[Any, Call] = {} if first is None else first.calls
        #: In the second run, calls that the first did not make, in their order.
        self.strange: list[Call] = []
        self._counts: Counter[Any] = Counter()
        self._again: Counter[Any] = Counter()
        self._known: dict[int, tuple[Any, Value, int]] = {}
        self._outside: list[tuple[Any, tuple[Any, ...], Value]] = []
        self._claimed: set[Value] = set()
        self._arguments: list[Value] = []

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, key: tuple[Any, ...], operator: str, region: str = "") -> Call:
        """The call with such a key; in the second run, that of the first, if it made one."""
        counted = (operator, region)
        number = self._counts[counted] = self._counts[counted] + 1
        again = self._again[key] = self._again[key] + 1
        if again > 1:
            key = (key, again)
        found = self.calls.get(key)
        if found is None:
            found = Call(operator, region or self.region, number)
            if self.first is None:
                self.calls[key] = found
            else:
                self.strange.append(found)
        return found

    def key(self, op: Any, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """What a call is known by."""
        key: list[Any] = [op]
        for arg in args:
            kind = type(arg)
            if kind is int or arg is None:
                key.append(arg)
            elif isinstance(arg, Tensor):
                known = self._known.get(id(arg))
                key.append(known[1] if known is not None and known[0]() is arg else self.value(arg))
            elif kind is list or kind is tuple:
                key.append(self.key(kind, arg))
            else:
                key.append(_constant(kind, arg))
        if kwargs:
            key.append(tuple(kwargs))
            key.append(self.key("", kwargs.values()))
        return tuple(key)

    # ── tensors ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def value(self, x: Tensor) -> Value:
        """Which value a tensor is."""
        return self._find(x)[1]

    def written(self, x: Tensor) -> int:
        """How often a tensor was written to since its value got its name."""
        return version(x) - self._find(x)[2]

    def _find(self, x: Tensor) -> tuple[Any, Value, int]:
        known = self._known.get(id(x))
        if known is not None and known[0]() is x:
            return known
        found = self._before(x) or self._around(x) or self._from_outside(x)
        self._known[id(x)] = found
        return found

    def rename(self, x: Tensor, other: Tensor) -> None:
        """Say that a tensor is the same value as another."""
        known = self._find(other)
        self._known[id(x)] = (weakref.ref(x), known[1], known[2] + version(x) - version(other))
        if type(x) not in _PLAIN:
            for place, member in enumerate(_members(x)):
                self.name(member, known[1].part(place))

    def knows(self, x: Tensor) -> bool:
        """Whether something is known of a tensor."""
        known = self._known.get(id(x))
        return known is not None and known[0]() is x

    def argument(self, index: int) -> Value:
        """The value of an argument of the block."""
        while len(self._arguments) <= index:
            self._arguments.append(Value(ARGUMENT, len(self._arguments)))
        return self._arguments[index]

    def drop(self) -> None:
        """Let go of all that is kept."""
        for call in self.calls.values():
            call.kept = None

    def name(self, x: Tensor, value: Value, writes: int = 0) -> None:
        """Say which value a tensor is, from now on."""
        self._known[id(x)] = (weakref.ref(x), value, version(x) + writes)
        if type(x) not in _PLAIN:
            for place, member in enumerate(_members(x)):
                self.name(member, value.part(place))

    def _before(self, x: Tensor) -> tuple[Any, Value, int] | None:
        """What the first run knew the same tensor as, which is still as it was."""
        known = self.first._known.get(id(x)) if self.first is not None else None
        if known is None or known[0]() is not x:
            return None
        return known if known[2] == version(x) else (known[0], known[1].part(("changed", version(x) - known[2])), version(x))

    def _around(self, x: Tensor) -> tuple[Any, Value, int] | None:
        """A wrapper that no operator made, around tensors of which some are known."""
        members = _members(x) if type(x) not in _PLAIN else ()
        if not any(self._is_known(member) for member in members):
            return None
        values = [self.value(member) for member in members]
        layout = x._layout if isinstance(x, DTensor) else None
        return weakref.ref(x), values[0].part((type(x), layout, *values[1:])), version(x)

    def _is_known(self, x: Tensor) -> bool:
        for run in (self, self.first):
            if run is not None and run.knows(x):
                return True
        return any(self._is_known(member) for member in (_members(x) if type(x) not in _PLAIN else ()))

    def _from_outside(self, x: Tensor) -> tuple[Any, Value, int]:
        """A tensor of which nothing is known. In the second run, it stands for the first alike that is no more."""
        facts = (tuple(x.shape), x.dtype, x.device, type(x))
        for other, told, value in self.first._outside if self.first is not None else ():
            if told == facts and other() is None and value not in self._claimed:
                self._claimed.add(value)
                return weakref.ref(x), value, version(x)
        value = Value(OUTSIDE, len(self._outside))
        self._outside.append((weakref.ref(x), facts, value))
        return weakref.ref(x), value, version(x)


def _constant(kind: type, x: Any) -> Hashable:
    try:
        hash(x)
    except TypeError:
        return kind, repr(x)
    return kind, x


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a result or an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def size_of(x: Tensor) -> int:
    """The bytes of a tensor, of a DTensor on the rank that holds most of it.

    >>> size_of(torch.ones(2, 3))
    24
    """
    if isinstance(x, DTensor):
        layout = x.layout
        return x.element_size() * max(math.prod(layout.local_shape(place)) for place in range(len(layout.mesh.ranks)))
    return x.element_size() * max(piece.numel() for piece in (x.pieces if isinstance(x, Bundle) else (x,)))


def describe(x: Tensor) -> str:
    """A tensor's dtype and shape, or layout.

    >>> describe(torch.ones(2, 3))
    'float32[2, 3]'
    """
    return repr(x.layout) if isinstance(x, DTensor) else f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
