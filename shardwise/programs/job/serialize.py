"""Compiled programs as bytes, to be installed by another process. Knows nothing of jobs and files.

The bytes hold torch's cache artifacts, and the libraries of kernels for the CPU: torch's artifacts name these but hold only
their source, so that every host would run the C++ compiler again. A digest of all that follows comes first, then a header of
plain JSON: both are checked before anything is unpacked. The digest detects damage, not forgery: programs are code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
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

from ..._torch.compiler import compiler_folder, keep_artifacts, read_artifacts
from ...errors import CompileError
from ...propagation.table import VERSION, library_key

_MAGIC = b"shardwise artifacts 3\n"
_DIGEST_SIZE = 32
_LIBRARY = re.compile(r"\w\w/\w+(\.\w+)*\.so")
#: zlib makes at most so many bytes of one.
_MOST_PER_BYTE = 1032


class CompiledPrograms(NamedTuple):
    """Facts about the programs (plain JSON), torch's artifacts, and libraries by their path in the compiler's folder."""

    facts: dict[str, Any]
    artifacts: tuple[bytes, ...]
    libraries: dict[str, bytes]


def pack(programs: CompiledPrograms) -> bytes:
    """Compiled programs as bytes."""
    body = zlib.compress(b"".join((*programs.artifacts, *programs.libraries.values())), level=1)
    libraries = {name: len(part) for name, part in programs.libraries.items()}
    sizes = {"artifacts": [len(part) for part in programs.artifacts], "libraries": libraries}
    text = json.dumps({"facts": programs.facts, **sizes}).encode()
    content = b"".join((len(text).to_bytes(8, "little"), text, body))
    return b"".join((_MAGIC, _digest(content), content))


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest()


def unpack(data: bytes, source: str, check: Callable[[dict[str, Any]], None]) -> CompiledPrograms:
    """The compiled programs in bytes that come from `source`; `check` sees the facts before anything is unpacked.

    >>> data = pack(CompiledPrograms({"mesh": "dp=2"}, (b"program",), {}))
    >>> unpack(data, "here", print).artifacts
    {'mesh': 'dp=2'}
    (b'program',)
    """
    if not data.startswith(_MAGIC):
        raise CompileError(f"{source} was not written by sw.save_artifacts; save the artifacts again with this library")
    start = len(_MAGIC) + _DIGEST_SIZE
    if _digest(memoryview(data)[start:]) != data[len(_MAGIC) : start]:
        raise CompileError(_damaged(source, f"its {len(data)} bytes are not those that were saved"))
    stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
    facts, artifacts, libraries = _read_header(data[start + 8 : stop], source)
    check(facts)
    body = io.BytesIO(_expanded(data[stop:], sum((*artifacts, *libraries.values())), source))
    return CompiledPrograms(
        facts, tuple([body.read(size) for size in artifacts]), {name: body.read(size) for name, size in libraries.items()}
    )


def _read_header(text: bytes, source: str) -> tuple[dict[str, Any], list[int], dict[str, int]]:
    """The facts, and the sizes of artifacts and libraries."""
    try:
        header = json.loads(text)
        facts, artifacts, libraries = (header.pop(name) for name in ("facts", "artifacts", "libraries"))
        sizes = [*artifacts, *libraries.values()]
        fits = not header and isinstance(facts, dict) and all(type(size) is int and size >= 0 for size in sizes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise CompileError(_damaged(source, "its header cannot be read"))
    outside = next((name for name in libraries if not _LIBRARY.fullmatch(name)), None)
    if outside is not None:
        raise CompileError(f"{source} names a library {outside!r}, which is not in the compiler's folder; do not use it")
    return facts, artifacts, libraries


def _expanded(body: bytes, size: int, source: str) -> bytes:
    """The body, if it holds as many bytes as the header says."""
    expand, found = zlib.decompressobj(), None
    if size <= _MOST_PER_BYTE * len(body):
        with contextlib.suppress(zlib.error):
            found = expand.decompress(body, size + 1)
    if found is None or len(found) != size or not expand.eof or expand.unused_data:
        text = f"its {len(body)} bytes of programs do not hold the {size} that its header tells of"
        raise CompileError(_damaged(source, text))
    return found


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


def read_libraries(before: frozenset[str] = frozenset()) -> dict[str, bytes]:
    """The libraries that this process runs by now and did not run before."""
    return {name: (Path(compiler_folder()) / name).read_bytes() for name in sorted(loaded_libraries() - before)}


@cache
def processor() -> str:
    """A digest of what this host's CPU can do: kernels are compiled for just that, and may crash on another."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else [platform.processor()]
    changing = re.compile(r"processor|cpu MHz|bogomips|BogoMIPS|\w*apicid|.*core|cache|physical")
    abilities = [line for line in lines if not changing.match(line)]
    return hashlib.blake2b("\n".join([platform.machine(), *abilities]).encode(), digest_size=8).hexdigest()


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def versions() -> dict[str, str]:
    """The versions of torch and of this library that compiled programs depend on."""
    return {"torch": torch.__version__, "version": VERSION, "library": library_key()}


def check_versions(facts: dict[str, Any], here: dict[str, str], source: str, again: str) -> None:
    """Refuse programs of other versions than those of this process; `again` says what to do once more."""
    for key, name in (("torch", "torch"), ("python", "Python"), ("version", "Shardwise")):
        if key in here and facts[key] != here[key]:
            raise CompileError(f"{source} is for {name} {facts[key]}, this is {name} {here[key]}; {again} with this one")
    made, own = (key.partition(" ")[2] for key in (facts["library"], here["library"]))
    if facts["library"] != here["library"]:
        raise CompileError(f"{source} is for a Shardwise {VERSION} with other rules or code ({made}, here {own}); {again} here")


# ── installing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def install(programs: CompiledPrograms, source: str) -> None:
    """Put compiled programs where the compiler looks for them; libraries for another CPU are left out, and compiled here."""
    found = [read_artifacts(artifact) for artifact in programs.artifacts]
    if None in found:
        raise CompileError(_damaged(source, "torch cannot read the programs in it"))
    for each in found:
        keep_artifacts(each)
    if programs.facts.get("processor") == processor():
        for name, content in programs.libraries.items():
            path = Path(compiler_folder()) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all, also after a crash."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
