"""`Operator`: one operator overload with its schema and its row of the table, found once."""

from __future__ import annotations

from typing import Any

from ..base.schema import Schema, functional_form, schema_of
from .notation import Rule
from .table import find

#: Schema types whose value never decides a layout: their arguments enter a key by type only, unless a rule says `static`.
_VALUES = ("number", "float", "Scalar", "complex")


class Operator:
    """An operator overload as dispatch sees it. Its place in a key is cheaper to hash than the overload's own.

    schema       what its schema says
    row          its row of the table
    form         for an operator that writes, the overload that gives new tensors instead
    borrowed     whether the row is that of `form`
    free         positions and names of arguments of which a key holds the type only
    by_type      the same for each position
    knows_plain  whether a program runs in its place whatever the arguments are, plain tensors too
    """

    __slots__ = ("borrowed", "by_type", "form", "free", "func", "knows_plain", "row", "schema")

    def __init__(self, func: Any) -> None:
        self.func, self.schema, self.row = func, schema_of(func), find(func)
        self.form: Any = functional_form(func) if self.schema.written else None
        self.borrowed = self.row is not None and self.form is not None and find(self.form) is self.row
        self.by_type = _by_type(self.schema, self.row)
        by_type = zip(self.schema.names, self.by_type, strict=True)
        self.free = frozenset([at for i, (name, free) in enumerate(by_type) if free for at in (i, name)])
        row = self.row if not self.borrowed else None
        self.knows_plain = row is not None and row.program is not None and not row.inputs and row.function is None

    @property
    def name(self) -> str:
        """The name with its namespace, such as aten.add."""
        return self.schema.name


def _by_type(facts: Schema, row: Rule | None) -> tuple[bool, ...]:
    """For each argument whether a key holds its type only."""
    if row is None:
        return tuple(["Tensor" in kind for kind in facts.types])
    found = []
    for name, kind in zip(facts.names, facts.types, strict=True):
        is_value = "Tensor" in kind or ("List[float]" not in kind and [word for word in _VALUES if word in kind])
        found.append(name in row.free or (bool(is_value) and name not in row.static))
    return tuple(found)


#: By the id of an overload, which is quicker to look up than the overload; the record keeps it alive, so its id stays its own.
OPERATORS: dict[int, Operator] = {}


def operator_of(func: Any) -> Operator:
    """The record of an operator overload."""
    found = OPERATORS.get(id(func))
    return found or OPERATORS.setdefault(id(func), Operator(func))  # of two threads the first: keys hold it
