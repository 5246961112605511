"""The one table of rules: operator name → Rule. Each family's file adds its rows when it is imported. `library_key` tells the
table and this code from other versions: keys of compiled programs hold it.

Names are `aten.add` for all overloads, or `aten.add.Scalar` for one; an in-place operator uses the row of its functional form.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from .._torch.compiler import OpaqueBaseMeta, constant_type
from ..errors import OperatorError
from .notation import Rule, parse

VERSION = "0.1.0"
TABLE: dict[str, Rule] = {}
#: Where the row of each name stands, as `rules/matmul.py:46`; apart from the rows, whose digest no line number may change.
PLACES: dict[str, str] = {}
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def rule(names: str, text: str | None = None, **words: Any) -> None:
    """Add one row for each of the space-separated names; bare names mean `aten.`, others are written as `library::operator`.
    A name that has a row is refused.

    >>> rule("aten.example", "m k, k n -> m n", linear=((0,), (1,)))
    >>> TABLE.pop("aten.example").text
    'm k, k n -> m n'
    """
    row, place = make_row(text, **words), _place(sys._getframe(1))
    for name in names.split():
        has_library = "::" in name or name.partition(".")[0] in ("aten", "prims", "shardwise")
        name = name.replace("::", ".") if has_library else f"aten.{name}"
        if name in TABLE:
            raise OperatorError(f"{name} has a rule already, at {PLACES.get(name)}: an operator has one; change or remove that")
        TABLE[name], PLACES[name] = row, place


def make_row(text: str | None = None, **words: Any) -> Rule:
    """A row that is in no table."""
    inputs, outputs = parse(text) if text is not None else ((), ())
    for word in ("whole", "static", "free"):
        value = words.get(word, ())
        words[word] = frozenset(value.split() if isinstance(value, str) else value)
    return Rule(inputs, outputs, text=text or "", **words)


def _place(frame: FrameType | None) -> str:
    """The line of a row: of a module of this package, or the innermost one outside of it."""
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_lineno}" if frame else ""


def find(op: Any) -> Rule | None:
    """The row of an operator overload: its own, its packet's, or that of the operator it is the in-place form of."""
    return next((TABLE[name] for name in names_of(op) if name in TABLE), None)


def names_of(op: Any) -> list[str]:
    """The names that the row of an overload may have, from its own to that of what it is the in-place form of.

    >>> import torch
    >>> names_of(torch.ops.aten.add_.Tensor)
    ['aten.add_.Tensor', 'aten.add_', 'aten.add.Tensor', 'aten.add']
    """
    (namespace, _, name), overload = op._schema.name.partition("::"), op._overloadname
    bases = (name, name[:-1]) if name.endswith("_") and not name.endswith("__") else (name,)
    return [key for base in bases for key in (f"{namespace}.{base}.{overload}", f"{namespace}.{base}")]


_fingerprints: dict[int, str] = {}


def fingerprint() -> str:
    """A digest of every row: names, sentences, words and the code of its functions. The same in every process."""
    state = hash(tuple((name, id(row)) for name, row in TABLE.items()))  # rows are never changed, only replaced
    if state not in _fingerprints:
        _fingerprints.clear()
        text = repr([(name, _facts(row)) for name, row in sorted(TABLE.items())])
        _fingerprints[state] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return _fingerprints[state]


def _facts(value: Any) -> Any:
    """A value without addresses and lines, for a digest."""
    if isinstance(value, Rule):
        return [(field.name, _facts(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if isinstance(value, partial):
        return _facts(value.func), _facts(value.args), sorted((k, _facts(v)) for k, v in value.keywords.items())
    if isinstance(value, list | tuple):
        return [_facts(item) for item in value]
    if isinstance(value, FunctionType):
        cells = [_facts(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__module__, value.__qualname__, _code(value.__code__), cells, _facts(value.__defaults__)
    return type(value).__name__ if "0x" in repr(value) else repr(value)


def _code(code: CodeType) -> Any:
    constants = [_code(c) if isinstance(c, CodeType) else _facts(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


@cache
def _sources() -> str:
    """A digest of the package's source: it changes with the code between two releases."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(_PACKAGE).rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def library_key() -> str:
    """Version, code and rules, the same in every process.

    >>> library_key().startswith(VERSION)
    True
    """
    return f"{VERSION} {_sources()} {fingerprint()}"


class Library(metaclass=OpaqueBaseMeta):
    """This library as a constant of traced programs: what they call of it tells torch's keys the library's own."""

    def key(self) -> str:
        """A short digest of `library_key`."""
        return hashlib.blake2b(library_key().encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Library)

    def __hash__(self) -> int:
        return 0

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return "Library()", {"Library": Library}


constant_type(Library)
LIBRARY = Library()
