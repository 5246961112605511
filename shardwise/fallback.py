"""What serves an operator that has no rule of its own: its functional form, its decomposition, or gathering its inputs.

Each is a program on DTensors: `program(tools, func, *args, **kwargs)`. The last two are written into the active logs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._torch import composite, decompositions, knows_conjugates, overloads, schema, tree_map_only
from .comm import check, door, note_decomposed, note_fallback
from .errors import OperatorError
from .layout import make_layout
from .placement import Replicate
from .rules.chance import seeded
from .signature import Signature, signature
from .tools import sever

Program = Callable[..., Any]


def choose(func: Any, facts: Signature) -> Program:
    """The program for an operator without a rule."""
    if composite(func):
        return _composite
    if facts.written and functional_form(func) is not None:
        return functional
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _refuse if facts.written else seeded
    if func in decompositions:
        return decompose
    return gather


def _refuse(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise OperatorError(
        f"{signature(func).name} draws random numbers into an argument, which would differ from rank to rank; draw into a new "
        "tensor and copy it, or use an in-place operator such as uniform_ or normal_"
    )


def _composite(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    return func.decompose(*args, **kwargs)


def decompose(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's decomposition of the operator, which may take more than the operator does."""
    try:
        out = decompositions[func](*args, **kwargs)
    except TypeError:  # some decompositions hand `x.layout` on as torch's layout, which a DTensor's is not
        out = NotImplemented
    if out is NotImplemented:
        return gather(tools, func, *args, **kwargs)
    note_decomposed(signature(func).name)
    return out


def functional_form(func: Any) -> Any:
    """The overload that gives as new tensors what `func` writes to one argument or to `out=` arguments; None if none does."""
    facts = signature(func)
    if not facts.in_place and set(facts.returns) != set(facts.written):
        return None  # it gives back more, or other things, than it writes to
    name = facts.name.partition(".")[2]
    base = name[:-1] if facts.in_place and name.endswith("_") else name
    wanted = [a for a in _typed(func) if facts.in_place or a[0] not in facts.written]
    for candidate in overloads(func, base):
        other = signature(candidate)
        if not other.written and _typed(candidate) == wanted and len(other.returns) >= 1:
            return candidate
    return None


def _typed(func: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema(func).arguments]


def functional(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the functional form, then copy its results into the written arguments."""
    facts, form = signature(func), functional_form(func)
    if form is None:
        return gather(tools, func, *args, **kwargs)
    given = {**dict(zip(facts.names, args, strict=False)), **kwargs}
    targets = [given[name] for name in facts.written]
    inputs = {name: value for name, value in given.items() if facts.in_place or name not in facts.written}
    outs = form(**inputs)
    for target, out in zip(targets, outs if isinstance(outs, tuple | list) else (outs,), strict=True):
        if target.shape != out.shape:
            raise OperatorError(f"{facts.name} would resize its argument from {list(target.shape)} to {list(out.shape)}")
        target.copy_(out)
    return targets[0] if len(targets) == 1 else tuple(targets)


def gather(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operator on whole tensors, on every rank; the results are replicated."""
    facts = signature(func)
    mesh = tools.mesh(*args, *kwargs.values())
    note_fallback(facts.name)
    check(facts.name, 1, lambda: "it has no rule, so its inputs are gathered")

    def gathered(value: Any) -> Any:
        if isinstance(value, Tensor):
            local = tools.local(tools.replicated(value, mesh, facts.name))
            if value.is_contiguous() != local.is_contiguous():
                local = tools.each(_contiguous if value.is_contiguous() else _apart, mesh, local)
            return local
        return [gathered(item) for item in value] if isinstance(value, list | tuple) else value

    given = {**dict(zip(facts.names, args, strict=False)), **kwargs}
    fresh = {name: _fresh(gathered(v)) if name in facts.written else gathered(v) for name, v in given.items()}
    outs = door(mesh).each(partial(_aware, func, tuple(fresh)), mesh, *fresh.values())
    for name in facts.written:
        _write_back(tools, given[name], fresh[name], mesh)
    if facts.written and any(facts.returns):
        written = [given[name] for name in facts.returns if name]
        return written[0] if len(written) == 1 else tuple(written)
    results = _wrapped(tools, outs, mesh)
    return _severed(results, func, args, kwargs) if facts.view and _moved(tools, given) else results


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def _apart(x: Tensor) -> Tensor:
    """The same with gaps. What some operators give depends on whether an argument is contiguous, and their gradients ask the
    DTensor that: the determinant keeps the factors of a matrix, or of its transpose."""
    return x.new_empty((*x.shape, 2))[..., 0].copy_(x)


def _aware(func: Any, names: tuple[str, ...], *values: Any) -> Any:
    """The operator on whole tensors; of complex ones it may take lazy conjugates on its way."""
    given = dict(zip(names, values, strict=True))
    if not any(isinstance(value, Tensor) and value.is_complex() for value in values):
        return func(**given)
    with knows_conjugates():
        return tree_map_only(Tensor, _resolved, func(**given))


def _resolved(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg()


def _moved(tools: Any, given: dict[str, Any]) -> bool:
    """Whether any argument was not whole before, so that a view of the gathered one is no view of it."""
    return any(tools.is_distributed(x) and tools.layout(x).states for x in given.values())


def _severed(value: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(sever(item, func, args, kwargs, i) for i, item in enumerate(value))
    return sever(value, func, args, kwargs, 0)


def _fresh(value: Any) -> Any:
    return [_fresh(item) for item in value] if isinstance(value, list) else value.clone()


def _write_back(tools: Any, target: Any, local: Any, mesh: Any) -> None:
    if isinstance(target, list | tuple):
        for one, piece in zip(target, local, strict=True):
            _write_back(tools, one, piece, mesh)
    elif tools.is_distributed(target):
        target.copy_(_wrapped(tools, local, mesh))
    else:
        target.copy_(door(mesh).plain(local))


def _wrapped(tools: Any, value: Any, mesh: Any) -> Any:
    if isinstance(value, Tensor):
        layout = make_layout(value.shape, mesh, [Replicate()] * mesh.ndim, value.dtype, value.stride())
        return tools.wrap(value, layout)
    return type(value)(_wrapped(tools, item, mesh) for item in value) if isinstance(value, list | tuple) else value


def writes_plain(cls: Any, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator writes to a plain tensor."""
    facts = signature(func)
    given = {**dict(zip(facts.names, args, strict=False)), **kwargs}
    return any(isinstance(given.get(name), Tensor) and not isinstance(given[name], cls) for name in facts.written)


def on_plain(tools: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that writes to a plain tensor on plain tensors: the whole values of its DTensors. What it gives beside
    the tensors it wrote to is replicated."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return tools.plain(value, signature(func).name) if tools.is_distributed(value) else value

    outs = func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})
    if None not in signature(func).returns:
        return outs
    mesh = tools.mesh(*args, *kwargs.values())
    several = outs if isinstance(outs, list | tuple) else (outs,)
    new = [_wrapped(tools, door(mesh).each(torch.clone, mesh, door(mesh).replicate(out, mesh)), mesh) for out in several]
    results = [n if name is None else o for n, o, name in zip(new, several, signature(func).returns, strict=True)]
    return tuple(results) if isinstance(outs, list | tuple) else results[0]


def _owners(cls: Any, args: Any) -> list[Any]:
    """For each index of the first list: the mesh of the tensor there, or None where it is a plain tensor."""
    first = next((arg for arg in args if isinstance(arg, list | tuple)), [])
    return [item._layout.mesh if isinstance(item, cls) else None for item in first]


def is_mixed(cls: Any, args: Any) -> bool:
    """Whether the first list holds tensors of several meshes, or plain tensors."""
    owners = _owners(cls, args)
    return None in owners or len(set(owners)) > 1


def apart(tools: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on lists once for each mesh, and once for the plain tensors."""
    owners = _owners(tools.cls, args)
    outs: list[Any] = [None] * len(owners)
    for owner in dict.fromkeys(owners):
        indices = [i for i, other in enumerate(owners) if other is owner]

        def part(value: Any, indices: list[int] = indices, owner: Any = owner) -> Any:
            if isinstance(value, list | tuple):
                return [part(value[i]) for i in indices] if len(value) == len(owners) else value
            return tools.plain(value) if owner is None and tools.is_distributed(value) else value

        got = func(*[part(arg) for arg in args], **{name: part(value) for name, value in kwargs.items()})
        for i, out in zip(indices, got or (), strict=False):
            outs[i] = out
    return outs if signature(func).lists else None
