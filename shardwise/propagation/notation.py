"""What a rule is: a sentence about one mesh axis, and the words beside it. Text → frozen data; no layouts are chosen here.

A sentence names the dims of each tensor argument, in the order of the operator's schema, and of each result:

    "m k, k n -> m n"            shard m, or n, or k (which the result lacks: it is then Partial(sum))
    "..., ... -> ..."            any dims, broadcast from the right
    "...[dim] -> ..."            the dims that argument `dim` names are lost (kept with size 1 if the result has as many dims)
    "...[dim] -> ...[dim]"       … or kept
    "...[dim=s], t -> ...[dim=t]"   the dims that `dim` names go by a letter of their own, here s of the first argument
    "n c -> n, ="                the second result is the same on every rank, whatever is sharded

A tensor with fewer dims than its letters has the last of them. An argument that is absent, None or a number is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import OperatorError
from ..layouts.layout import Factor, Layout

Kernel = Callable[..., Any]
#: Turns a call and the layouts chosen for its tensors into the function to run on each rank (or a tuple of it and what it
#: takes after the other positional arguments), or None for the operator itself.
KernelMaker = Callable[["Call", Sequence[Layout]], Kernel | tuple[Any, ...] | None]


@dataclass(frozen=True, slots=True)
class Pattern:
    """One tensor of a sentence: the letters before and after the ellipsis, the argument that names special dims, and the
    letter that these go by (none: `[]k`, k the dim). `same`: a result that is the same on every rank."""

    before: tuple[str, ...]
    ellipsis: bool
    named: str | None
    after: tuple[str, ...]
    letter: str | None = None
    same: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything about one operator.

    sentence     inputs and outputs as patterns, or None where `function` says it
    lost         what sharding a lost dim leaves partial; None: a lost dim cannot be sharded
    linear       sets of tensor arguments in which the operator is jointly linear: all of a set may be Partial(sum)
    passes       kinds of Partial that go through the first argument, the others replicated: "all", one kind, "up" (max and
                 min), "down" (swapped) or None; "up float": only of floats, since integers may wrap around. A tuple: one word
                 for each tensor argument
    together     a kind that passes where it is partial in all arguments
    divisor      the argument that it divides by: nothing partial passes where that is the number 0
    rounds       its results are rounded if they are integers, so that it is linear in floats only
    whole        letters that cannot be sharded ("[]": the named dims, "...": those of the ellipsis); "l?causal": where the
                 argument `causal` is true
    kernel       makes the local function where the operator itself will not do
    program      runs on DTensors, instead of the sentence, if a letter of `whole` is sharded; always where there is no sentence
    function     proposes layouts where a sentence cannot say it, or gives a rule for this one call, of which the inputs are
                 all its tensors in order; where it gives None, the sentence holds
    gives        shape and dtype of each result from the arguments by name (layouts for tensors), where torch's own operator on
                 tensors without data will not do
    copies       its result is a view on one device, but not here
    zipped       its lists go element by element, so they may be split and run apart
    unoffered    why valid placements are not offered: "max min: why", about those with a partial max or min; "shard: why"
    static/free  arguments that enter the key by value / by type only, against the default (see `keyed_by_value`)
    """

    inputs: tuple[Pattern, ...] = ()
    outputs: tuple[Pattern, ...] = ()
    lost: str | None = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    rounds: bool = False
    divisor: str | None = None
    passes: str | tuple[str | None, ...] | None = None
    together: str | None = None
    whole: frozenset[str] = frozenset()
    kernel: KernelMaker | None = None
    program: Kernel | None = None
    function: Callable[[Call], Proposal | Rule | None] | None = None
    gives: Callable[[dict[str, Any]], Sequence[tuple[Sequence[int], Any]]] | None = None
    copies: bool = False
    zipped: bool = False
    static: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    unoffered: str = ""
    text: str = ""


class Result(NamedTuple):
    """Shape, stride and dtype of one result, as the operator gives them on one device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with its arguments by name: layouts stand for tensors, None or numbers as they are."""

    op: Any
    name: str
    arguments: dict[str, Any]
    tensors: tuple[Layout, ...]
    #: for each tensor argument of the schema: the index in `tensors`, or None where it is not a tensor
    slots: tuple[int | None, ...]
    results: tuple[Result, ...]
    #: the arguments that are tensors or lists of tensors, in order
    tensor_names: tuple[str, ...]
    #: the argument that the operator writes to and returns, as an index in `tensors`
    written: int | None = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def result(self, index: int, dims: Iterable[Iterable[Factor]], partials: Iterable[tuple[str, str]] = ()) -> Layout:
        """The layout of a result on the mesh of the first tensor, with the dtype and the stride that it has on one device."""
        one = self.results[index]
        return Layout.of(self.tensors[0].mesh, dims, partials, one.dtype, one.stride)

    def dims(self, name: str, ndim: int | None = None) -> tuple[int, ...]:
        """The dims an argument names, counted from the front; all where it is None or empty."""
        ndim = self.tensors[0].ndim if ndim is None else ndim
        given = self.arguments.get(name)
        if given is None or given == () or given == []:
            return tuple(range(ndim))
        several = given if isinstance(given, list | tuple) else (given,)
        return tuple(int(d) % max(ndim, 1) for d in several)


class LocalCopy(BaseException):  # no error
    """Carries, after its message, a result that should have been a view of a local tensor but had to be a copy."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rule function proposes.

    wants      the layout of each tensor
    results    the layout of each result
    edits      arguments to replace, by name; a `PerRank` gives each rank its own
    call       runs on the local values in place of the operator, with the same arguments
    kernel     the same, but on each rank's own tensors, with `extra` after the other positional arguments (a `Number` in
               it becomes a 0-d tensor)
    program    runs on DTensors in place of all this
    """

    wants: tuple[Layout, ...] = ()
    results: tuple[Layout | None, ...] = ()
    edits: dict[str, Any] = field(default_factory=dict)
    call: Kernel | None = None
    kernel: Kernel | None = None
    extra: tuple[Any, ...] = ()
    program: Kernel | None = None


def additive(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether converting between these dtypes commutes with adding; integers wrap around, and True + True is True.

    >>> additive([torch.float32, torch.bfloat16]), additive([torch.int64, torch.float32])
    (True, False)
    """
    several = set(dtypes)
    return len(several) == 1 or all(dtype.is_floating_point or dtype.is_complex for dtype in several)


_TOKEN = re.compile(r"\s*(\.\.\.|\[\w+(?:=\w)?\]|\w)")


def parse(text: str) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
    """A sentence as patterns.

    >>> parse("m k, k n -> m n")[1]
    (Pattern(before=('m', 'n'), ellipsis=False, named=None, after=(), letter=None, same=False),)
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise OperatorError(f"a rule reads 'inputs -> outputs', got {text!r}")
    left, right = ([_pattern(part, text) for part in side.split(",")] for side in sides)
    return tuple(left), tuple(right)


def _pattern(part: str, text: str) -> Pattern:
    tokens, position = [], 0
    part = part.strip()
    if part == "=":
        return Pattern((), True, None, (), same=True)
    while position < len(part):
        match = _TOKEN.match(part, position)
        if match is None:
            raise OperatorError(f"rule {text!r}: cannot read {part[position:]!r}; use letters, ... and [argument]")
        tokens.append(match[1])
        position = match.end()
    if "..." not in tokens:
        return Pattern(tuple(tokens), False, None, ())
    at = tokens.index("...")
    rest = tokens[at + 1 :]
    named, _, letter = rest.pop(0)[1:-1].partition("=") if rest and rest[0].startswith("[") else ("", "", "")
    return Pattern(tuple(tokens[:at]), True, named or None, tuple(rest), letter or None)


def labels(pattern: Pattern, call: Call, layout_ndim: int) -> tuple[str, ...]:
    """The label of each dim of a tensor: a letter, `.k` (k-th ellipsis dim from the right) or `[]k` (a named dim).

    >>> labels(parse("... m k -> m")[0][0], None, 4)
    ('.1', '.0', 'm', 'k')
    """
    if not pattern.ellipsis and len(pattern.before) == layout_ndim:
        return pattern.before
    count = layout_ndim - len(pattern.before) - len(pattern.after)
    middle = [f".{count - 1 - i}" for i in range(count)] if pattern.ellipsis else []
    if pattern.named is not None:
        for dim in call.dims(pattern.named, layout_ndim):
            if dim < count:
                middle[dim] = pattern.letter or f"[]{dim}"
    names = (*pattern.before, *middle, *pattern.after)
    return names[max(0, len(names) - layout_ndim) :]
