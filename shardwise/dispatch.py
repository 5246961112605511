"""What happens to one operator: key → decision → moves → local call → wrapped results. No operator is named here.

On a known call the path is one tuple, one look-up, the local operator and one wrapper. All else is in `_general`.
`cls` is the tensor subclass; its instances carry `_local` and `_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._torch import make_wrapper, no_dispatch, quick_call, raw_call
from .comm import door
from .decide import Decision, decide
from .errors import MeshError, OperatorError
from .fallback import apart, choose, functional, functional_form, is_mixed, on_plain, writes_plain
from .layout import Layout, Number, PerRank, contiguous_stride, make_layout
from .memo import new_cache
from .mesh import Mesh
from .placement import Replicate
from .plan import plan
from .redistribute import check_moves, move, run
from .rules.notation import Call, Result
from .rules.table import find
from .signature import Signature, signature

_decisions = new_cache("decisions", limit=8192)
_known = _decisions.entries
_quick_calls = new_cache("calls", limit=4096)
_WHOLE = frozenset((int, bool))
_PLAIN = frozenset((int, bool, type(None), str, float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format))


def wrap(cls: Any, local: Tensor, layout: Layout) -> Any:
    """A DTensor around a local value."""
    self = make_wrapper(cls, layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    self._local, self._layout = local, layout
    return self


class Operator:
    """An operator overload as dispatch sees it. Its place in a key is cheaper to hash than the overload's own."""

    __slots__ = ("by_type", "free", "func", "reshapes", "signature", "zipped")

    def __init__(self, func: Any) -> None:
        self.func, self.signature = func, signature(func)
        self.free = self.signature.free
        self.by_type = tuple(position in self.free for position in range(len(self.signature.names)))
        self.reshapes = torch.Tag.inplace_view in func.tags
        row = find(func)
        self.zipped = row is not None and row.zipped


_operators: dict[int, Operator] = {}


def _operator(func: Any) -> Operator:
    found = _operators.get(id(func))  # the record keeps the overload alive, so its id stays its own
    if found is None:
        found = _operators[id(func)] = Operator(func)
    return found


def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operator on DTensors (and what stands beside them)."""
    operator = _operators.get(id(func)) or _operator(func)
    by_type = operator.by_type
    key, values, position = [operator], [], -1
    for arg in args:
        position += 1
        kind = type(arg)
        if kind is cls:
            key.append(arg._layout)
            values.append(arg._local)
            continue
        values.append(arg)
        if arg is None:
            key.append(None)
        elif kind in _PLAIN:
            key.append(kind if by_type[position] else arg)
        elif kind is list and arg and type(arg[0]) in _WHOLE:
            key.append(tuple(arg))
        else:
            return _general(cls, func, args, kwargs or {})
    if kwargs:
        for name, arg in kwargs.items():
            if type(arg) not in _PLAIN:
                return _general(cls, func, args, kwargs)
            key.append(name)
            key.append(type(arg) if name in operator.free and arg is not None else arg)
    known = _known.get(tuple(key))
    if known is None or known.makers is None:
        return _general(cls, func, args, kwargs or {})
    _decisions.hits += 1
    for position, value in known.edits:
        values[position] = value
    local = known.call(*values, **kwargs) if kwargs else known.call(*values)
    make = known.maker
    if make is not None:
        self = make()
        self._local, self._layout = local, known.layout
        if known.view and args[0].severed:
            self.severed = True
        return self
    if not known.makers:
        return args[0] if not args[0].severed else _refuse_write(known.signature, args[0])
    outs = []
    for (make, layout), piece in zip(known.makers, local):  # noqa: B905  `strict` costs as much as an attribute of a wrapper
        self = make()
        self._local, self._layout = piece, layout
        outs.append(self)
    return tuple(outs)


class Known:
    """A decision, prepared for running.

    `makers` tells how `dispatch` may run it by itself: a constructor and a layout for each new tensor, none where the first
    argument is written to and given back; None: `_run` has to. `maker` and `layout` are those of a single result.
    """

    __slots__ = ("call", "decision", "edits", "layout", "maker", "makers", "mesh", "per_rank", "signature", "view")

    def __init__(self, cls: Any, decision: Decision, func: Any, mesh: Mesh, positional: int) -> None:
        facts = signature(func)
        self.decision, self.signature, self.mesh = decision, facts, mesh
        self.call = decision.call or raw_call(func)
        self.view = facts.view
        self.edits = tuple((facts.names.index(name), value) for name, value in decision.edits.items())
        self.per_rank = any(isinstance(value, PerRank) for value in decision.edits.values())
        self.makers = self._makers(cls, positional)
        self.maker, self.layout = self.makers[0] if self.makers and len(self.makers) == 1 else (None, None)

    def _makers(self, cls: Any, positional: int) -> tuple[tuple[Any, Layout], ...] | None:
        decision, facts = self.decision, self.signature
        if self.per_rank or not decision.simple or not all(position < positional for position, _ in self.edits):
            return None
        if facts.in_place and facts.returns:
            return ()
        if facts.written or facts.lists or len(facts.returns) != len(decision.results) or None in decision.results:
            return None
        return tuple((_maker(cls, layout), layout) for layout in decision.results if layout is not None) or None


def _maker(cls: Any, layout: Layout) -> Any:
    """Makes a wrapper that shows the sizes of a layout; quicker where torch may work the strides out."""
    strides = {} if layout.stride == contiguous_stride(layout.shape) else {"strides": layout.stride}
    return partial(make_wrapper, cls, layout.shape, **strides, dtype=layout.dtype, device=layout.device)


class _Arguments:
    """The arguments of one call with locals in the place of tensors, and where each tensor stands."""

    __slots__ = ("key", "layouts", "named", "places", "positional", "tensors")

    def __init__(self, cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.key: list[Any] = [_operator(func)]
        self.layouts: list[Layout] = []
        self.tensors: list[Any] = []
        self.places: list[tuple[Any, Any]] = []
        self.positional: list[Any] = list(args)
        self.named: dict[str, Any] = dict(kwargs)
        free = signature(func).free
        mesh = _mesh(cls, func, args, kwargs)
        for position, arg in enumerate(args):
            self._add(cls, self.positional, position, arg, position in free, mesh)
        for name, arg in kwargs.items():
            self.key.append(name)
            self._add(cls, self.named, name, arg, name in free, mesh)

    def _add(self, cls: Any, holder: Any, at: Any, arg: Any, free: bool, mesh: Mesh) -> None:
        if isinstance(arg, Tensor):
            local, layout = _local_on(cls, arg, mesh)
            holder[at] = local
            self.places.append((holder, at))
            self.tensors.append(arg)
            self.layouts.append(layout)
            self.key.append(layout)
        elif isinstance(arg, list | tuple) and arg and type(arg[0]) in _WHOLE:
            self.key.append(tuple(arg))
        elif isinstance(arg, list | tuple):
            inner = holder[at] = list(arg)
            self.key.append(len(inner))
            for i, item in enumerate(arg):
                self._add(cls, inner, i, item, free, mesh)
        else:
            self.key.append(type(arg) if free and arg is not None else arg)


def _mesh(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mesh:
    """The mesh an operator runs on: that of its DTensors; if they are on sub-meshes of one mesh, the smallest around them;
    for an operator that writes, that of what it writes to."""
    facts = signature(func)
    found: dict[Mesh, Layout] = {}
    written: Mesh | None = None
    for name, value in _named(facts, args, kwargs):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, cls):
                found.setdefault(item._layout.mesh, item._layout)
                written = written or (item._layout.mesh if name in facts.written else None)
    meshes = list(found)
    if len(meshes) == 1:
        return meshes[0]
    if len({mesh.root for mesh in meshes}) > 1:
        shown = ", ".join(f"{layout} on {mesh}" for mesh, layout in found.items())
        raise MeshError(f"{facts.name}: its tensors are on different meshes: {shown}; put them on one mesh first")
    root = meshes[0].root
    return written or root[root.sorted_axes(axis for mesh in meshes for axis in mesh.axes)]


def _named(facts: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*zip(facts.names, args, strict=False), *kwargs.items()]


def _local_on(cls: Any, tensor: Any, mesh: Mesh) -> tuple[Tensor, Layout]:
    """A tensor's local value and layout on a mesh; a plain tensor is taken as replicated."""
    if not isinstance(tensor, cls):
        layout = make_layout(tensor.shape, mesh, [Replicate()] * mesh.ndim, tensor.dtype, tensor.stride())
        return door(mesh).replicate(tensor, mesh), layout
    layout = tensor._layout
    if layout.mesh is mesh:
        return tensor._local, layout
    inside = layout.without(axis for axis in layout.mesh.axes if axis not in mesh.axes)
    return move(tensor._local, layout, inside), inside.replace(mesh=mesh)


def _general(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same as `dispatch` for any arguments: plain tensors, lists, several meshes, first calls."""
    operator = _operator(func)
    if operator.zipped and is_mixed(cls, args):
        return apart(Tools(cls), func, args, kwargs)
    if operator.reshapes:
        return _reshape_in_place(cls, func, args, kwargs)
    if operator.signature.written and writes_plain(cls, func, args, kwargs):
        return on_plain(Tools(cls), func, args, kwargs)
    given = _Arguments(cls, func, args, kwargs)
    key = tuple(given.key)
    known = _known.get(key)
    if known is None:
        decision = _decide(func, signature(func), given)
        known = Known(cls, decision, func, given.layouts[0].mesh, len(args))
        if known.makers is not None and decision.call is None:
            known.call = _quick(func, given)
        _decisions.put(key, known)
    else:
        _decisions.hits += 1
    return _run(cls, func, args, kwargs, known, given)


def _quick(func: Any, given: _Arguments) -> Any:
    """The quickest call of an operator for arguments of these kinds, found once for all layouts of as many dims."""
    layouts = iter(given.layouts)
    places = {(id(holder), at): next(layouts) for holder, at in given.places}
    args = [places.get((id(given.positional), i), value) for i, value in enumerate(given.positional)]
    named = {name: places.get((id(given.named), name), value) for name, value in given.named.items()}
    kinds = (func, *(_kind(value) for value in (*args, *named.values())), *named)
    found = _quick_calls.entries.get(kinds)
    if found is None:
        meta = {name: _without_data(value) for name, value in named.items()}
        found = quick_call(func, [_without_data(value) for value in args], meta)
        _quick_calls.put(kinds, found)
    return found


def _kind(value: Any) -> Any:
    return (value.ndim, value.dtype) if isinstance(value, Layout) else type(value)


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


def _decide(func: Any, facts: Signature, given: _Arguments) -> Decision:
    row = find(func)
    if row is None:
        return Decision(program=choose(func, facts))
    form = functional_form(func) if facts.written else None
    borrowed = form is not None and find(form) is row
    if row.program is not None and not row.inputs and row.function is None:
        return Decision(copy_back=True) if borrowed else Decision(program=row.program)
    if facts.written and not facts.in_place and (row.function is None or borrowed):
        return Decision(program=choose(func, facts))
    call = bind(func, facts, given)
    return decide(row, call)


def bind(func: Any, facts: Signature, given: _Arguments) -> Call:
    """The call with its arguments by name and layouts in the place of tensors, and what it gives on one device."""
    layouts = iter(given.layouts)
    by_place = {(id(holder), at): next(layouts) for holder, at in given.places}

    def shown(holder: Any, at: Any) -> Any:
        value = holder[at]
        if isinstance(value, list):
            return tuple(shown(value, i) for i in range(len(value)))
        return by_place.get((id(holder), at), value)

    arguments = dict(facts.defaults)
    for position in range(len(given.positional)):
        arguments[facts.names[position]] = shown(given.positional, position)
    for name in given.named:
        arguments[name] = shown(given.named, name)
    arguments = {name: arguments.get(name) for name in facts.names}
    order = {place: i for i, place in enumerate(by_place)}
    slots = tuple(_slot(facts, name, given, order) for name in facts.tensors)
    written = slots[0] if facts.in_place else None
    results = _on_one_device(func, arguments) if facts.returns else ()
    return Call(func, facts.name, arguments, tuple(given.layouts), slots, results, facts.tensors, written)


def _slot(facts: Signature, name: str, given: _Arguments, order: Mapping[tuple[int, Any], int]) -> int | None:
    position = facts.names.index(name)
    place = (id(given.named), name) if name in given.named else (id(given.positional), position)
    return order.get(place)


def _on_one_device(func: Any, arguments: dict[str, Any]) -> tuple[Result, ...]:
    """Shapes, strides and dtypes of the results, from running the operator on tensors without data: also raises what the
    operator raises on one device, alike on every rank."""
    try:
        outs = func(**{name: _without_data(value) for name, value in arguments.items()})
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape in func.tags:
            return ()  # shapes depend on values: a rule can only answer with a program
        tensors = [v for a in arguments.values() for v in (a if isinstance(a, tuple) else (a,)) if isinstance(v, Layout)]
        error.add_note(f"in {signature(func).name} on {', '.join(map(repr, tensors))}")
        raise
    several = outs if isinstance(outs, list | tuple) else (outs,)
    flat = [t for out in several for t in (out if isinstance(out, list | tuple) else (out,))]
    return tuple(Result(tuple(t.shape), t.stride(), t.dtype) for t in flat if isinstance(t, Tensor))


def _without_data(value: Any) -> Any:
    if isinstance(value, Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_without_data(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _run(cls: Any, func: Any, args: Any, kwargs: Any, known: Known, given: _Arguments) -> Any:
    """Carry out a decision."""
    decision, facts = known.decision, known.signature
    if facts.written:
        _check_writes(cls, facts, args, kwargs)
    if decision.program is not None:
        return decision.program(Tools(cls, known.signature.name), func, *args, **kwargs)
    if decision.copy_back:
        return functional(Tools(cls), func, *args, **kwargs)
    if decision.moves:
        check_moves(decision.moves, given.layouts, facts.name)
    for index, have, want in decision.moves:
        holder, at = given.places[index]
        holder[at] = run(holder[at], plan(have, want), facts.name)
    for position, value in known.edits:
        if position < len(given.positional):
            given.positional[position] = value
        else:
            given.named[known.signature.names[position]] = value
    body = decision.kernel or known.call
    if decision.kernel is not None or known.per_rank:
        world = door(known.mesh)
        extra = [world.number(item, known.mesh) if isinstance(item, Number) else item for item in decision.extra]
        local = world.each(_call, known.mesh, body, [*given.positional, *extra], given.named)
    else:
        local = body(*given.positional, **given.named)
    return _results(cls, local, known, args, kwargs)


def _check_writes(cls: Any, facts: Signature, args: Any, kwargs: Any) -> None:
    for name, value in _named(facts, args, kwargs):
        for item in value if isinstance(value, list | tuple) else (value,):
            if name in facts.written and isinstance(item, cls) and item.severed:
                _refuse_write(facts, item)


def _refuse_write(facts: Signature, x: Any) -> None:
    raise OperatorError(
        f"{facts.name} writes to {x._layout}, a view that data had to move for, so the write would not reach the tensor it is a "
        "view of; redistribute that tensor first, or clone the view"
    )


def _call(kernel: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return kernel(*args, **kwargs)


def _results(cls: Any, local: Any, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    facts = known.signature
    if facts.in_place:
        return args[0] if facts.returns else None
    layouts = iter(known.decision.results)

    def wrapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = next(layouts)
            if layout is None:
                return value
            out = wrap(cls, value, layout)
            if known.view and (known.decision.moves or args[0].severed):
                out.severed = True
            return out
        return type(value)(wrapped(item) for item in value) if isinstance(value, list | tuple) else value

    if facts.written:
        given = dict(_named(facts, args, kwargs))
        outs = [given[name] for name in facts.returns if name is not None]
        return outs[0] if len(outs) == 1 else tuple(outs) if outs else None
    return wrapped(local)


class Tools:
    """What a program, which runs on DTensors in place of one operator, may use beside ordinary torch operators."""

    __slots__ = ("cls", "operator")

    def __init__(self, cls: Any, operator: str = "") -> None:
        self.cls, self.operator = cls, operator

    def is_distributed(self, value: Any) -> bool:
        """Whether a value is a DTensor."""
        return isinstance(value, self.cls)

    def layout(self, x: Any) -> Layout:
        """The layout of a DTensor."""
        found: Layout = x._layout
        return found

    def local(self, x: Any) -> Tensor:
        """The local value of a DTensor."""
        found: Tensor = x._local
        return found

    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """A DTensor around a local value."""
        return wrap(self.cls, local, layout)

    def move(self, x: Any, layout: Layout, operator: str = "") -> Any:
        """The same tensor in another layout."""
        return wrap(self.cls, move(x._local, x._layout, layout, operator or self.operator), layout)

    def distribute(self, tensor: Tensor, layout: Layout) -> Any:
        """A plain tensor, equal on every rank, in a layout."""
        world, whole = door(layout.mesh), layout.replicated()
        local = world.replicate(tensor, layout.mesh)
        if layout is whole:
            local = world.each(torch.clone, layout.mesh, local)  # ranks of one process must not share what they write to
        return wrap(self.cls, move(local, whole, layout), layout)

    def replicated(self, x: Any, mesh: Mesh, operator: str = "") -> Any:
        """A DTensor, or a plain tensor, whole on every rank."""
        local, layout = _local_on(self.cls, x, mesh)
        return wrap(self.cls, move(local, layout, layout.replicated(), operator), layout.replicated())

    def plain(self, x: Any, operator: str = "") -> Tensor:
        """The whole value as an ordinary tensor, on every rank."""
        layout = x._layout
        return door(layout.mesh).plain(move(x._local, layout, layout.replicated(), operator))

    def each(self, kernel: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """A function of local tensors on every rank; DTensors among the arguments give their locals."""
        locals_ = [a._local if isinstance(a, self.cls) else a for a in args]
        return door(mesh).each(kernel, mesh, *locals_)

    def offset(self, layout: Layout, dim: int) -> Tensor:
        """The first global index of a dim on each rank, as a local 0-d tensor."""
        return door(layout.mesh).number(PerRank(lambda place: layout.offset(place)[dim]), layout.mesh)

    def mesh(self, *values: Any) -> Mesh:
        """The mesh of the first DTensor among some arguments (lists included)."""
        for value in values:
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, self.cls):
                    found: Mesh = item._layout.mesh
                    return found
        raise OperatorError("an operator without a DTensor reached Shardwise; this is a fault of Shardwise")
