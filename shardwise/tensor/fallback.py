"""What serves an operator that has no rule of its own: its functional form, its decomposition, or gathering its inputs.

Each is a program on DTensors: `program(tools, func, *args, **kwargs)`. The last two are written into the active logs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import composite, decompositions, knows_conjugates, tree_map_only
from ..base.schema import Schema, functional_form, schema_of
from ..comm import check, note, transport
from ..errors import OperatorError
from ..propagation.operator import Operator
from .draw import seeded
from .toolbox import Toolbox
from .wrapping import sever


def choose(operator: Operator) -> Callable[..., Any]:
    """The program for an operator without a rule."""
    if composite(operator.func):
        return lambda tools, func, *args, **kwargs: func.decompose(*args, **kwargs)
    if operator.form is not None:
        return functional
    if operator.schema.random:
        return _refuse if operator.schema.written else seeded
    if operator.func in decompositions:
        return decompose
    return gather


def _refuse(tools: Toolbox, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise OperatorError(
        f"{schema_of(func).name} draws random numbers into an argument, which would differ from rank to rank; draw into a new "
        "tensor and copy it, or use an in-place operator such as uniform_ or normal_"
    )


def decompose(tools: Toolbox, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's decomposition of the operator, which may take more than the operator does."""
    try:
        out = decompositions[func](*args, **kwargs)
    except TypeError:  # some decompositions hand `x.layout` on as torch's layout, which a DTensor's is not
        out = NotImplemented
    if out is NotImplemented:
        return gather(tools, func, *args, **kwargs)
    note("decomposed", schema_of(func).name)
    return out


def functional(tools: Toolbox, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the functional form, then copy its results into the written arguments, plain tensors or DTensors."""
    facts, form = schema_of(func), functional_form(func)
    if form is None:
        return gather(tools, func, *args, **kwargs)
    given = facts.named(args, kwargs)
    outs = form(**{name: value for name, value in given.items() if name not in facts.outs})
    order = facts.functional_results
    return _written(tools, facts, given, list(zip(order, (outs,) if len(order) == 1 else outs, strict=True)))


def _written(tools: Toolbox, facts: Schema, given: dict[str, Any], found: list[tuple[str | None, Any]]) -> Any:
    """What an operator gives, from its new results (by no name) and from what becomes of the arguments that it writes to."""
    pairs = [(name, *pair) for name, value in found if name is not None for pair in _pairs(given.get(name), value)]
    for name, target, value in pairs:
        _check_fit(facts, target, value, name in facts.outs and not (tools.is_distributed(target) and target.numel()))
    for _, target, value in pairs:
        _put(tools, target, value)
    new = iter([value for name, value in found if name is None])
    results = [given[name] if name is not None else next(new) for name in facts.returns]
    return results[0] if len(results) == 1 else tuple(results) if results else None


def _pairs(target: Any, value: Any) -> list[tuple[Any, Any]]:
    """Each tensor that is written to, with its new value; lists go element by element, and nothing is where None was given."""
    if isinstance(target, list | tuple):
        return [pair for one, other in zip(target, value, strict=True) for pair in _pairs(one, other)]
    return [] if target is None else [(target, value)]


def _check_fit(facts: Schema, target: Tensor, value: Tensor, resizes: bool) -> None:
    """Refuse, as torch does, what a written tensor cannot hold, before any of them is written to."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise OperatorError(
            f"{facts.name} gives {value.dtype}, which cannot be cast to {target.dtype}, the dtype of a tensor that it writes to"
        )
    if target.shape != value.shape and not resizes:
        raise OperatorError(
            f"{facts.name} would resize a tensor that it writes to from {list(target.shape)} to {list(value.shape)}; give one "
            "of that shape, or an out= without elements"
        )


def _put(tools: Toolbox, target: Any, value: Any) -> None:
    """Write a whole value to a plain tensor or a DTensor, which takes its shape."""
    distributed = tools.is_distributed(target)
    if not distributed and tools.is_distributed(value):
        value = tools.plain(value)
    if target.shape == value.shape:
        target.copy_(value)
    elif distributed:
        mesh = tools.layout(target).mesh
        whole = value if tools.is_distributed(value) else tools.replicated(value, mesh)
        tools.become(target, whole.to(target.dtype, copy=True))
    else:  # an operator that does as all do with their `out=`: it warns of a tensor with elements
        torch.ops.aten.alias_copy.out(value.to(target.dtype), out=target)


def gather(tools: Toolbox, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the operator on whole tensors, on every rank; its new results are replicated."""
    facts = schema_of(func)
    mesh = tools.mesh(*args, *kwargs.values())
    note("fallbacks", facts.name)
    check(facts.name, 1, lambda: "it has no rule, so its inputs are gathered")

    def gathered(x: Tensor) -> Tensor:
        local = tools.local(tools.replicated(x, mesh, facts.name))
        if x.is_contiguous() == local.is_contiguous():
            return local
        return tools.each(Tensor.contiguous if x.is_contiguous() else _apart, mesh, local)

    def nothing(out: Tensor) -> Any:  # for an `out=`, which is not read: makes an empty tensor on each rank, that is resized
        return partial(torch.empty, 0, dtype=out.dtype, device=out.device)

    given = facts.named(args, kwargs)
    values = [tree_map_only(Tensor, nothing if name in facts.outs else gathered, v) for name, v in given.items()]
    outs, written = transport(mesh).each(partial(_aware, func, tuple(given)), mesh, *values)
    if facts.written:
        several = outs if len(facts.returns) > 1 else (outs,)
        new = [(None, tools.whole(out, mesh)) for name, out in zip(facts.returns, several, strict=False) if name is None]
        names = [name for name in facts.written if name in given]
        return _written(tools, facts, given, [*new, *zip(names, tools.whole(written, mesh), strict=True)])
    results = tools.whole(outs, mesh)
    if not facts.view or not any(tools.is_distributed(x) and tools.layout(x).states for x in given.values()):
        return results  # arguments were whole before, so that a view of one is a view here too
    if isinstance(results, list | tuple):
        return type(results)(sever(item, func, args, kwargs, i) for i, item in enumerate(results))
    return sever(results, func, args, kwargs, 0)


def _apart(x: Tensor) -> Tensor:
    """The same with gaps. What some operators give depends on whether an argument is contiguous, and their gradients ask the
    DTensor that: the determinant keeps the factors of a matrix, or of its transpose."""
    return x.new_empty((*x.shape, 2))[..., 0].copy_(x)


def _made(value: Any) -> Any:
    """What a written argument is while the operator runs."""
    if isinstance(value, list | tuple):
        return [_made(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value() if callable(value) else value


def _aware(func: Any, names: tuple[str, ...], *values: Any) -> tuple[Any, list[Any]]:
    """The operator on whole tensors, and what it wrote; of complex ones it may take lazy conjugates on its way."""
    facts = schema_of(func)
    given = {name: _made(v) if name in facts.written else v for name, v in zip(names, values, strict=True)}

    def run() -> tuple[Any, list[Any]]:
        outs = func(**given)
        return outs, [given[name] for name in facts.written if name in given]

    if not any(isinstance(value, Tensor) and value.is_complex() for value in given.values()):
        return run()
    with knows_conjugates():
        return tree_map_only(Tensor, lambda x: x.resolve_conj().resolve_neg(), run())


def writes_plain(cls: Any, facts: Schema, args: Any, kwargs: Any) -> bool:
    """Whether an operator writes to a plain tensor."""
    given = facts.named(args, kwargs)
    targets = (target for name in facts.written for target, _ in _pairs(given.get(name), given.get(name)))
    return any(not isinstance(target, cls) for target in targets)


def _owners(cls: Any, args: Any) -> list[Any]:
    """For each index of the first list: the mesh of the tensor there, or None where it is a plain tensor."""
    first = next((arg for arg in args if isinstance(arg, list | tuple)), [])
    return [item._layout.mesh if isinstance(item, cls) else None for item in first]


def is_mixed(cls: Any, args: Any) -> bool:
    """Whether the first list holds tensors of several meshes, or plain tensors."""
    owners = _owners(cls, args)
    return None in owners or len(set(owners)) > 1


def apart(tools: Toolbox, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on lists once for each mesh, and once for the plain tensors."""
    facts, owners = schema_of(func), _owners(tools.cls, args)
    given = facts.named(args, kwargs)
    outs: list[Any] = [None] * len(owners)
    for owner in dict.fromkeys(owners):
        indices = [i for i, other in enumerate(owners) if other is owner]
        copies: list[tuple[Any, Any]] = []
        parts = {name: _part(tools, value, indices, owners, copies) for name, value in given.items()}
        if isinstance(scalars := parts.get("scalars"), Tensor):  # one for each index
            parts["scalars"] = scalars[indices]
        got = func(**parts)
        for target, value in copies:
            if any(target is item for name in facts.written for item, _ in _pairs(given.get(name), given.get(name))):
                _put(tools, target, value)
        for i, out in zip(indices, got or (), strict=False):
            outs[i] = out
    return outs if facts.lists else None


def _part(tools: Toolbox, value: Any, indices: list[int], owners: list[Any], copies: list[tuple[Any, Any]]) -> Any:
    """An argument for the tensors at some indices, all of one mesh or all plain; plain ones get copies of DTensors."""
    if isinstance(value, list | tuple):
        several = [value[i] for i in indices] if len(value) == len(owners) else value
        return [_part(tools, item, indices, owners, copies) for item in several]
    if owners[indices[0]] is not None or not tools.is_distributed(value):
        return value
    copies.append((value, tools.plain(value).clone()))
    return copies[-1][1]
