"""The table of rules as text, for `python -m shardwise rules`: each row's operators, sentence, words, and where it stands."""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from ..propagation.notation import Pattern, Rule
from ..propagation.table import PLACES, TABLE

WIDTH = 100
_FIELDS = {field.name: field for field in fields(Rule) if field.name not in ("inputs", "outputs", "text")}
_BARE = Rule()


def listing(pattern: str = "") -> str:
    """The rows whose operators match, each word of them explained; all rows, without explanations, where nothing is asked for.

    >>> listing("mm").splitlines()[2]
    '  sentence: m k, k n -> m n'
    """
    return "\n".join(line for names, place, row in _rows(pattern) for line in _lines(names, place, row, bool(pattern)))


def _rows(pattern: str) -> Iterator[tuple[list[str], str, Rule]]:
    """The rows that match, each with its names and its place, in the order of the files."""
    rows: dict[tuple[str, int], list[str]] = {}
    for name, row in TABLE.items():
        rows.setdefault((PLACES[name], id(row)), []).append(name)
    found = [names for names in rows.values() if not pattern or any(_matches(name, pattern) for name in names)]
    for names in sorted(found, key=lambda names: PLACES[names[0]].rpartition(":")[0]):
        yield names, PLACES[names[0]], TABLE[names[0]]


def _matches(name: str, pattern: str) -> bool:
    """Whether `max`, `max.dim`, `aten.max` or a pattern such as `max*` means the operator; `add_` has the row of `add`.

    >>> [_matches("aten.max.dim", text) for text in ("max", "max.dim", "aten.max", "m*", "max_", "amax")]
    [True, True, True, True, True, False]
    """
    library, _, rest = name.partition(".")
    operator = rest.partition(".")[0]
    given = pattern.replace("::", ".")
    several = (given, given.removesuffix("_"))
    return any(fnmatch.fnmatch(n, p) for n in (name, rest, operator, f"{library}.{operator}") for p in several)


def _lines(names: list[str], place: str, row: Rule, is_explained: bool) -> Iterator[str]:
    yield from textwrap.wrap(" ".join(names), WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    yield f"  {place}"
    for word, value in _words(row):
        yield from textwrap.wrap(f"{word}: {value}", WIDTH, initial_indent="  ", subsequent_indent="      ")
        if is_explained:
            yield from textwrap.wrap(_explanations()[word], WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _words(row: Rule) -> Iterator[tuple[str, str]]:
    """The sentence and the words of a row as text: those that are not as they are by default, and what a lost dim leaves."""
    if row.text:
        yield "sentence", row.text
    kept = {letter for pattern in row.outputs for letter in _letters(pattern)}
    loses = any(letter not in kept for pattern in row.inputs for letter in _letters(pattern))
    for word in _FIELDS:
        value = getattr(row, word)
        if value != getattr(_BARE, word) or (word == "lost" and loses):
            yield word, _written(value)


def _letters(pattern: Pattern) -> set[str | None]:
    return {*pattern.before, *pattern.after, pattern.letter or pattern.named} - {None}


def _written(value: Any) -> str:
    """A word's value: functions by name and file, several of a kind side by side.

    >>> _written(((0, 1), (2,))), _written(frozenset("ba")), _written(partial(_written, 3))
    ('(0 1) (2)', 'a b', '_written of rules/listing.py')
    """
    if isinstance(value, partial):
        return _written(value.func)
    if callable(value):
        path = value.__module__.partition(".")[2].replace(".", "/")
        return f"{'a function' if value.__name__ == '<lambda>' else value.__name__} of {path}.py"
    if isinstance(value, frozenset):
        return " ".join(sorted(map(str, value)))
    if isinstance(value, tuple):
        return " ".join(f"({_written(item)})" if isinstance(item, tuple) else str(item) for item in value)
    return str(value)


def _explanations() -> dict[str, str]:
    """What each word means, as the docstring of `Rule` says it."""
    found: dict[str, str] = {}
    for words, text in re.findall(r"^ {4}(\w[\w/]*) {2,}(.*(?:\n {8,}.*)*)", Rule.__doc__ or "", re.MULTILINE):
        found |= dict.fromkeys(words.split("/"), " ".join(text.split()))
    return found
