"""Which Shardwise this is, as keys of compiled programs must know: a program compiled by another one is another program."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .rules.table import fingerprint

VERSION = "0.1.0"


@functools.cache
def _sources() -> str:
    """A digest of the package's source: it changes with the code between two releases."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def library_key() -> str:
    """Version, code and rules, the same in every process.

    >>> library_key().startswith(VERSION)
    True
    """
    return f"{VERSION} {_sources()} {fingerprint()}"
