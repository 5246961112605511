"""What an operator's schema says that dispatch needs: where its tensors are, what it writes to, which arguments are values.

One frozen record per operator overload, made on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ..propagation.table import find

#: Schema types whose value never decides a layout: their arguments enter a key by type only, unless a rule says `static`.
_VALUES = ("number", "float", "Scalar", "complex")


@dataclass(frozen=True, slots=True)
class Signature:
    """Facts of one operator overload.

    names      all arguments, in order
    tensors    those that are tensors or lists of tensors, and a number in the place of the first
    free       positions and names of arguments that are no part of a key (their type is)
    written    names of the arguments the operator writes to, tensors or lists of tensors
    outs       those of them that it does not read: its `out=` arguments
    returns    for each result, the name of the written argument it is, or None
    lists      whether a result is a list of tensors
    view       whether a result shares memory with an argument
    """

    name: str
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    defaults: dict[str, Any]
    free: frozenset[int | str]
    written: tuple[str, ...]
    outs: tuple[str, ...]
    returns: tuple[str | None, ...]
    lists: bool
    view: bool

    @property
    def in_place(self) -> bool:
        """Whether the operator writes to its first argument, and to nothing else, and gives it back."""
        return self.written == self.names[:1] and self.returns in ((self.names[0],), ())


@cache
def signature(op: Any) -> Signature:
    """The facts of an operator overload."""
    schema = op._schema
    row = find(op)
    static, freed = (row.static, row.free) if row is not None else (frozenset(), frozenset())
    free: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        by_type = "Tensor" in kind or (row is not None and "List[float]" not in kind and any(word in kind for word in _VALUES))
        if (by_type and argument.name not in static) or argument.name in freed:
            free |= {position, argument.name}
    # of a list the schema tells that it is written to, but no label
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    owner = {label: argument.name for argument in written for label in argument.alias_info.before_set}
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    if tensors and str(schema.arguments[0].type) == "number":  # it stands where other overloads have a tensor
        tensors.insert(0, schema.arguments[0])
    labels = [result.alias_info.before_set if result.alias_info is not None else () for result in schema.returns]
    return Signature(
        name=f"{schema.name.replace('::', '.')}",
        names=tuple(argument.name for argument in schema.arguments),
        tensors=tuple(a.name for a in tensors),
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        free=frozenset(free),
        written=tuple(argument.name for argument in written),
        outs=tuple(argument.name for argument in written if argument.is_out),
        returns=tuple(next((owner[x] for x in names if x in owner), None) for names in labels),
        lists=any("List" in str(result.type) for result in schema.returns),
        view=any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns),
    )
