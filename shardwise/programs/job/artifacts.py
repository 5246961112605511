"""`save_artifacts` and `load_artifacts`: compiled programs as one file, for later jobs.

The file names the torch, Python, Shardwise and meshes that its programs are for. That and a digest of the whole file are
checked before anything in it is unpacked: torch's artifacts are pickles, and the libraries native code.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...base.argument_checks import a_path, file_to_read, file_to_write, number, optional
from ...comm.failures import in_job
from ...comm.worlds import Shape, made_shapes
from ...errors import CompileError
from ...layouts.mesh import Mesh
from .compile import TIMEOUT
from .election import Post
from .serialize import CompiledPrograms, check_versions, install, pack, processor, read_libraries, unpack, versions, write_whole


def save_artifacts(path: str | Path, *, timeout: float = TIMEOUT) -> None:
    """Write what this job compiled to one file that serves every rank; in a job all ranks call it, and rank 0 writes.

    >>> import os, tempfile
    >>> file = os.path.join(tempfile.mkdtemp(), "programs")
    >>> save_artifacts(file)
    >>> load_artifacts(file)
    """
    number(timeout, "save_artifacts: timeout", above=0.0)
    target = (a_path if in_job() else file_to_write)(path, "save_artifacts: path")  # in a job one rank knows the folder
    saved = torch.compiler.save_cache_artifacts()
    artifacts = () if saved is None else (saved[0],)
    own = CompiledPrograms(_facts(), artifacts, read_libraries())
    names = [] if saved is None else [f"{kind} {key}" for kind, keys in saved[1].artifacts.items() for key in keys]
    if not in_job():
        _write(target, own)
    elif dist.get_rank() == 0:
        _collect(target, own, set(names), timeout)
    else:
        _contribute(own, names, timeout)


def load_artifacts(path: str | Path, mesh: Mesh | None = None) -> None:
    """Install what `save_artifacts` wrote, so that compiling the same program finds it; every rank calls it and reads the file.

    Refused for another torch, Python, Shardwise or other rules, and for other meshes: one mesh of the job that saved must have
    the axes and sizes of `mesh`, or of a mesh made so far. A damaged file is refused before anything of it is installed. The
    file holds pickles and native code, which run when they are used: load only what you trust.
    """
    mesh = optional(Mesh.from_torch, mesh)
    file, source = file_to_read(path, "load_artifacts: path"), f"artifact file {str(path)!r}"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CompileError(f"{source} cannot be read: {error.strerror}; give the file that sw.save_artifacts wrote") from None
    install(unpack(data, source, lambda facts: _check(facts, source, mesh)), source)


def _write(path: Path, programs: CompiledPrograms) -> None:
    try:
        write_whole(path, pack(programs))
    except OSError as error:
        raise CompileError(f"save_artifacts cannot write {str(path)!r}: {error.strerror}; give a file in a folder") from None


# ── facts and their check ─────────────────────────────────────────────────────────────────────────────────────────────


def _versions() -> dict[str, str]:
    return {**versions(), "python": platform.python_version()}


def _facts() -> dict[str, Any]:
    return {**_versions(), "processor": processor(), "meshes": [dict(shape) for shape in sorted(_shapes())]}


def _shapes() -> set[Shape]:
    """The shapes of the meshes made so far in the world that a mesh made now would live in."""
    return made_shapes("processes" if dist.is_available() and dist.is_initialized() else "simulated")


def _check(facts: dict[str, Any], source: str, mesh: Mesh | None) -> None:
    """Refuse a file whose facts are not such as `_facts` gives, or that is for other versions or meshes than those here."""
    meshes: Any = facts.get("meshes")
    has_texts = all(type(facts.get(name)) is str for name in (*_versions(), "processor"))
    has_meshes = type(meshes) is list and all(type(shape) is dict for shape in meshes)
    if not has_texts or not has_meshes or any(type(n) is not int or n < 1 for shape in meshes for n in shape.values()):
        raise CompileError(f"{source} does not say what it is for; save the artifacts again with this library")
    check_versions(facts, _versions(), source, "compile and save it again")
    shapes = {tuple(shape.items()) for shape in meshes}
    ours = _shapes() if mesh is None else {tuple(mesh.axis_sizes.items())}
    if shapes and not shapes & ours:
        here = f"here is {_as_text(ours)}; make such a mesh first, or compile and save for this one"
        none = "and there is no mesh here yet; load it after sw.init_mesh, or pass the mesh"
        raise CompileError(f"{source} is for the mesh {_as_text(shapes)}, {here if ours else none}")


def _as_text(shapes: set[Any]) -> str:
    return " or ".join("(" + ", ".join(f"{axis}={size}" for axis, size in shape) + ")" for shape in sorted(shapes))


# ── one file for all ranks ────────────────────────────────────────────────────────────────────────────────────────────


_FAILED = "save_artifacts failed on rank 0 with {}"


def _collect(path: Path, own: CompiledPrograms, have: set[str], timeout: float) -> None:
    """Write the programs of this rank and those that only others have, without libraries for other CPUs than this rank's; tell
    the others how it went."""
    post, rest = Post("artifacts"), []
    try:
        file_to_write(path, "save_artifacts: path")
        for rank in range(1, dist.get_world_size()):
            names = set(json.loads(_wait(post, f"names/{rank}", rank, timeout)))
            if names - have:
                have |= names
                rest.append(rank)
        post.put("wanted", json.dumps(rest).encode())
        others = [unpack(_wait(post, f"programs/{r}", r, timeout), f"rank {r}", lambda facts: None) for r in rest]
        alike = [part.libraries for part in (own, *others) if part.facts["processor"] == own.facts["processor"]]
        libraries = {name: content for part in alike for name, content in part.items()}
        _write(path, CompiledPrograms(own.facts, sum((part.artifacts for part in others), own.artifacts), libraries))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        post.put("error", reason.encode())
        raise CompileError(_FAILED.format(reason)) from error
    post.put("done", b"")


def _contribute(own: CompiledPrograms, names: list[str], timeout: float) -> None:
    """Send rank 0 the programs it lacks, and wait until it has written the file."""
    post, rank = Post("artifacts"), dist.get_rank()
    post.put(f"names/{rank}", json.dumps(names).encode())
    if rank in json.loads(_wait(post, "wanted", 0, timeout)):
        post.put(f"programs/{rank}", pack(own))
    _wait(post, "done", 0, timeout)


def _wait(post: Post, name: str, rank: int, timeout: float) -> bytes:
    def trouble(waited: float) -> str:
        if error := post.get("error"):
            return _FAILED.format(error.decode())
        late = f"save_artifacts: nothing from rank {rank} within {timeout:g} s; call it on every rank of the job"
        return late if waited > timeout else ""

    return post.wait(name, trouble)
