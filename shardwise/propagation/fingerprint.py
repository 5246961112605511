"""Which Shardwise this is, as keys of compiled programs must know: a program compiled by another one is another program."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from .._torch.compiler import OpaqueBaseMeta, constant_type
from .table import fingerprint

VERSION = "0.1.0"


@functools.cache
def _sources() -> str:
    """A digest of the package's source: it changes with the code between two releases."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
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
