"""What an operator's schema says: its arguments, those it writes to, and which results are views. One record per overload."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from .._torch.tensors import overloads, schema


@dataclass(frozen=True, slots=True)
class Schema:
    """Facts of one operator overload.

    name       with its namespace and without its overload, such as aten.add
    names      all arguments, in order
    types      the types of these, as the schema writes them
    tensors    arguments that are tensors or lists of tensors, and a number in the place of the first
    defaults   the arguments that may be left out
    keywords   arguments that are given by keyword only
    written    arguments the operator writes to, tensors or lists of tensors
    outs       those of them that it does not read: its `out=` arguments
    returns    for each result, the name of the written argument it is, or None
    lists      whether a result is a list of tensors
    view       whether a result shares memory with an argument that is not written to
    reshapes   whether it changes the shape of an argument in place
    random     whether it draws random numbers
    in_place   whether it writes to its first argument, and to nothing else, and gives it back
    """

    name: str
    names: tuple[str, ...]
    types: tuple[str, ...]
    tensors: tuple[str, ...]
    defaults: dict[str, Any]
    keywords: frozenset[str]
    written: tuple[str, ...]
    outs: tuple[str, ...]
    returns: tuple[str | None, ...]
    lists: bool
    view: bool
    reshapes: bool
    random: bool
    in_place: bool

    @property
    def functional_results(self) -> list[str | None]:
        """What the functional form gives: the results (by the argument each is, None: a new one), then what else is written."""
        rest = sorted(self.written, key=lambda name: name not in self.outs)
        return [*self.returns, *(name for name in rest if name not in self.returns)]

    def named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that are given, by name."""
        return dict(zip(self.names, args, strict=False), **kwargs)


@cache
def schema_of(op: Any) -> Schema:
    """The facts of an operator overload.

    >>> add = schema_of(torch.ops.aten.add_.Tensor)
    >>> add.name, add.written, add.returns, add.named((1, 2), {"alpha": 3})
    ('aten.add_', ('self',), ('self',), {'self': 1, 'other': 2, 'alpha': 3})
    """
    arguments, aliases = schema(op).arguments, [result.alias_info for result in schema(op).returns]
    names, types = tuple(map(attrgetter("name"), arguments)), tuple([str(a.type) for a in arguments])
    # of a list the schema tells that it is written to, but no label
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    owner = {label: argument.name for argument in written for label in argument.alias_info.before_set}
    tensors = [name for name, kind in zip(names, types, strict=True) if "Tensor" in kind]
    if tensors and types[0] == "number":  # it stands where other overloads have a tensor
        tensors.insert(0, names[0])
    returns = tuple([next((owner[x] for x in alias.before_set if x in owner), None) if alias else None for alias in aliases])
    return Schema(
        name=schema(op).name.replace("::", "."),
        names=names,
        types=types,
        tensors=tuple(tensors),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        keywords=frozenset([a.name for a in arguments if a.kwarg_only]),
        written=tuple(map(attrgetter("name"), written)),
        outs=tuple([a.name for a in written if a.is_out]),
        returns=returns,
        lists=any("List" in str(result.type) for result in schema(op).returns),
        view=any(alias is not None and not alias.is_write for alias in aliases),
        reshapes=torch.Tag.inplace_view in op.tags,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        in_place=bool(written) and [a.name for a in written] == [names[0]] and returns in (names[:1], ()),
    )


@cache
def functional_form(op: Any) -> Any:
    """The overload that gives as new tensors what `op` gives, followed by what it writes to and does not give; None if there
    is none.

    >>> functional_form(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    facts = schema_of(op)
    name = facts.name.partition(".")[2]
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    wanted = [typed for typed in zip(facts.names, facts.types, strict=True) if typed[0] not in facts.outs]
    for candidate in (form for known in (base, f"{base}_functional") for form in overloads(op, known)):
        other = schema_of(candidate)
        as_wanted = list(zip(other.names, other.types, strict=True)) == wanted
        if not other.written and as_wanted and len(other.returns) == len(facts.functional_results):
            return candidate
    return None
