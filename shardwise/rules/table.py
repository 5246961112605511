"""The one table of rules: operator name → Rule. Each family's file adds its rows when it is imported.

Names are `aten.add` for all overloads, or `aten.add.Scalar` for one; an in-place operator uses the row of its functional form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .notation import Rule, parse

TABLE: dict[str, Rule] = {}


def rule(names: str, text: str | None = None, **words: Any) -> None:
    """Add one row for each of the space-separated names; bare names mean `aten.`.

    >>> rule("aten.example", "m k, k n -> m n", linear=((0,), (1,)))
    >>> TABLE.pop("aten.example").text
    'm k, k n -> m n'
    """
    inputs, outputs = parse(text) if text is not None else ((), ())
    for word in ("whole", "static", "free"):
        words[word] = _set(words.get(word, ()))
    row = Rule(inputs, outputs, text=text or "", **words)
    for name in names.split():
        full = name if "." in name and name.split(".")[0] in ("aten", "prims", "shardwise") else f"aten.{name}"
        TABLE[full] = row


def _set(value: str | Iterable[str]) -> frozenset[str]:
    return frozenset(value.split() if isinstance(value, str) else value)


def find(op: Any) -> Rule | None:
    """The row of an operator overload: its own, its packet's, or that of the operator it is the in-place form of."""
    namespace, name, overload = _parts(op)
    for base in (name, name[:-1] if name.endswith("_") and not name.endswith("__") else name):
        for key in (f"{namespace}.{base}.{overload}", f"{namespace}.{base}"):
            if key in TABLE:
                return TABLE[key]
    return None


def _parts(op: Any) -> tuple[str, str, str]:
    namespace, _, name = op._schema.name.partition("::")
    return namespace, name, op._overloadname
