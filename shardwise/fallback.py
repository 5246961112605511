"""What serves an operator that has no rule of its own: its functional form, its decomposition, or gathering its inputs.

Each is a program on DTensors: `program(tools, func, *args, **kwargs)`. Gathering is written into the active logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._torch import composite, decompositions, overloads
from .comm import check, door, note_fallback
from .errors import OperatorError
from .layout import make_layout
from .placement import Replicate
from .rules.table import find
from .signature import Signature, signature

Program = Callable[..., Any]


def choose(func: Any, facts: Signature) -> Program:
    """The program for an operator without a rule."""
    if composite(func):
        return _composite
    if facts.written and functional_form(func) is not None:
        return functional
    if func in decompositions and torch.Tag.nondeterministic_seeded not in func.tags:
        return _decompose
    return gather


def _composite(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    return func.decompose(*args, **kwargs)


def _decompose(tools: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    out = decompositions[func](*args, **kwargs)
    return gather(tools, func, *args, **kwargs) if out is NotImplemented else out


def functional_form(func: Any) -> Any:
    """The overload that gives as new tensors what `func` writes to one argument or to `out=` arguments; None if none does."""
    facts = signature(func)
    name = facts.name.partition(".")[2]
    base = name[:-1] if facts.in_place and name.endswith("_") else name
    wanted = [n for n in facts.names if facts.in_place or n not in facts.written]
    for candidate in overloads(func, base):
        other = signature(candidate)
        if not other.written and list(other.names) == wanted and len(other.returns) >= 1:
            return candidate
    return None


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
    whole: dict[int, Any] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, Tensor):
            local = tools.local(tools.replicated(value, mesh, facts.name))
            whole[id(value)] = local
            return local
        return [gathered(item) for item in value] if isinstance(value, list | tuple) else value

    given = {**dict(zip(facts.names, args, strict=False)), **kwargs}
    fresh = {name: _fresh(gathered(v)) if name in facts.written else gathered(v) for name, v in given.items()}
    outs = func(**fresh)
    for name in facts.written:
        _write_back(tools, given[name], fresh[name], mesh)
    if facts.written and any(facts.returns):
        written = [given[name] for name in facts.returns if name]
        return written[0] if len(written) == 1 else tuple(written)
    return _wrapped(tools, outs, mesh)


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


def has_rule(func: Any) -> bool:
    """Whether the table has a row for an operator."""
    return find(func) is not None
