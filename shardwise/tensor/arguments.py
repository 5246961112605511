"""The arguments of one call: locals in the place of tensors, a key, and the `Call` that a rule reads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import SymInt, Tensor

from .._torch.tensors import dispatch_modes, format_like, no_modes, probe, quick_call, raw_call, runs_on_hosts, tree_map_only
from ..base.caches import new_cache
from ..base.schema import Schema, schema_of
from ..comm import transport
from ..comm.host_collectives import is_eager
from ..comm.watch.debug import compares, digest
from ..errors import MeshError
from ..layouts.layout import Layout, SymbolicLayout, contiguous_stride
from ..layouts.mesh import Mesh
from ..propagation.notation import Call, Result
from ..propagation.operator import Operator
from .wrapping import local_on

#: Lists of these enter a key whole.
WHOLE = frozenset((int, bool, SymInt))
_LAYOUTS = (Layout, SymbolicLayout)
_CONVOLUTIONS = frozenset((torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default))
_quick_calls = new_cache("calls", limit=4096)


class Arguments(NamedTuple):
    """The arguments of one call with locals in the place of tensors; the layouts of the tensors, and where each stands.

    `places` are the holder (`positional`, `named`, or a list in one of them) and the index in it of each tensor.
    """

    positional: list[Any]
    named: dict[str, Any]
    layouts: list[Layout]
    places: list[tuple[Any, Any]]


def keyed(cls: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Arguments]:
    """The key of a call, and its arguments."""
    given = Arguments(list(args), dict(kwargs), [], [])
    mesh = _mesh(cls, operator.schema, args, kwargs)
    key: list[Any] = [operator]
    for position in range(len(args)):
        key.append(_part(cls, mesh, given, given.positional, position, position in operator.free))
    for name in kwargs:
        key += [name, _part(cls, mesh, given, given.named, name, name in operator.free)]
    if compares(mesh):
        _compare_plain(cls, operator.schema, mesh, operator.schema.named(args, kwargs))
    return tuple(key), given


def _part(cls: Any, mesh: Mesh, given: Arguments, holder: Any, at: Any, by_type: bool) -> Any:
    """What a key holds of one argument, which becomes a local tensor, or a list of them, if it is one."""
    arg = holder[at]
    if isinstance(arg, Tensor):
        holder[at], layout = local_on(cls, arg, mesh)
        given.places.append((holder, at))
        given.layouts.append(layout)
        return layout
    if isinstance(arg, list | tuple):
        if arg and type(arg[0]) in WHOLE:
            return tuple(arg)
        inner = holder[at] = list(arg)
        return tuple([_part(cls, mesh, given, inner, i, by_type) for i in range(len(inner))])
    return type(arg) if by_type and arg is not None else arg


def _mesh(cls: Any, facts: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mesh:
    """The mesh an operator runs on: that of its DTensors; if they are on sub-meshes of one mesh, the smallest around them;
    for an operator that writes, that of what it writes to."""
    found: dict[Mesh, Layout] = {}
    written: Mesh | None = None
    for name, value in facts.named(args, kwargs).items():
        for item in value if type(value) is list or type(value) is tuple else (value,):
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


def _compare_plain(cls: Any, facts: Schema, mesh: Mesh, given: dict[str, Any]) -> None:
    """Have the ranks compare the values of plain tensors, which are taken for the same on all."""
    world = transport(mesh, facts.name)
    for name, value in given.items():
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, Tensor) and not isinstance(x, cls) and is_eager(x):
                world.agree(f"plain tensor {name!r} {digest(x)}", mesh, False)


def _shown(facts: Schema, given: Arguments) -> dict[str, Any]:
    """The arguments by name with layouts in the place of tensors, lists as tuples."""
    layouts = iter(given.layouts)
    positional = [_with_layouts(value, layouts) for value in given.positional]
    return facts.named(positional, {name: _with_layouts(value, layouts) for name, value in given.named.items()})


def _with_layouts(value: Any, layouts: Iterator[Layout]) -> Any:
    if isinstance(value, Tensor):
        return next(layouts)
    return tuple([_with_layouts(item, layouts) for item in value]) if type(value) is list else value


def bind(operator: Operator, given: Arguments) -> Call:
    """The call with its arguments by name and layouts in the place of tensors, and what it gives on one device."""
    facts, row = operator.schema, operator.row
    arguments = {**dict.fromkeys(facts.names), **facts.defaults, **_shown(facts, given)}
    index = {
        facts.names[at] if holder is given.positional else at: i
        for i, (holder, at) in enumerate(given.places)
        if holder is given.positional or holder is given.named
    }
    slots = tuple([index.get(name) for name in facts.tensors])
    if row is not None and row.gives is not None:
        results = tuple(Result(tuple(shape), contiguous_stride(shape), dtype) for shape, dtype in row.gives(arguments))
    else:
        results = _on_one_device(operator.func, arguments) if facts.returns else ()
    written = slots[0] if facts.in_place else None
    return Call(operator.func, facts.name, arguments, tuple(given.layouts), slots, results, facts.tensors, written)


def _on_one_device(func: Any, arguments: dict[str, Any]) -> tuple[Result, ...]:
    """Shapes, strides and dtypes of the results, from running the operator on tensors without data: also raises what the
    operator raises on one device, alike on every rank."""
    try:
        outs = func(**{name: _without_data(value) for name, value in arguments.items()})
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape in func.tags:
            return ()  # shapes depend on values: a rule can only answer with a program
        tensors = [v for a in arguments.values() for v in (a if isinstance(a, tuple) else (a,)) if isinstance(v, Layout)]
        error.add_note(f"in {schema_of(func).name} on {', '.join(map(repr, tensors))}")
        raise
    several = outs if type(outs) in (list, tuple) else (outs,)
    flat = [t for out in several for t in (out if type(out) in (list, tuple) else (out,))]
    if func in _CONVOLUTIONS:
        flat = _as_convolved(flat, arguments["input"], arguments["weight"])
    return tuple([Result(tuple(t.shape), t.stride(), t.dtype) for t in flat if isinstance(t, Tensor)])


def _as_convolved(outs: list[Any], x: Layout, weight: Layout) -> list[Any]:
    """Results of a convolution in the memory format that its kernels give them: channels_last if the input or the weight are.
    Kernels for tensors without data have another rule."""
    formats = {format_like(_without_data(layout)) for layout in (x, weight)} - {torch.contiguous_format}
    if x.dtype is torch.float64 and (x.mesh.device != "cpu" or x.ndim > 4):  # kernels of which want it contiguous
        formats = set()
    facts: Any = {"device": "meta", "memory_format": next(iter(formats), torch.contiguous_format)}
    has_format = [isinstance(out, Tensor) and out.ndim == x.ndim for out in outs]
    pairs = zip(outs, has_format, strict=True)
    return [torch.empty(out.shape, dtype=out.dtype, **facts) if has else out for out, has in pairs]


def check_outs(operator: Operator, given: Arguments) -> None:
    """Raise what an operator raises on one device because of the dtypes of its `out=` arguments alone."""
    func, facts = operator.func, operator.schema
    shown = _shown(facts, given)
    inputs = {name: _without_data(value) for name, value in shown.items() if name not in facts.outs}
    try:
        func(**inputs, **{name: _empty(shown[name]) for name in facts.outs})
    except Exception as error:
        if not _writes_results(operator, inputs):
            return
        error.add_note(f"in {facts.name}, which writes to {', '.join(repr(shown[name]) for name in facts.outs)}")
        raise


def _writes_results(operator: Operator, inputs: dict[str, Any]) -> bool:
    """Whether an operator takes tensors without data, with `out=` of the dtypes that its functional form gives."""
    try:
        outs = operator.form(**inputs)
        natural = outs if len(schema_of(operator.form).returns) > 1 else (outs,)
        operator.func(**inputs, **{name: _empty(out) for name, out in zip(operator.schema.outs, natural, strict=False)})
    except Exception:
        return False
    return True


def _empty(outs: Any) -> Any:
    """What stands for an `out=` of a dtype, and takes any shape."""
    return tree_map_only((Tensor, Layout), lambda out: torch.empty(0, dtype=out.dtype, device="meta"), outs)


def _without_data(value: Any) -> Any:
    if type(value) in _LAYOUTS:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if type(value) is tuple:
        return [_without_data(item) for item in value]
    return torch.device("meta") if type(value) is torch.device else value


# ── what torch itself says ────────────────────────────────────────────────────────────────────────────────────────────

#: Elements, of all tensors together, up to which torch's own operator is asked about a call.
ASKED = 2**16


def ask_torch(operator: Operator, given: Arguments, kind: type[Exception] = Exception) -> None:
    """Raise what torch's operator raises on one device for tensors of these shapes and dtypes, whatever is in them, unless they
    are too large to find out. (On tensors without data, `_on_one_device`, it takes more than its kernels do.)"""
    if dispatch_modes():
        with no_modes():
            return ask_torch(operator, given, kind)
    func = operator.func
    dtypes = {layout.dtype for layout in given.layouts}
    sizes = [math.prod(layout.shape) for layout in given.layouts if type(layout) is Layout]
    here = all(layout.device.type == "cpu" for layout in given.layouts)  # kernels of other devices take other dtypes
    known = len(sizes) == len(given.layouts) and sum(sizes) <= ASKED and (here or 0 in sizes)
    if not known or not _checks_its_arguments(func, all(dtype.is_floating_point for dtype in dtypes)):
        return None
    if dtypes & {torch.bool, torch.uint8}:  # masks: what fits depends on how much they select
        kind = NotImplementedError
    arguments = _shown(operator.schema, given)
    with contextlib.suppress(Exception):  # its kernels raise as well, and tell better why
        if sum(math.prod(result.shape) for result in _on_one_device(func, arguments)) > ASKED:
            return None
    for number in (0, 1):  # an index, or a pivot that counts from one
        try:
            with torch.no_grad():
                func(**tree_map_only(Layout, partial(_stand_in, number), arguments))
        except Exception as error:
            other = isinstance(error, Warning) or (isinstance(error, NotImplementedError) and not here)
            if number and isinstance(error, kind) and not other:
                error.add_note(f"in {operator.name} on {', '.join(map(repr, given.layouts))}")
                raise
        else:
            return None
    return None


def _checks_its_arguments(func: Any, of_floats: bool) -> bool:
    """Whether an operator may be given any values: internal ones trust indices and sizes, and some crash."""
    name = schema_of(func).name.partition(".")[2]
    internal = "backward" in name or name.startswith("native_") or (name.startswith("_") and not of_floats)
    known = func.namespace == "aten" and runs_on_hosts(func)
    return known and not schema_of(func).random and not internal


def _stand_in(number: int, layout: Layout) -> Tensor:
    """A tensor as a layout says, with values that most operators take: invertible matrices, probabilities, indices."""
    continuous = layout.dtype.is_floating_point or layout.dtype.is_complex
    if layout.ndim < 2 or not continuous:
        return torch.full(layout.shape, 1 if continuous else number, dtype=layout.dtype)
    return torch.eye(*layout.shape[-2:], dtype=layout.dtype).expand(layout.shape).clone()


class Quickest:
    """Calls an operator on local tensors; from the second call on in the quickest way, which `owner.call` then is."""

    __slots__ = ("func", "owner", "used")

    def __init__(self, owner: Any, func: Any) -> None:
        # weakly: caches that are emptied let go of layouts, and of meshes with their groups, at once
        self.owner, self.func, self.used = ref(owner), func, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.used:
            call, owner = _quickest(self.func, args, kwargs), self.owner()
            if owner is not None:
                owner.call = call
            return call(*args, **kwargs)
        self.used = True  # most calls that are made once are not made again
        return raw_call(self.func)(*args, **kwargs)


def _quickest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The quickest call of an operator for arguments of these kinds, found once for all local tensors of as many dims."""
    kinds = (func, *[_kind(value) for value in (*args, *kwargs.values())], *kwargs)
    found = _quick_calls.entries.get(kinds)
    if found is None:
        probes = tree_map_only(Tensor, lambda x: probe(x.shape, x.stride(), x.dtype), (list(args), kwargs))
        found = quick_call(func, *probes)
        _quick_calls.put(kinds, found)
    return found


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_kind, value)))  # a None among tensors is not taken by every binding
    return (value.ndim, value.dtype) if isinstance(value, Tensor) else type(value)
