"""Artifacts as a file: what it is refused for, and that nothing in it is read before that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import worlds
from shardwise.errors import CompileError
from shardwise.programs import compile, compile_report, load_artifacts, save_artifacts
from shardwise.programs.job import artifacts, serialize
from shardwise.programs.job.serialize import CompiledPrograms, pack, unpack
from tests.helpers.kernel_count import kernels, settings


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Unless a test says that it takes artifacts in, doing so is an error."""
    if "takes_in" not in request.node.name:
        monkeypatch.setattr(serialize, "read_artifacts", lambda data: pytest.fail("was read before it was checked"))


def written(path: Path, change: dict[str, Any]) -> Path:
    facts = {**artifacts._facts(), **change}
    path.write_bytes(pack(CompiledPrograms(facts, (b"not an artifact",), {})))
    return path


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch": (
        {"torch": "2.9.1"},
        f"is for torch 2.9.1, this is torch {torch.__version__}; compile and save it again with this one",
    ),
    "python": ({"python": "3.8.0"}, "is for Python 3.8.0, this is Python "),
    "version": ({"version": "9.9"}, "is for Shardwise 9.9, this is Shardwise "),
    "rules": ({"library": "other"}, "with other rules or code ("),
    "mesh": ({"meshes": [{"dp": 77, "tp": 2}]}, "is for the mesh (dp=77, tp=2), here is "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    sw.init_mesh(refused=3)
    change, text = REFUSED[name]
    with pytest.raises(CompileError, match=re.escape(text)):
        load_artifacts(written(tmp_path / "file", change))


def test_refused_for_a_given_mesh(tmp_path: Path) -> None:
    saved, other = sw.init_mesh(saved=3), sw.init_mesh(saved=5)
    path = written(tmp_path / "file", {"meshes": [dict(saved.axis_sizes)]})
    with pytest.raises(CompileError, match=re.escape("is for the mesh (saved=3), here is (saved=5); make such a mesh first")):
        load_artifacts(path, other)
    with pytest.raises(pytest.fail.Exception, match="was read"):
        load_artifacts(path, saved)


def test_refused_before_there_is_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "file", {"meshes": [{"dp": 2}]})
    monkeypatch.setattr(artifacts, "made_shapes", lambda world: set())
    with pytest.raises(CompileError, match=r"there is no mesh here yet; load it after sw\.init_mesh, or pass the mesh"):
        load_artifacts(path)


CUTS: list[tuple[Callable[[bytes], bytes], str]] = [
    (
        lambda data: data[:-3],
        "is cut short or damaged: its .* bytes are not those that were saved; copy or save it again",
    ),
    (lambda data: data[:-1] + b"x", "is cut short or damaged"),
    (lambda data: data[:60], "is cut short or damaged: its 60 bytes are not those"),
    (lambda data: data[:24], "is cut short or damaged: its 24 bytes are not those"),
    (lambda data: b"", "was not written by sw.save_artifacts"),
    (lambda data: b"\x80\x04K\x01.", "was not written by sw.save_artifacts; save the artifacts again"),
]


@pytest.mark.parametrize(("cut", "text"), CUTS)
def test_damaged(cut: Callable[[bytes], bytes], text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "file", {"meshes": []})
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(CompileError, match=text) as caught:
        load_artifacts(path)
    assert str(caught.value).startswith(f"artifact file {str(path)!r} ")


def test_libraries_stay_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "folder"))
    here = {"processor": serialize.processor()}
    with pytest.raises(CompileError, match=r"names a library '\.\./evil\.so', which is not in the compiler's folder"):
        unpack(pack(CompiledPrograms(here, (), {"../evil.so": b""})), "a file", lambda facts: None)
    serialize.install(CompiledPrograms({"processor": "another"}, (), {"ab/cd.so": b"for another CPU"}), "a file")
    assert not (tmp_path / "folder" / "ab").exists()
    serialize.install(CompiledPrograms(here, (), {"ab/cd.main.so": b"library"}), "a file")
    assert (tmp_path / "folder" / "ab" / "cd.main.so").read_bytes() == b"library"


def test_importing_and_verifying_make_no_mesh_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier's own meshes are in every process, and would fit every file."""
    monkeypatch.setattr(worlds, "_asked_for", set())
    assert artifacts._shapes() == set()
    path = written(tmp_path / "file", {"meshes": [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}]})
    with pytest.raises(CompileError, match="there is no mesh here yet"):
        load_artifacts(path)
    sw.init_mesh(elsewhere=2)
    with pytest.raises(CompileError, match=re.escape("for the mesh (a=2) or (a=2, b=2) or (a=3), here is (elsewhere=2)")):
        load_artifacts(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"what was there")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialize.os, "fsync", full)
    with pytest.raises(CompileError, match=r"save_artifacts cannot write .*: No space left on device"):
        save_artifacts(path)
    assert path.read_bytes() == b"what was there" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(sw.ArgumentError, match="load_artifacts: path is a file to read, got the folder"):
        load_artifacts(tmp_path)


def test_parcels_arrive_as_they_were() -> None:
    sent = CompiledPrograms({"n": 1, "shape": {"dp": 2}}, (b"", b"abc"), {"ab/c.so": bytes(range(256)), "ab/d.so": b""})
    assert unpack(pack(sent), "here", lambda facts: None) == sent


# ── with a compiler ───────────────────────────────────────────────────────────────────────────────────────────────────


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().sum()


def compiled_step() -> str:
    """How the step was compiled."""
    x, w = torch.randn(4, 3), torch.randn(3, 5, requires_grad=True)
    loss = compile(step, fullgraph=True)(x, w)
    loss.backward(retain_graph=True)  # one process alone compiles the backward when it is asked for, and as it is asked for
    loss.backward()
    want = torch.autograd.grad(step(x, w), w)[0]
    torch.testing.assert_close(w.grad, 2 * want)
    return compile_report()[-1].how


def in_process(program: str, folder: Path, name: str, seed: str) -> list[str]:
    """The words that a program prints that compiles in a folder of that name."""
    more = {"TORCHINDUCTOR_CACHE_DIR": str(folder / name), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    code = f"from {__name__} import *; {program}"
    environment = {**os.environ, **settings(folder), **more}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_a_process_takes_in_what_another_one_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    assert in_process(f"print(compiled_step()); save_artifacts({path!r})", tmp_path, "there", "5") == ["compiled"]
    assert in_process(f"load_artifacts({path!r}); print(compiled_step())", tmp_path, "here", "6") == ["hit"]
    assert list(kernels(tmp_path)) == ["there"]


def test_another_backend_is_refused() -> None:
    with pytest.raises(CompileError, match=r"for another backend call torch\.compile itself"):
        compile(step, backend="eager")


def test_modules_and_decorators() -> None:
    model = compile(torch.nn.Linear(2, 2), disable=True)
    assert isinstance(model, torch.nn.Module)

    @compile(disable=True)
    def twice(x: int) -> int:
        return 2 * x

    assert twice(4) == 8
