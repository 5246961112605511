"""Parcel: compiled programs as bytes that another process takes in. Knows nothing of jobs and files.

Inside are torch's cache artifacts, and the libraries of kernels for the CPU: torch's artifacts name these but hold only their
source, so that every host would run the C++ compiler again. A header of plain JSON comes first and can be judged before
anything else is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._torch import compiler_folder
from ..errors import CompileError

_MAGIC = b"shardwise artifacts 1\n"
_LIBRARY = re.compile(r"\w\w/\w+(\.\w+)*\.so")


class Parcel(NamedTuple):
    """What is known of the programs (plain JSON), torch's artifacts, and libraries by their path in the compiler's folder."""

    facts: dict[str, Any]
    artifacts: tuple[bytes, ...]
    libraries: dict[str, bytes]


def pack(parcel: Parcel) -> bytes:
    """The parcel as bytes."""
    body = zlib.compress(b"".join((*parcel.artifacts, *parcel.libraries.values())), level=1)
    header = {
        "facts": parcel.facts,
        "artifacts": [len(part) for part in parcel.artifacts],
        "libraries": [[name, len(part)] for name, part in parcel.libraries.items()],
        "size": len(body),
        "digest": hashlib.blake2b(body, digest_size=16).hexdigest(),
    }
    text = json.dumps(header).encode()
    return b"".join((_MAGIC, len(text).to_bytes(8, "little"), text, body))


def unpack(data: bytes, source: str, check: Callable[[dict[str, Any]], None]) -> Parcel:
    """The parcel that the bytes tell, which come from `source`; `check` sees its facts before anything else is read.

    >>> data = pack(Parcel({"mesh": "dp=2"}, (b"program",), {}))
    >>> unpack(data, "here", print).artifacts
    {'mesh': 'dp=2'}
    (b'program',)
    """
    header, body = _opened(data, source)
    check(header["facts"])
    if hashlib.blake2b(body, digest_size=16).hexdigest() != header["digest"]:
        raise CompileError(_damaged(source, f"it holds {len(body)} bytes of programs where {header['size']} were saved"))
    rest = memoryview(zlib.decompress(body))
    sizes = [*header["artifacts"], *(size for _, size in header["libraries"])]
    parts, at = [], 0
    for size in sizes:
        parts.append(bytes(rest[at : at + size]))
        at += size
    count = len(header["artifacts"])
    names = [name for name, _ in header["libraries"]]
    return Parcel(header["facts"], tuple(parts[:count]), dict(zip(names, parts[count:], strict=True)))


def _opened(data: bytes, source: str) -> tuple[dict[str, Any], bytes]:
    if not data.startswith(_MAGIC):
        raise CompileError(f"{source} is nothing that sw.save_artifacts wrote; save the artifacts again with this library")
    start = len(_MAGIC) + 8
    stop = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    try:
        return json.loads(data[start:stop]), data[stop:]
    except ValueError:
        raise CompileError(_damaged(source, "its header cannot be read")) from None


def _damaged(source: str, what: str) -> str:
    return f"{source} is cut short or damaged: {what}; copy or save it again"


# ── libraries ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def loaded_libraries() -> frozenset[str]:
    """The compiler's libraries that this process runs, by their path in its folder (where the system tells: on Linux)."""
    folder, maps = Path(compiler_folder()), Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if line.endswith(".so")}
    names = {path.relative_to(folder).as_posix() for path in paths if path.is_relative_to(folder)}
    return frozenset(name for name in names if _LIBRARY.fullmatch(name))


def read_libraries(names: frozenset[str]) -> dict[str, bytes]:
    """The libraries of these names."""
    return {name: (Path(compiler_folder()) / name).read_bytes() for name in sorted(names)}


@cache
def processor() -> str:
    """A digest of what this host's CPU can do: kernels are compiled for just that, and may crash on another."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else [platform.processor()]
    told = [
        line for line in lines if not re.match(r"processor|cpu MHz|bogomips|BogoMIPS|\w*apicid|.*core|cache|physical", line)
    ]
    return hashlib.blake2b("\n".join([platform.machine(), *told]).encode(), digest_size=8).hexdigest()


# ── taking in ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def install(parcel: Parcel) -> None:
    """Put what a parcel holds where the compiler looks for it; libraries for another CPU are left out, and compiled here."""
    for artifact in parcel.artifacts:
        torch.compiler.load_cache_artifacts(artifact)
    if parcel.facts.get("processor") != processor():
        return
    folder = Path(compiler_folder())
    for name, content in parcel.libraries.items():
        if not _LIBRARY.fullmatch(name):
            raise CompileError(
                f"artifacts name a library {name!r}, which does not lie in the compiler's folder; do not use them"
            )
        _write(folder / name, content)


def _write(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)
