"""Private names of torch's symbolic sizes, each with the reason it is needed."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterable
from typing import Any

import torch


def hint(size: Any) -> int:
    """A size at hand, also where it is a symbol of a trace, without making the trace one of this size only."""
    return size if type(size) is int else size.node.hint if isinstance(size, torch.SymInt) else int(size)


def known(size: Any) -> Any:
    """A size as a number if the trace is of this size only."""
    value = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return size if value is None else value


def unseen() -> Any:
    """In the block the tracer does not see what is done with symbols. If it saw a symbol come out of a longer expression (a
    size divided, or one less and one more), it would look for the symbol there, though that is made of it, and never end; it
    finds by itself what a symbol is."""
    return importlib.import_module("torch.fx.experimental.proxy_tensor").disable_proxy_modes_tracing()


def quotient(size: Any, count: int) -> Any:
    """`size // count`, also of a symbol."""
    if not isinstance(size, torch.SymInt):
        return size // count
    with unseen():
        return size // count


def rebuilt(size: Any, known_sizes: Iterable[Any]) -> Any:
    """A symbolic size made anew out of others, two at a time: the tracer then knows how. By itself it forgets a third."""
    atoms = {other.node.expr: other for other in known_sizes if isinstance(other, torch.SymInt)}

    def build(expr: Any) -> Any:
        if expr in atoms or expr.is_Integer:
            return atoms[expr] if expr in atoms else int(expr)
        parts = [build(part) for part in expr.args] if expr.is_Mul or expr.is_Add else [None]
        if any(part is None for part in parts):
            return None
        return functools.reduce(operator.mul if expr.is_Mul else operator.add, parts)

    found = build(size.node.expr) if isinstance(size, torch.SymInt) else size
    return size if found is None else found
