"""What happens to one operator: key → decision → moves → local call → wrapped results. No operator is named here.

On a known call the path is one tuple, one look-up, and a program, or the local operator and one wrapper. All else is in
`_general`.
`cls` is the tensor subclass; its instances carry `_local` and `_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import SymInt, Tensor

from .._torch.compiler import untraced
from .._torch.symbols import rebuilt
from .._torch.tensors import dispatch_modes, no_dispatch, no_modes, raw_call
from ..base.caches import new_cache
from ..comm import transport
from ..errors import LayoutError, OperatorError, ShardwiseError
from ..layouts.layout import Layout, Number, PerRank, SymbolicLayout
from ..layouts.mesh import Mesh
from ..planning.plan import plan
from ..propagation.decide import Decision, decide
from ..propagation.notation import Call, LocalCopy, Rule
from ..propagation.table import find
from ..redistribution.run import check_moves, move, run
from .arguments import WHOLE, Arguments, ask_torch, bind, by_name, check_outs, quickest
from .fallback import apart, choose, decompose, functional, functional_form, is_mixed, writes_plain
from .schema import Signature, signature
from .toolbox import Toolbox
from .wrapping import maker, sever, wrap

_decisions = new_cache("decisions", limit=8192)
_known = _decisions.entries
_PLAIN = frozenset((int, bool, type(None), str, float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format))


#: Ends the key of a call that writes to a plain tensor, which is else taken as a replicated one.
WRITES_PLAIN = "writes to a plain tensor"


class Operator:
    """An operator overload as dispatch sees it. Its place in a key is cheaper to hash than the overload's own."""

    __slots__ = ("by_type", "free", "func", "knows_plain", "reshapes", "signature", "zipped")

    def __init__(self, func: Any) -> None:
        self.func, self.signature = func, signature(func)
        self.free = self.signature.free
        self.by_type = tuple(position in self.free for position in range(len(self.signature.names)))
        self.reshapes = torch.Tag.inplace_view in func.tags
        row = find(func)
        self.zipped = row is not None and row.zipped
        self.knows_plain = _own_program(func, row) is not None


_operators: dict[int, Operator] = {}


def _operator(func: Any) -> Operator:
    found = _operators.get(id(func))  # the record keeps the overload alive, so its id stays its own
    if found is None:
        found = _operators.setdefault(id(func), Operator(func))  # of two threads the first: keys hold it
    return found


def forget() -> None:
    """Forget what was found out of operators and decided for them: a row of the table was added or taken away."""
    _operators.clear()
    _decisions.clear()
    signature.cache_clear()


@untraced
def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: C901, PLR0912, PLR0915  one frame
    """Run an operator on DTensors (and what stands beside them)."""
    operator = _operators.get(id(func)) or _operator(func)
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
    if known is None or known.makers is None:
        if known is None or known.decision.program is None:
            return _general(cls, func, args, kwargs or {})
        _decisions.hits += 1
        return known.decision.program(known.tools, func, *args, **(kwargs or {}))
    _decisions.hits += 1
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

    __slots__ = ("call", "decision", "edits", "layout", "maker", "makers", "mesh", "per_rank", "severs", "signature", "tools")

    def __init__(self, cls: Any, decision: Decision, func: Any, mesh: Mesh, positional: int) -> None:
        facts = signature(func)
        self.decision, self.signature, self.mesh = decision, facts, mesh
        self.call, self.tools = decision.call or raw_call(func), Toolbox(cls, facts.name)
        row = find(func)
        self.severs = facts.view and (bool(decision.moves) or (row is not None and row.copies))
        self.edits = tuple((facts.names.index(name), value) for name, value in decision.edits.items())
        self.per_rank = any(isinstance(value, PerRank) for value in decision.edits.values())
        self.makers = self._makers(cls, positional)
        self.maker: Any
        self.layout: Layout | None
        self.maker, self.layout = self.makers[0] if self.makers and len(self.makers) == 1 else (None, None)

    def _makers(self, cls: Any, positional: int) -> tuple[tuple[Any, Layout], ...] | None:
        decision, facts = self.decision, self.signature
        if self.severs or self.per_rank or not decision.simple or not all(position < positional for position, _ in self.edits):
            return None
        if facts.in_place and facts.returns:
            return ()
        if facts.written or facts.lists or len(facts.returns) != len(decision.results) or None in decision.results:
            return None
        return tuple((maker(cls, layout), layout) for layout in decision.results if layout is not None) or None


class Exact:
    """The local call of an operator through which partial values pass, where a number among its arguments lets them.

    Infinity times a sum is not the sum of infinities, nor is a sum divided by 0: with such a number the operator runs on whole
    tensors. Numbers are no part of a key, so they are looked at here; so are replicated tensors without dims, on hosts.
    """

    __slots__ = ("call", "divisor", "known", "layouts", "places", "spread")

    def __init__(self, known: Known, given: Arguments, row: Rule | None) -> None:
        facts, self.known, self.call = known.signature, known, known.call
        self.divisor = None if row is None or row.divisor is None else facts.names.index(row.divisor)
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
            given[at] = move(given[at], layout, layout.replicated(), self.known.signature.name)
        named = {name: given[name] for name in kwargs}
        out = self.call(*(given[position] for position in range(len(args))), **named)
        results = [layout for layout in self.known.decision.results if layout is not None]
        placed = [move(x, to.replicated(), to) for x, to in zip(out if len(results) > 1 else (out,), results, strict=True)]
        if self.known.signature.in_place:
            return transport(self.known.mesh).each(_write, self.known.mesh, target, placed[0])
        return tuple(placed) if len(results) > 1 else placed[0]


def _passes_by_number(known: Known, given: Arguments) -> bool:
    """Whether something is partial in a call that has a number, or a tensor without dims, among its arguments."""
    decision = known.decision
    if decision.program or decision.kernel or decision.copy_back or known.per_rank:
        return False
    values = (*given.positional, *given.named.values())
    numbers = any(type(v) in (int, float, complex) or (isinstance(v, Tensor) and not v.ndim) for v in values)
    return numbers and any(layout is not None and layout.partials for layout in (*given.layouts, *decision.results))


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
    operator = _operator(func)
    if operator.zipped and is_mixed(cls, args):
        return apart(Toolbox(cls), func, args, kwargs)
    if operator.reshapes and not operator.knows_plain:
        return _reshape_in_place(cls, func, args, kwargs)
    given = Arguments(cls, operator, args, kwargs)
    if operator.signature.written and not operator.knows_plain and writes_plain(cls, operator.signature, args, kwargs):
        given.key.append(WRITES_PLAIN)
    if _has_symbols(given.key):
        return _symbolic(cls, func, args, kwargs, given)
    key = tuple(given.key)
    by_default = (*key, torch.get_default_dtype())
    known = _known.get(key) or _known.get(by_default)
    if known is None:
        decision = _checked(func, given)
        known = Known(cls, decision, func, given.layouts[0].mesh, len(args))
        if known.makers is not None and decision.call is None:
            known.call = quickest(func, given)
        if _passes_by_number(known, given):
            known.call = Exact(known, given, find(func))
        known = _decisions.put(by_default if _takes_default_dtype(decision, given.layouts) else key, known)
    else:
        _decisions.hits += 1
    try:
        return _run(cls, func, args, kwargs, known, given)
    except Exception as error:
        if _is_internal(error):
            ask_torch(func, operator.signature, Arguments(cls, operator, args, kwargs))  # it says best what is wrong
        raise


def _checked(func: Any, given: Arguments) -> Decision:
    """What is decided for a call; what torch refuses is refused. The operator itself refuses what it does not take, so torch is
    asked only where something else runs in its place, which may take more, or where there is nothing that it could refuse."""
    facts = signature(func)
    try:
        decision = _decide(func, facts, given)
    except Exception as error:
        if _is_internal(error):
            ask_torch(func, facts, given)
        raise
    of_floats = all(layout.dtype.is_floating_point for layout in given.layouts)
    if decision.program is decompose or (decision.program and of_floats) or any(0 in layout.shape for layout in given.layouts):
        ask_torch(func, facts, given)
    elif (decision.program or decision.kernel) and not of_floats:
        ask_torch(func, facts, given, NotImplementedError)
    return decision


def _is_internal(error: Exception) -> bool:
    """Whether an error may come of arguments that do not fit, and not say so: our own do, but for layouts that differ."""
    return isinstance(error, LayoutError) or not isinstance(error, ShardwiseError | Warning)


def _symbolic(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments) -> Any:
    """The same in a program that is traced for all sizes. Nothing is kept; where a rule needs a size to be a number, it is
    settled to the one at hand, and the program holds for that one only."""
    try:
        decision = _decide(func, signature(func), given)
        sizes = [size for holder, at in given.places for size in holder[at].shape]
        edits = {name: _rebuilt(value, sizes) for name, value in decision.edits.items()}
        decision = replace(decision, edits=edits)
        known = Known(cls, decision, func, given.layouts[0].mesh, len(args))
        if _passes_by_number(known, given):
            known.call = Exact(known, given, find(func))
        return _run(cls, func, args, kwargs, known, given)
    except (TypeError, NotImplementedError):
        return dispatch(cls, func, (), _settled(args), _settled(kwargs))


def _rebuilt(value: Any, sizes: list[Any]) -> Any:
    return [rebuilt(item, sizes) for item in value] if isinstance(value, list | tuple) else rebuilt(value, sizes)


def _has_symbols(key: Sequence[Any]) -> bool:
    return any(isinstance(part, SymbolicLayout | SymInt) or (type(part) is tuple and _has_symbols(part)) for part in key)


def _settled(value: Any) -> Any:
    """The value (through lists, tuples and dictionaries) with numbers for symbols, also in the shapes of tensors."""
    if isinstance(value, dict):
        return {name: _settled(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_settled, value))
    if isinstance(value, Tensor):
        if isinstance(layout := getattr(value, "_layout", None), SymbolicLayout):
            value._layout = layout.specialised()  # type: ignore[attr-defined]
        _settled((*value.shape, *value.stride()))
    return int(value) if isinstance(value, SymInt) else value


def _takes_default_dtype(decision: Decision, layouts: list[Layout]) -> bool:
    """Whether a result is floating though no tensor is: then its dtype is torch's default one, which may change."""
    floats = any(layout.dtype.is_floating_point or layout.dtype.is_complex for layout in layouts)
    return not floats and any(layout is not None and layout.dtype.is_floating_point for layout in decision.results)


def _reshape_in_place(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that changes its argument's shape in place: the view takes the place of the tensor, and torch, told not to
    dispatch, changes the sizes that the wrapper itself shows."""
    form = functional_form(func)
    if form is None:
        raise OperatorError(f"{signature(func).name} changes the shape of {args[0]!r} in place; this is not supported")
    out = form(*args, **kwargs)
    with no_dispatch():
        func(*args, **kwargs)
    args[0]._local, args[0]._layout = out._local, out._layout
    return args[0]


def _decide(func: Any, facts: Signature, given: Arguments) -> Decision:
    if dispatch_modes():
        with no_modes():
            return _decide(func, facts, given)
    row = find(func)
    if facts.outs and (form := functional_form(func)) is not None:
        check_outs(func, form, facts, given)
    if row is None or given.key[-1] is WRITES_PLAIN:
        return Decision(program=choose(func, facts))
    borrowed = _is_borrowed(func, row)
    if row.program is not None and not row.inputs and row.function is None:
        return Decision(copy_back=True) if borrowed else Decision(program=row.program)
    if facts.outs or (facts.written and not facts.in_place and (row.function is None or borrowed)):
        return Decision(program=choose(func, facts))
    call = bind(func, facts, given)
    return decide(row, call)


def _is_borrowed(func: Any, row: Rule) -> bool:
    """Whether the row of an operator that writes is that of its functional form."""
    form = functional_form(func) if signature(func).written else None
    return form is not None and find(form) is row


def _own_program(func: Any, row: Rule | None) -> Any:
    """The program that runs in place of this very operator, whatever its arguments are."""
    if row is None or row.inputs or row.function is not None or _is_borrowed(func, row):
        return None
    return row.program


def carry_out(cls: Any, func: Any, args: Any, kwargs: Any, choose_for: Callable[[Call], Decision]) -> Any:
    """Run an operator as another than `decide` decides, and keep nothing of it."""
    given = Arguments(cls, _operator(func), args, kwargs)
    decision = choose_for(bind(func, signature(func), given))
    return _run(cls, func, args, kwargs, Known(cls, decision, func, given.layouts[0].mesh, len(args)), given)


def _run(cls: Any, func: Any, args: Any, kwargs: Any, known: Known, given: Arguments) -> Any:
    """Carry out a decision."""
    decision, facts = known.decision, known.signature
    if facts.written:
        _check_writes(cls, facts, args, kwargs)
    if decision.program is not None:
        if not facts.written and not _operator(func).knows_plain:
            args, kwargs = _distributed(known, args), {name: _distributed(known, value) for name, value in kwargs.items()}
        return decision.program(known.tools, func, *args, **kwargs)
    if decision.copy_back:
        return functional(Toolbox(cls), func, *args, **kwargs)
    if decision.moves:
        check_moves(decision.moves, given.layouts, facts.name)
    for index, have, want in decision.moves:
        holder, at = given.places[index]
        holder[at] = run(holder[at], plan(have, want), facts.name, have.shape)
    for position, value in known.edits:
        if position < len(given.positional):
            given.positional[position] = value
        else:
            given.named[known.signature.names[position]] = value
    try:
        local = _locally(_call, known, given)
    except LocalCopy:
        local = _locally(_call_or_copy, known, given)
        return sever(wrap(cls, local, cast(Layout, decision.results[0])), func, args, kwargs, 0)
    except Exception as error:
        _report(error, known, given.layouts)
        raise
    return _results(cls, func, local, known, args, kwargs)


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
        transport(known.mesh).report(error, known.mesh, known.signature.name)


def _locally(call: Callable[..., Any], known: Known, given: Arguments) -> Any:
    """What the ranks find, each by itself where they differ in more than their tensors."""
    decision = known.decision
    body = decision.kernel or known.call
    if decision.kernel is None and not known.per_rank:
        return call(body, given.positional, given.named)
    world = transport(known.mesh)
    extra = [world.number(item, known.mesh) if isinstance(item, Number) else item for item in decision.extra]
    local = world.each(call, known.mesh, body, [*given.positional, *extra], given.named)
    if known.signature.in_place:
        world.each(_write, known.mesh, given.positional[0], local)
    return local


def _check_writes(cls: Any, facts: Signature, args: Any, kwargs: Any) -> None:
    for name, value in by_name(facts, args, kwargs):
        for item in value if isinstance(value, list | tuple) else (value,):
            if name in facts.written and isinstance(item, cls) and item.severed:
                _refuse_write(facts, item)


def _refuse_write(facts: Signature, x: Any) -> None:
    raise OperatorError(
        f"{facts.name} writes to {x._layout}, a view that data had to move for, so the write would not reach the tensor it "
        "is a view of; redistribute that tensor first, clone the view, or assign (x[i] = x[i] + 1 in place of x[i] += 1)"
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


def _results(cls: Any, func: Any, local: Any, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    facts = known.signature
    if facts.in_place:
        return args[0] if facts.returns else None
    if facts.written:
        given = dict(by_name(facts, args, kwargs))
        outs = [given[name] for name in facts.returns if name is not None]
        return outs[0] if len(outs) == 1 else tuple(outs) if outs else None

    def wrapped(value: Tensor, index: int, layout: Layout) -> Any:
        out = wrap(cls, value, layout)
        return sever(out, func, args, kwargs, index) if severs else out

    severs = known.severs or (facts.view and args[0].severed)
    return _each(wrapped, local, iter(enumerate(known.decision.results)))


def _each(wrapped: Callable[..., Any], value: Any, layouts: Iterator[Any]) -> Any:
    """Wrap the tensors in a result. No function inside another: one that calls itself keeps all that it knows alive, tensors
    among them, until the garbage is collected."""
    if isinstance(value, Tensor):
        index, layout = next(layouts)
        return value if layout is None else wrapped(value, index, layout)
    return type(value)(_each(wrapped, item, layouts) for item in value) if isinstance(value, list | tuple) else value
