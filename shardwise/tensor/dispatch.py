"""What happens to one operator: key → decision → moves → local call → wrapped results. No operator is named here.

On a known call the path is one tuple, one look-up, and a program, or the local operator and one wrapper. All else is in
`_general`. `cls` is the tensor subclass; its instances carry `_local` and `_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import ref

import torch
from torch import SymInt, Tensor

from .._torch.compiler import untraced
from .._torch.symbols import rebuilt
from .._torch.tensors import dispatch_modes, no_dispatch, no_modes, raw_call, tree_map_only
from ..base.caches import new_cache
from ..base.schema import Schema
from ..comm import transport
from ..errors import LayoutError, OperatorError, ShardwiseError, Unsettled
from ..layouts.layout import Layout, Number, PerRank, SymbolicLayout
from ..layouts.mesh import Mesh
from ..propagation.decide import Decision, decide
from ..propagation.notation import Call, LocalCopy
from ..propagation.operator import OPERATORS, Operator, operator_of
from ..redistribution.run import move, permit
from .arguments import WHOLE, Arguments, Quickest, ask_torch, bind, check_outs, keyed
from .fallback import apart, choose, decompose, functional, is_mixed, writes_plain
from .toolbox import Toolbox
from .wrapping import maker, sever, wrap

_decisions = new_cache("decisions", limit=8192)
_known = _decisions.entries
_PLAIN = frozenset((int, bool, type(None), str, float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format))

#: Ends the key of a call that writes to a plain tensor, which is else taken as a replicated one.
WRITES_PLAIN = "writes to a plain tensor"


def forget() -> None:
    """Forget what was found out of operators and decided for them: a row of the table was added or taken away."""
    OPERATORS.clear()
    _decisions.clear()


@untraced
def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: C901, PLR0912  one frame
    """Run an operator on DTensors (and what stands beside them)."""
    operator = OPERATORS.get(id(func)) or operator_of(func)
    key: list[Any] = [operator]
    values = []
    for arg, by_type in zip(args, operator.by_type):  # noqa: B905  arguments left out have defaults
        kind = type(arg)
        if kind is cls:
            key.append(arg._layout)
            values.append(arg._local)
            continue
        values.append(arg)
        if arg is None:
            key.append(None)
        elif kind in _PLAIN:
            key.append(kind if by_type else arg)
        elif kind is list and arg and type(arg[0]) in WHOLE:
            key.append(tuple(arg))
        else:
            return _general(cls, func, args, kwargs or {})
    if kwargs:
        for name, arg in kwargs.items():
            if type(arg) not in _PLAIN:
                return _general(cls, func, args, kwargs)
            key.append(name)
            key.append(type(arg) if name in operator.free and arg is not None else arg)
    try:
        known = _known.get(tuple(key))
    except TypeError:  # a size is a symbol of a trace
        known = None
    if known is None:
        return _general(cls, func, args, kwargs or {})
    _decisions.hits += 1
    if known.makers is None:
        return _run_known(cls, known, values, args, kwargs or {})
    for position, value in known.edits:
        values[position] = value
    try:
        local = known.call(*values, **kwargs) if kwargs else known.call(*values)
    except LocalCopy as copied:
        return sever(wrap(cls, copied.args[1], known.layout), func, args, kwargs or {}, 0)
    except Exception as error:
        _report(error, known, args)
        raise
    make = known.maker
    if make is not None:
        self = wrap(cls, local, known.layout) if local.is_meta else make()
        self._local, self._layout = local, known.layout
        return self
    return _several(cls, known.makers, local) if known.makers else args[0]


def _run_known(cls: Any, known: Known, values: list[Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Carry out a known decision that takes more than one local call: `values` are the arguments with locals for tensors."""
    if known.decision.program is not None:
        return known.decision.program(known.tools, known.operator.func, *args, **kwargs)
    given = Arguments(values, dict(kwargs), known.layouts, [(values, at) for at in known.positions])
    return _run_or_ask(cls, known, args, kwargs, given)


def _several(cls: Any, makers: Any, shards: Any) -> tuple[Any, ...]:
    outs = []
    for (make, layout), shard in zip(makers, shards):  # noqa: B905  `strict` costs as much as an attribute of a wrapper
        self = wrap(cls, shard, layout) if shard.is_meta else make()
        self._local = shard
        self._layout = layout
        outs.append(self)
    return tuple(outs)


class Known:
    """A decision, prepared for running.

    `makers` tells how `dispatch` may run it by itself: a constructor and a layout for each new tensor, none where the first
    argument is written to and given back; None: `_run` has to. `maker` and `layout` are those of a single result.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "decision",
        "edits",
        "layout",
        "layouts",
        "maker",
        "makers",
        "mesh",
        "operator",
        "per_rank",
        "positions",
        "schema",
        "severs",
        "tools",
    )

    def __init__(self, cls: Any, decision: Decision, operator: Operator, given: Arguments) -> None:
        self.decision, self.operator, self.schema, row = decision, operator, operator.schema, operator.row
        facts = self.schema
        self.layouts, self.mesh = given.layouts, given.layouts[0].mesh
        self.positions = [at for holder, at in given.places if holder is given.positional]
        self.call, self.tools = decision.call or raw_call(operator.func), Toolbox(cls, facts.name)
        self.severs = facts.view and (bool(decision.moves) or (row is not None and row.copies))
        self.edits = tuple((facts.names.index(name), value) for name, value in decision.edits.items())
        self.per_rank = any([isinstance(value, PerRank) for value in decision.edits.values()])
        self.makers = self._makers(cls, len(given.positional))
        single: Any = self.makers[0] if self.makers and len(self.makers) == 1 else (None, None)
        self.maker, self.layout = single

    def _makers(self, cls: Any, positional: int) -> tuple[tuple[Any, Layout], ...] | None:
        decision, facts = self.decision, self.schema
        if self.severs or self.per_rank or not decision.simple or [at for at, _ in self.edits if at >= positional]:
            return None
        if facts.in_place and facts.returns:
            return ()
        if facts.written or facts.lists or len(facts.returns) != len(decision.results) or None in decision.results:
            return None
        return tuple([(maker(cls, layout), layout) for layout in decision.results if layout is not None]) or None


class Exact:
    """The local call of an operator through which partial values pass, where a number among its arguments lets them.

    Infinity times a sum is not the sum of infinities, nor is a sum divided by 0: with such a number the operator runs on whole
    tensors. Numbers are no part of a key, so they are looked at here; so are replicated tensors without dims, on hosts.
    """

    __slots__ = ("__weakref__", "call", "divisor", "known", "layouts", "places", "spread")

    def __init__(self, known: Known, given: Arguments) -> None:
        row, self.known, self.call = known.operator.row, known, known.call
        if isinstance(self.call, Quickest):
            self.call.owner = ref(self)
        self.divisor = None if row is None or row.divisor is None else known.schema.names.index(row.divisor)
        self.layouts = list(given.layouts)
        for index, _, want in known.decision.moves:
            self.layouts[index] = want
        self.places = [at for _, at in given.places]
        self.spread = {at for at, layout in zip(self.places, self.layouts, strict=True) if layout.states}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pairs = ((at, value) for at, value in (*enumerate(args), *kwargs.items()) if at not in self.spread)
        if not any(_is_unbounded(value, at == self.divisor, self.known.mesh) for at, value in pairs):
            return self.call(*args, **kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        target = given[0]
        for at, layout in zip(self.places, self.layouts, strict=True):
            given[at] = move(given[at], layout, layout.replicated(), self.known.schema.name)
        named = {name: given[name] for name in kwargs}
        out = self.call(*(given[position] for position in range(len(args))), **named)
        results = [layout for layout in self.known.decision.results if layout is not None]
        placed = [move(x, to.replicated(), to) for x, to in zip(out if len(results) > 1 else (out,), results, strict=True)]
        if self.known.schema.in_place:
            return transport(self.known.mesh).each(_write, self.known.mesh, target, placed[0])
        return tuple(placed) if len(results) > 1 else placed[0]


def _passes_by_number(known: Known, given: Arguments) -> bool:
    """Whether something is partial in a call that has a number, or a tensor without dims, among its arguments."""
    decision = known.decision
    if decision.program or decision.kernel or decision.copy_back or known.per_rank:
        return False
    if not [1 for layout in (*given.layouts, *decision.results) if layout is not None and layout.partials]:
        return False
    values = (*given.positional, *given.named.values())
    return any(type(v) in (int, float, complex) or (isinstance(v, Tensor) and not v.ndim) for v in values)


def _is_unbounded(value: Any, divides: bool, mesh: Mesh) -> bool:
    """Whether a number, or a tensor without dims on this host, is infinite or nan, or is 0 and divides. A rank outside the mesh
    has no tensor to look at, and takes no part in what is done then."""
    if isinstance(value, Tensor):
        if value.ndim or value.device.type != "cpu" or dispatch_modes() or not hasattr(value, "tolist"):
            return False
        if transport(mesh).place(mesh) < 0:
            return False
        value = value.tolist()
    return type(value) in (int, float, complex) and (value - value != 0 or (divides and value == 0))


def _general(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same as `dispatch` for any arguments: plain tensors, lists, several meshes, first calls."""
    operator = operator_of(func)
    if operator.row is not None and operator.row.zipped and is_mixed(cls, args):
        return apart(Toolbox(cls), func, args, kwargs)
    if operator.schema.reshapes and not operator.knows_plain:
        return _reshape_in_place(operator, args, kwargs)
    key, given = keyed(cls, operator, args, kwargs)
    if operator.schema.written and not operator.knows_plain and writes_plain(cls, operator.schema, args, kwargs):
        key = (*key, WRITES_PLAIN)
    if _has_symbols(key):
        return _symbolic(cls, operator, args, kwargs, given)
    by_default = (*key, torch.get_default_dtype())
    known = _known.get(key) or _known.get(by_default)
    if known is None:
        decision = _checked(operator, given, key[-1] is WRITES_PLAIN)
        known = Known(cls, decision, operator, given)
        if known.makers is not None and decision.call is None:
            known.call = Quickest(known, func)
        if _passes_by_number(known, given):
            known.call = Exact(known, given)
        known = _decisions.put(by_default if _takes_default_dtype(decision, given.layouts) else key, known)
    else:
        _decisions.hits += 1
    return _run_or_ask(cls, known, args, kwargs, given)


def _run_or_ask(cls: Any, known: Known, args: Any, kwargs: dict[str, Any], given: Arguments) -> Any:
    """Carry out a decision; torch is asked about a call that fails, since it says best what is wrong."""
    try:
        return _run(cls, known, args, kwargs, given)
    except Exception as error:
        if _is_internal(error):
            ask_torch(known.operator, keyed(cls, known.operator, args, kwargs)[1])
        raise


def _checked(operator: Operator, given: Arguments, writes_plain: bool) -> Decision:
    """What is decided for a call; what torch refuses is refused. The operator itself refuses what it does not take, so torch is
    asked only where something else runs in its place, which may take more, or where there is nothing that it could refuse."""
    try:
        decision = _decide(operator, given, writes_plain)
    except Exception as error:
        if _is_internal(error):
            ask_torch(operator, given)
        raise
    of_floats = all([layout.dtype.is_floating_point for layout in given.layouts])
    if decision.program is decompose or (decision.program and of_floats) or [x for x in given.layouts if 0 in x.shape]:
        ask_torch(operator, given)
    elif (decision.program or decision.kernel) and not of_floats:
        ask_torch(operator, given, NotImplementedError)
    return decision


def _is_internal(error: Exception) -> bool:
    """Whether an error may come of arguments that do not fit, and not say so: our own do, but for layouts that differ."""
    return isinstance(error, LayoutError) or not isinstance(error, ShardwiseError | Warning)


def _symbolic(cls: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments) -> Any:
    """The same in a program that is traced for all sizes. Nothing is kept; where a rule needs a size to be a number, it is
    specialised to the one at hand, and the program holds for that one only."""
    try:
        decision = _decide(operator, given)
        sizes = [size for holder, at in given.places for size in holder[at].shape]
        edits = tree_map_only(SymInt, lambda size: rebuilt(size, sizes), decision.edits)
        known = Known(cls, replace(decision, edits=edits), operator, given)
        if _passes_by_number(known, given):
            known.call = Exact(known, given)
        return _run(cls, known, args, kwargs, given)
    except (Unsettled, NotImplementedError):
        return dispatch(cls, operator.func, (), _specialised(args), _specialised(kwargs))


def _has_symbols(key: Sequence[Any]) -> bool:
    kinds = [type(part) for part in key]
    if SymbolicLayout in kinds or SymInt in kinds:
        return True
    return tuple in kinds and any(_has_symbols(part) for part in key if type(part) is tuple)


def _specialised(value: Any) -> Any:
    """The value (through lists, tuples and dictionaries) with numbers for symbols, also in the shapes of tensors."""
    if isinstance(value, dict):
        return {name: _specialised(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_specialised, value))
    if isinstance(value, Tensor):
        if isinstance(layout := getattr(value, "_layout", None), SymbolicLayout):
            cast(Any, value)._layout = layout.specialised()
        _specialised((*value.shape, *value.stride()))
    return int(value) if isinstance(value, SymInt) else value


def _takes_default_dtype(decision: Decision, layouts: list[Layout]) -> bool:
    """Whether a result is floating though no tensor is: then its dtype is torch's default one, which may change."""
    if [1 for layout in layouts if layout.dtype.is_floating_point or layout.dtype.is_complex]:
        return False
    return any(layout is not None and layout.dtype.is_floating_point for layout in decision.results)


def _reshape_in_place(operator: Operator, args: Any, kwargs: Any) -> Any:
    """An operator that changes its argument's shape in place: the view takes the place of the tensor, and torch, told not to
    dispatch, changes the sizes that the wrapper itself shows."""
    if operator.form is None:
        raise OperatorError(f"{operator.name} changes the shape of {args[0]!r} in place; this is not supported")
    out = operator.form(*args, **kwargs)
    with no_dispatch():
        operator.func(*args, **kwargs)
    args[0]._local, args[0]._layout = out._local, out._layout
    return args[0]


def _decide(operator: Operator, given: Arguments, writes_plain: bool = False) -> Decision:
    if dispatch_modes():
        with no_modes():
            return _decide(operator, given, writes_plain)
    row, facts = operator.row, operator.schema
    if facts.outs and operator.form is not None:
        check_outs(operator, given)
    if row is None or writes_plain:
        return Decision(program=choose(operator))
    if row.program is not None and not row.inputs and row.function is None:
        return Decision(copy_back=True) if operator.borrowed else Decision(program=row.program)
    if facts.outs or (facts.written and not facts.in_place and (row.function is None or operator.borrowed)):
        return Decision(program=choose(operator))
    return decide(row, bind(operator, given))


def carry_out(cls: Any, func: Any, args: Any, kwargs: Any, choose_for: Callable[[Call], Decision]) -> Any:
    """Run an operator as another than `decide` decides, and keep nothing of it."""
    operator = operator_of(func)
    given = keyed(cls, operator, args, kwargs)[1]
    decision = choose_for(bind(operator, given))
    return _run(cls, Known(cls, decision, operator, given), args, kwargs, given)


def _run(cls: Any, known: Known, args: Any, kwargs: Any, given: Arguments) -> Any:
    """Carry out a decision."""
    decision, facts, func = known.decision, known.schema, known.operator.func
    if facts.written:
        _check_writes(cls, facts, args, kwargs)
    if decision.program is not None:
        if not facts.written and not known.operator.knows_plain:
            args, kwargs = _distributed(known, args), {name: _distributed(known, value) for name, value in kwargs.items()}
        return decision.program(known.tools, func, *args, **kwargs)
    if decision.copy_back:
        return functional(Toolbox(cls), func, *args, **kwargs)
    if decision.moves:
        permit(decision.plans, given.layouts, facts.name)
        for (index, have, _), steps in zip(decision.moves, decision.plans, strict=True):
            holder, at = given.places[index]
            holder[at] = move(holder[at], have, steps, facts.name)
    for position, value in known.edits:
        if position < len(given.positional):
            given.positional[position] = value
        else:
            given.named[facts.names[position]] = value
    try:
        local = _locally(_call, known, given)
    except LocalCopy:
        local = _locally(_call_or_copy, known, given)
        return sever(wrap(cls, local, cast(Layout, decision.results[0])), func, args, kwargs, 0)
    except Exception as error:
        _report(error, known, given.layouts)
        raise
    return _results(cls, local, known, args, kwargs)


def _distributed(known: Known, value: Any) -> Any:
    """An argument that a program reads, with replicated DTensors in the place of plain tensors."""
    if isinstance(value, list | tuple):
        return type(value)([_distributed(known, item) for item in value])
    plain = isinstance(value, Tensor) and not known.tools.is_distributed(value)
    return known.tools.replicated(value, known.mesh) if plain else value


def _report(error: Exception, known: Known, args: Sequence[Any]) -> None:
    """Tell other ranks of an error of this rank's kernel, which its own data may have caused: of tensors, or their layouts, of
    which it does not hold the same as all others."""
    layouts = [getattr(x, "_layout", x) for x in args]
    if any(isinstance(layout, Layout) and layout is not layout.replicated() for layout in layouts):
        transport(known.mesh).report(error, known.mesh, known.schema.name)


def _locally(call: Callable[..., Any], known: Known, given: Arguments) -> Any:
    """What the ranks find, each by itself where they differ in more than their tensors."""
    decision = known.decision
    body = decision.kernel or known.call
    if decision.kernel is None and not known.per_rank:
        return call(body, given.positional, given.named)
    world = transport(known.mesh)
    extra = [world.number(item, known.mesh) if isinstance(item, Number) else item for item in decision.extra]
    local = world.each(call, known.mesh, body, [*given.positional, *extra], given.named)
    if known.schema.in_place:
        world.each(_write, known.mesh, given.positional[0], local)
    return local


def _check_writes(cls: Any, facts: Schema, args: Any, kwargs: Any) -> None:
    for name, value in facts.named(args, kwargs).items():
        for x in value if isinstance(value, list | tuple) else (value,):
            if name in facts.written and isinstance(x, cls) and x.severed:
                raise OperatorError(
                    f"{facts.name} writes to {x._layout}, a view that data had to move for, so the write would not reach the "
                    "tensor it is a view of; redistribute that tensor first, clone the view, or assign (x[i] = x[i] + 1 in "
                    "place of x[i] += 1)"
                )


def _write(target: Tensor, value: Tensor) -> Tensor:
    """What a kernel gave, in the argument that the operator writes to, if it is not that argument itself."""
    return target if value is target else target.copy_(value)


def _call(kernel: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return kernel(*args, **kwargs)


def _call_or_copy(body: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return body(*args, **kwargs)
    except LocalCopy as copied:
        return copied.args[1]


def _results(cls: Any, local: Any, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    facts = known.schema
    if facts.in_place:
        return args[0] if facts.returns else None
    if facts.written:
        given = facts.named(args, kwargs)
        outs = [given[name] for name in facts.returns if name is not None]
        return outs[0] if len(outs) == 1 else tuple(outs) if outs else None

    def wrapped(value: Tensor, index: int, layout: Layout) -> Any:
        out = wrap(cls, value, layout)
        return sever(out, known.operator.func, args, kwargs, index) if severs else out

    severs = known.severs or (facts.view and args[0].severed)
    return _each(wrapped, local, iter(enumerate(known.decision.results)))


def _each(wrapped: Callable[..., Any], value: Any, layouts: Iterator[Any]) -> Any:
    """Wrap the tensors in a result. No function inside another: one that calls itself keeps all that it knows alive, tensors
    among them, until the garbage is collected."""
    if isinstance(value, Tensor):
        index, layout = next(layouts)
        return value if layout is None else wrapped(value, index, layout)
    return type(value)(_each(wrapped, item, layouts) for item in value) if isinstance(value, list | tuple) else value
