"""The arguments of one call: locals in the place of tensors, a key, and the `Call` that a rule reads."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch.tensors import dispatch_modes, format_like, no_modes, probe, quick_call, runs_on_hosts
from ..base.caches import new_cache
from ..comm import transport
from ..comm.host_collectives import is_eager
from ..comm.watch.debug import compares, digest
from ..errors import MeshError
from ..layouts.layout import Layout, contiguous_stride
from ..layouts.mesh import Mesh
from ..propagation.notation import Call, Result
from ..propagation.table import find
from .schema import Signature, signature
from .wrapping import local_on

#: Lists of these enter a key whole.
WHOLE = frozenset((int, bool, SymInt))
_CONVOLUTIONS = frozenset((torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default))
_quick_calls = new_cache("calls", limit=4096)


class Arguments:
    """The arguments of one call with locals in the place of tensors, and where each tensor stands."""

    __slots__ = ("key", "layouts", "named", "places", "positional")

    def __init__(self, cls: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.key: list[Any] = [operator]
        self.layouts: list[Layout] = []
        self.places: list[tuple[Any, Any]] = []
        self.positional: list[Any] = list(args)
        self.named: dict[str, Any] = dict(kwargs)
        free = operator.free
        mesh = _mesh(cls, operator.signature, args, kwargs)
        for position, arg in enumerate(args):
            self._add(cls, self.positional, position, arg, position in free, mesh)
        for name, arg in kwargs.items():
            self.key.append(name)
            self._add(cls, self.named, name, arg, name in free, mesh)
        if compares(mesh):
            _compare_plain(cls, operator.signature, mesh, by_name(operator.signature, args, kwargs))

    def _add(self, cls: Any, holder: Any, at: Any, arg: Any, free: bool, mesh: Mesh) -> None:
        if isinstance(arg, Tensor):
            local, layout = local_on(cls, arg, mesh)
            holder[at] = local
            self.places.append((holder, at))
            self.layouts.append(layout)
            self.key.append(layout)
        elif isinstance(arg, list | tuple) and arg and type(arg[0]) in WHOLE:
            self.key.append(tuple(arg))
        elif isinstance(arg, list | tuple):
            inner = holder[at] = list(arg)
            self.key.append(len(inner))
            for i, item in enumerate(arg):
                self._add(cls, inner, i, item, free, mesh)
        else:
            self.key.append(type(arg) if free and arg is not None else arg)


def _mesh(cls: Any, facts: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mesh:
    """The mesh an operator runs on: that of its DTensors; if they are on sub-meshes of one mesh, the smallest around them;
    for an operator that writes, that of what it writes to."""
    found: dict[Mesh, Layout] = {}
    written: Mesh | None = None
    for name, value in by_name(facts, args, kwargs):
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


def by_name(facts: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The given arguments with their names."""
    return [*zip(facts.names, args, strict=False), *kwargs.items()]


def _compare_plain(cls: Any, facts: Signature, mesh: Mesh, given: list[tuple[str, Any]]) -> None:
    """Have the ranks compare the values of plain tensors, which are taken for the same on all."""
    world = transport(mesh, facts.name)
    for name, value in given:
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, Tensor) and not isinstance(x, cls) and is_eager(x):
                world.agree(f"plain tensor {name!r} {digest(x)}", mesh, False)


def layouts_shown(given: Arguments) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with layouts in the place of tensors, lists as tuples."""
    layouts = iter(given.layouts)
    places = {(id(holder), at): next(layouts) for holder, at in given.places}
    positional = [_shown(places, given.positional, i) for i in range(len(given.positional))]
    return positional, {name: _shown(places, given.named, name) for name in given.named}


def _shown(places: dict[Any, Any], holder: Any, at: Any) -> Any:
    value = holder[at]
    if isinstance(value, list):
        return tuple(_shown(places, value, i) for i in range(len(value)))
    return places.get((id(holder), at), value)


def bind(func: Any, facts: Signature, given: Arguments) -> Call:
    """The call with its arguments by name and layouts in the place of tensors, and what it gives on one device."""
    positional, named = layouts_shown(given)
    shown = {**facts.defaults, **dict(zip(facts.names, positional, strict=False)), **named}
    arguments = {name: shown.get(name) for name in facts.names}
    order = {(id(holder), at): i for i, (holder, at) in enumerate(given.places)}
    slots = tuple(_slot(facts, name, given, order) for name in facts.tensors)
    written = slots[0] if facts.in_place else None
    row = find(func)
    if row is not None and row.gives is not None:
        results = tuple(Result(tuple(shape), contiguous_stride(shape), dtype) for shape, dtype in row.gives(arguments))
    else:
        results = _on_one_device(func, arguments) if facts.returns else ()
    return Call(func, facts.name, arguments, tuple(given.layouts), slots, results, facts.tensors, written)


def _slot(facts: Signature, name: str, given: Arguments, order: dict[tuple[int, Any], int]) -> int | None:
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
    if func in _CONVOLUTIONS:
        flat = _as_convolved(flat, arguments["input"], arguments["weight"])
    return tuple(Result(tuple(t.shape), t.stride(), t.dtype) for t in flat if isinstance(t, Tensor))


def _as_convolved(outs: list[Any], x: Layout, weight: Layout) -> list[Any]:
    """Results of a convolution in the memory format that its kernels give them: channels_last if the input or the weight are.
    Kernels for tensors without data have another rule."""
    formats = {format_like(_without_data(layout)) for layout in (x, weight)} - {torch.contiguous_format}
    dims = len(x.shape)
    if x.dtype is torch.float64 and (x.mesh.device != "cpu" or dims > 4):  # kernels of which want it contiguous
        formats = set()
    chosen = next(iter(formats), torch.contiguous_format)
    has_format = [isinstance(out, Tensor) and out.ndim == dims for out in outs]
    return [
        torch.empty(out.shape, dtype=out.dtype, device="meta", memory_format=chosen) if has else out
        for out, has in zip(outs, has_format, strict=True)
    ]


def check_outs(func: Any, form: Any, facts: Signature, given: Arguments) -> None:
    """Raise what an operator raises on one device because of the dtypes of its `out=` arguments alone."""
    positional, named = layouts_shown(given)
    shown = {**dict(zip(facts.names, positional, strict=False)), **named}
    inputs = {name: _without_data(value) for name, value in shown.items() if name not in facts.outs}
    try:
        func(**inputs, **{name: _empty(shown[name]) for name in facts.outs})
    except Exception as error:
        if not _writes_results(func, form, facts, inputs):
            return
        error.add_note(f"in {facts.name}, which writes to {', '.join(repr(shown[name]) for name in facts.outs)}")
        raise


def _writes_results(func: Any, form: Any, facts: Signature, inputs: dict[str, Any]) -> bool:
    """Whether an operator takes tensors without data, with `out=` of the dtypes that its functional form gives."""
    try:
        found = form(**inputs)
        natural = found if len(signature(form).returns) > 1 else (found,)
        func(**inputs, **{name: _empty(out) for name, out in zip(facts.outs, natural, strict=False)})
    except Exception:
        return False
    return True


def _empty(out: Any) -> Any:
    """An `out=` of a dtype, that takes any shape."""
    return [_empty(item) for item in out] if isinstance(out, list | tuple) else torch.empty(0, dtype=out.dtype, device="meta")


def _without_data(value: Any) -> Any:
    if isinstance(value, Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_without_data(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


# ── what torch itself says ────────────────────────────────────────────────────────────────────────────────────────────

#: dtypes of masks.
MASKS = {torch.bool, torch.uint8}
#: Elements, of all tensors together, up to which torch's own operator is asked about a call.
ASKED = 2**16


def ask_torch(func: Any, facts: Signature, given: Arguments, kind: type[Exception] = Exception) -> None:
    """Raise what torch's operator raises on one device for tensors of these shapes and dtypes, whatever is in them, unless they
    are too large to find out. (On tensors without data, `_on_one_device`, it takes more than its kernels do.)"""
    if dispatch_modes():
        with no_modes():
            return ask_torch(func, facts, given, kind)
    dtypes = {layout.dtype for layout in given.layouts}
    sizes = [math.prod(layout.shape) for layout in given.layouts if type(layout) is Layout]
    here = all(layout.device.type == "cpu" for layout in given.layouts)  # kernels of other devices take other dtypes
    known = len(sizes) == len(given.layouts) and sum(sizes) <= ASKED and (here or 0 in sizes)
    if not known or not _checks_its_arguments(func, all(dtype.is_floating_point for dtype in dtypes)):
        return None
    if dtypes & MASKS:  # what fits depends on how much a mask selects
        kind = NotImplementedError
    positional, named = layouts_shown(given)
    arguments = {**dict(zip(facts.names, positional, strict=False)), **named}
    with contextlib.suppress(Exception):  # its kernels raise as well, and tell better why
        if sum(math.prod(result.shape) for result in _on_one_device(func, arguments)) > ASKED:
            return None
    for number in (0, 1):  # an index, or a pivot that counts from one
        try:
            with torch.no_grad():
                func(**{name: _stand_in(value, number) for name, value in arguments.items()})
        except Exception as error:
            other = isinstance(error, Warning) or (isinstance(error, NotImplementedError) and not here)
            if number and isinstance(error, kind) and not other:
                error.add_note(f"in {facts.name} on {', '.join(map(repr, given.layouts))}")
                raise
        else:
            return None
    return None


def _checks_its_arguments(func: Any, of_floats: bool) -> bool:
    """Whether an operator may be given any values: internal ones trust indices and sizes, and some crash."""
    name = func._schema.name.partition("::")[2]
    internal = "backward" in name or name.startswith("native_") or (name.startswith("_") and not of_floats)
    known = func.namespace == "aten" and runs_on_hosts(func)
    return known and torch.Tag.nondeterministic_seeded not in func.tags and not internal


def _stand_in(value: Any, number: int) -> Any:
    """A tensor as a layout says, with values that most operators take: invertible matrices, probabilities, indices."""
    if isinstance(value, tuple):
        return [_stand_in(item, number) for item in value]
    if not isinstance(value, Layout):
        return value
    continuous = value.dtype.is_floating_point or value.dtype.is_complex
    if value.ndim < 2 or not continuous:
        return torch.full(value.shape, 1 if continuous else number, dtype=value.dtype)
    return torch.eye(*value.shape[-2:], dtype=value.dtype).expand(value.shape).clone()


def quickest(func: Any, given: Arguments) -> Any:
    """The quickest call of an operator for arguments of these kinds, found once for all layouts of as many dims."""
    args, named = layouts_shown(given)
    kinds = (func, *(_kind(value) for value in (*args, *named.values())), *named)
    found = _quick_calls.entries.get(kinds)
    if found is None:
        found = quick_call(func, [_probed(value) for value in args], {name: _probed(value) for name, value in named.items()})
        _quick_calls.put(kinds, found)
    return found


def _probed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_probed(item) for item in value]
    return probe(value.shape, value.stride, value.dtype) if isinstance(value, Layout) else value


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_kind, value)))  # a None among tensors is not taken by every binding
    return (value.ndim, value.dtype) if isinstance(value, Layout) else type(value)
