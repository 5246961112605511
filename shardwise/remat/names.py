"""Names of values that tell how they are computed, so that the second run of a function recognises the values of the first.

A call is named by its operator and its arguments: constants by themselves, tensors by the call that made them. Calls that are
equal in all of this are numbered in their order. So what a run leaves out, or does in another order, changes no other name; and
two values have the same name only if they are computed in the same way.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.symbols import hint
from .._torch.tensors import is_wrapper, tree_leaves
from ..comm import Bundle
from ..tensor.dtensor import DTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
ARGUMENT, OUTSIDE = "argument", "outside"
_turns = itertools.count(1)


class Value:
    """The name of a tensor's value: a result of a call, an argument of the block, a tensor from outside, or a part of these."""

    _root: Value | None = None
    #: Whether a call wrote it to memory that existed before.
    written = False
    #: The cells that the backward will read it from, by how often it was written to since.
    cells: dict[int, Any] | None = None

    def __init__(self, of: Any, index: Any) -> None:
        self.of, self.index = of, index

    @property
    def root(self) -> Value:
        """The value whose memory this one has."""
        return self if self._root is None else self._root

    @root.setter
    def root(self, root: Value) -> None:
        self._root = None if root is self else root  # no cycle

    @property
    def source(self) -> Any:
        """The call it comes from, or "argument" or "outside"."""
        return self.of.source if isinstance(self.of, Value) else self.of

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""
        if isinstance(self.of, Value):
            return self.of.origin
        if isinstance(self.of, Invocation):
            return f"result {self.index}"
        return f"argument {self.index} of the block" if self.of == ARGUMENT else "a tensor from outside the block"


class Invocation:
    """One call of an operator in a region."""

    #: Its saved results in a tuple, or None, and how often the tensors in there had been written to.
    kept: Any = None
    versions: Sequence[int] = ()
    #: Dtypes and shapes of its results as text, for calls that only the second run makes.
    gives = ""
    #: The states of generators before the call, where the second run may have others.
    before: Any = None

    def __init__(self, operator: str, region: str, turn: int) -> None:
        self.operator, self.region = operator, region
        self.turn = turn  #: the last run that made it
        self.results = [Value(self, 0)]

    def result(self, index: int) -> Value:
        """One of the values it gives."""
        while len(self.results) <= index:
            self.results.append(Value(self, len(self.results)))
        return self.results[index]

    def keep(self, results: Any) -> None:
        """Save its results."""
        self.kept, self.versions = (results,), [version(x) for x in tensors(results)]


def version(x: Tensor) -> int:
    """How often a tensor was written to."""
    try:
        return x._version
    except RuntimeError:  # nobody counts in inference mode
        return 0


def _members(x: Any) -> tuple[Tensor, ...]:
    """The tensors that a tensor of a subclass wraps."""
    if type(x) in _PLAIN:
        return ()
    if isinstance(x, Bundle):
        return x.shards
    if isinstance(x, DTensor):
        return (x._local,)
    return tuple(getattr(x, name) for name in x.__tensor_flatten__()[0]) if is_wrapper(type(x)) else ()


Known = tuple[Any, Value, int]


class Names:
    """The values of one run of a block, by tensor. The second run also looks at those of the first, which may come up again."""

    def __init__(self, region: str, first: Names | None = None) -> None:
        self.region, self.first = region, first
        self.calls: dict[Any, Invocation] = {} if first is None else first.calls
        #: In the second run, calls that the first did not make, in their order.
        self.strange: list[Invocation] = []
        #: By the id of a tensor: a weak reference to it, its value, and how often it had been written to when it got its name.
        self.known: dict[int, Known] = {}
        self.regions: dict[int, Any] = {}
        #: All calls, in their order.
        self.order: list[Invocation] = []
        self._turn = 0 if first is None else next(_turns)
        self._outside: list[tuple[Any, tuple[Any, ...], Value]] = []
        self._came_in: dict[int, Value] = {}
        self._parts: dict[tuple[Value, Hashable], Value] = {} if first is None else first._parts
        self._claimed: set[Value] = set()

    def __del__(self) -> None:
        """Break the cycles of calls and their results, so that saved results do not wait for the garbage collector."""
        for call in self.strange if self.first is not None else self.order:
            call.results.clear()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, key: tuple[Any, ...], operator: str, region: str) -> Invocation:
        """The call with such a key; in the second run, that of the first run, if there is one."""
        calls, turn = self.calls, self._turn
        found, again = calls.get(key), 1
        while found is not None and found.turn == turn:
            again += 1
            found = calls.get((again, key))
        if found is None:
            found = Invocation(operator, region, turn)
            if self.first is None:
                calls[key if again == 1 else (again, key)] = found
            else:
                self.strange.append(found)
        found.turn = turn
        self.order.append(found)
        return found

    def number(self, call: Invocation) -> int:
        """Which call of its operator in its region it is."""
        alike = [other for other in self.order if other.operator == call.operator and other.region == call.region]
        return alike.index(call) + 1

    def tell(self, value: Value) -> str:
        """A value in words."""
        call = value.source
        return f"{value.origin} of {self.describe(call)}" if isinstance(call, Invocation) else value.origin

    def describe(self, call: Invocation) -> str:
        """A call in words."""
        return f"{call.operator}, call {self.number(call)} of it in {call.region}"

    def key(self, op: Any, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """The operator and arguments of a call, hashable, with values instead of tensors."""
        key: list[Any] = [op]
        for arg in args:
            known = self.known.get(id(arg))
            if known is not None and known[0]() is arg:
                key.append(known[1])
                continue
            kind = type(arg)
            if kind is int or arg is None:
                key.append(arg)
            elif isinstance(arg, Tensor):
                key.append(self._find(arg)[1])
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

    def value_now(self, x: Tensor) -> tuple[Value, int]:
        """Which value a tensor is, and how often it was written to since it got that name."""
        _, value, then = self._find(x)
        return value, version(x) - then

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor has a name."""
        known = self.known.get(id(x))
        return known is not None and known[0]() is x

    def name(self, x: Tensor, value: Value, writes: int = 0) -> None:
        """Say which value a tensor is, from now on."""
        self.known[id(x)] = (weakref.ref(x), value, version(x) + writes)
        if type(x) not in _PLAIN:
            for place, member in enumerate(_members(x)):
                self.name(member, self.part(value, place))

    def cast(self, x: Tensor, dtype: torch.dtype) -> Value:
        """The value of a tensor from outside in another dtype."""
        value = self.part(self.value(x), dtype)
        value.root = value
        return value

    def part(self, value: Value, name: Hashable) -> Value:
        """A tensor inside another, or one made around it."""
        found = self._parts.get((value, name))
        if found is None:
            found = self._parts[value, name] = Value(value, name)
            found.root = value.root
        return found

    def _find(self, x: Tensor) -> Known:
        known = self.known.get(id(x))
        if known is not None and known[0]() is x:
            return known
        value = self._before(x) or self._around(x) or self._from_outside(x)
        found = self.known[id(x)] = (weakref.ref(x), value, version(x))
        return found

    def _before(self, x: Tensor) -> Value | None:
        """The name that the first run gave to the same tensor; another one if it was written to since."""
        known = self.first.known.get(id(x)) if self.first is not None else None
        if self.first is None or known is None or known[0]() is not x:
            return None
        writes = version(x) - known[2]
        value = self.first._came_in.get(id(x), known[1])  # before the first run wrote to it
        return self.part(value, ("written to", writes)) if writes else value

    def _around(self, x: Tensor) -> Value | None:
        """A wrapper that no operator made, around tensors of which some are known."""
        members = _members(x)
        if not any(self._is_known(member) for member in members):
            return None
        values = [self.value(member) for member in members]
        return self.part(values[0], (type(x), x._layout if isinstance(x, DTensor) else None, *values[1:]))

    def _is_known(self, x: Tensor) -> bool:
        if self.knows(x) or (self.first is not None and self.first.knows(x)):
            return True
        return any(self._is_known(member) for member in _members(x))

    def _from_outside(self, x: Tensor) -> Value:
        """A tensor of which nothing is known. In the second run it stands for the first alike that is no more."""
        if type(x) is torch.nn.Parameter and self.first is None:  # which lives longer than a block
            value = self._came_in[id(x)] = Value(OUTSIDE, 0)
            return value
        weight = _cast_from(x)
        if weight is not None:
            return self.cast(weight, x.dtype)
        here = (tuple(x.shape), x.dtype, x.device, type(x))
        for other, facts, value in self.first._outside if self.first is not None else ():
            if facts == here and other() is None and value not in self._claimed:
                self._claimed.add(value)
                return value
        value = self._came_in[id(x)] = Value(OUTSIDE, len(self._outside))
        self._outside.append((weakref.ref(x), here, value))
        return value


def _cast_from(x: Tensor) -> Tensor | None:
    """The leaf of which a tensor is the same in another dtype, as autocast makes and remembers it."""
    made = x.grad_fn
    leaf = made.next_functions[0][0] if made is not None and made.name() == "ToCopyBackward0" else None
    return getattr(leaf, "variable", None)


def _constant(kind: type, x: Any) -> Hashable:
    if kind is float and x != x:
        return kind, "nan"  # which is not equal to itself
    if kind is torch.ScriptObject:  # such as a process group: every call sees a new one of the same
        return kind
    try:
        hash(x)
    except TypeError:
        return kind, repr(x)
    return kind, x


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a result or an argument; a single one is looked at first, since most results are."""
    return [value] if isinstance(value, Tensor) else [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def size_of(x: Tensor) -> int:
    """The bytes of a tensor, of a DTensor on the rank that holds most of it.

    >>> size_of(torch.ones(2, 3))
    24
    """
    if isinstance(x, DTensor):
        return x._layout.nbytes
    return x.element_size() * max(hint(shard.numel()) for shard in (x.shards if isinstance(x, Bundle) else (x,)))


def facts_of_tensor(x: Tensor) -> tuple[Any, ...]:
    """A tensor's layout, or its dtype and shape: what has to be the same in both runs."""
    return (x._layout,) if isinstance(x, DTensor) else (x.dtype, x.shape)


def describe(facts: tuple[Any, ...]) -> str:
    """The same in words.

    >>> describe(facts_of_tensor(torch.ones(2, 3)))
    'float32[2, 3]'
    """
    return repr(facts[0]) if len(facts) == 1 else f"{str(facts[0]).removeprefix('torch.')}{list(facts[1])}"
