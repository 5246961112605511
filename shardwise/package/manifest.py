"""Manifest: what a package says of itself, as JSON beside the compiled program: for which torch, Shardwise, job and chip it
is, and what goes in and comes out. All of it is judged before any native code is loaded.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..comm.worlds import join
from ..compiled.parcel import processor
from ..errors import CompileError
from ..identity import VERSION, library_key
from ..layout import Layout
from ..mesh import Mesh

_FILE = "extra/shardwise.json"


class Slot(NamedTuple):
    """One tensor that goes in or comes out.

    layout                 of a DTensor; none for a plain tensor, which is the same on every rank
    shape, stride, device  of what a rank holds
    """

    name: str
    layout: Layout | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        plain = f"plain tensor {self.dtype} {list(self.shape)} on {self.device}"
        return plain if self.layout is None else f"DTensor {self.layout}"


class Fixed(NamedTuple):
    """A number or a text that is a part of the program."""

    name: str
    value: Any

    def __str__(self) -> str:
        return repr(self.value)


class Manifest(NamedTuple):
    """What a package says of itself.

    facts       for which torch, Shardwise, device, mesh and job it is
    parameters  the tensors of the model, by name
    arguments   what a call is given, flat; `takes` says how it is nested
    order       the inputs of the compiled program, as positions in `parameters` and, after these, in `arguments`
    results     what a call gives, flat, each tensor with its position among the outputs of the program; `gives` nests it
    writes      the inputs that are written to, by their position as in `order`, each with the output that it becomes
    """

    facts: dict[str, Any]
    parameters: tuple[Slot, ...]
    arguments: tuple[Slot | Fixed, ...]
    takes: str
    order: tuple[int, ...]
    results: tuple[tuple[int | None, Any], ...]
    gives: str
    writes: tuple[tuple[int, Any], ...]


# ── as a file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def write(path: Path, manifest: Manifest) -> None:
    """Put a manifest into the archive of a compiled program."""
    told = {
        **manifest._asdict(),
        "parameters": [_write_value(slot) for slot in manifest.parameters],
        "arguments": [_write_value(value) for value in manifest.arguments],
        "results": [[at, _write_value(value)] for at, value in manifest.results],
    }
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{_root(archive)}/{_FILE}", json.dumps(told))


def read(path: Path) -> Manifest:
    """The manifest of a package, if that fits here."""
    source = f"package {str(path)!r}"
    try:
        with zipfile.ZipFile(path) as archive:
            name = f"{_root(archive)}/{_FILE}"
            if name not in archive.namelist():
                raise CompileError(f"{source} is nothing that sw.export wrote; export the model again with this library")
            damaged = archive.testzip()
            told = json.loads(archive.read(name)) if damaged is None else None
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CompileError(f"{source} is cut short or damaged: {error}; copy or export it again") from None
    if told is None:
        raise CompileError(f"{source} is cut short or damaged: {damaged} is not what was written; copy or export it again")
    _check_makers(told["facts"], source)
    return Manifest(
        told["facts"],
        tuple(_read_slot(value) for value in told["parameters"]),
        tuple(map(_read_value, told["arguments"])),
        told["takes"],
        tuple(told["order"]),
        tuple((at, _read_value(value)) for at, value in told["results"]),
        told["gives"],
        tuple((place, at) for place, at in told["writes"]),
    )


def _root(archive: zipfile.ZipFile) -> str:
    return next(iter(archive.namelist()), "").partition("/")[0]


def _write_value(value: Slot | Fixed) -> dict[str, Any]:
    if isinstance(value, Fixed):
        return value._asdict()
    layout = None if value.layout is None else value.layout.write()
    return {**value._asdict(), "layout": layout, "dtype": str(value.dtype).removeprefix("torch.")}


def _read_value(told: dict[str, Any]) -> Any:
    return Fixed(**told) if "value" in told else _read_slot(told)


def _read_slot(told: dict[str, Any]) -> Slot:
    layout = None if told["layout"] is None else Layout.read(told["layout"])
    shape, stride = tuple(told["shape"]), tuple(told["stride"])
    return Slot(**{**told, "layout": layout, "shape": shape, "stride": stride, "dtype": getattr(torch, told["dtype"])})


# ── what a package is for ─────────────────────────────────────────────────────────────────────────────────────────────


def facts_for(mesh: Mesh, ranks: int) -> dict[str, Any]:
    """What a package made here for a mesh, in a job of so many ranks, is for."""
    return {
        "torch": torch.__version__,
        "version": VERSION,
        "library": library_key(),
        "chip": _chip(mesh.device),
        "mesh": mesh.text,
        "ranks": ranks,
    }


def _chip(device: str) -> str:
    """What kernels are compiled for."""
    if not device.startswith("cuda"):
        return f"CPU {processor()}"
    return f"{torch.cuda.get_device_name()} {'.'.join(map(str, torch.cuda.get_device_capability()))}"


def _check_makers(facts: dict[str, Any], source: str) -> None:
    """Refuse what another torch or Shardwise made."""
    for name, made, here in (("torch", facts["torch"], torch.__version__), ("Shardwise", facts["version"], VERSION)):
        if made != here:
            raise CompileError(f"{source} is for {name} {made}, this is {name} {here}; export the model again with this one")
    if facts["library"] != library_key():
        made, here = (key.partition(" ")[2] for key in (facts["library"], library_key()))
        raise CompileError(
            f"{source} is for a Shardwise {VERSION} with other rules or code ({made}, here {here}); export the model again here"
        )


def check_world(manifest: Manifest, source: str, given: Mesh | None) -> Mesh:
    """The mesh of a package, if this process is in a job for which it was made."""
    mesh, ranks = Mesh.read(manifest.facts["mesh"]), manifest.facts["ranks"]
    if given is not None and given is not mesh:
        raise CompileError(
            f"{source} is for the mesh {_told(mesh)}, given is {_told(given)}; make such a mesh, or export for this one"
        )
    if not _is_there(mesh.device):
        raise CompileError(f"{source} is for the device {mesh.device!r}, and there is none here; export it for another device")
    if manifest.facts["chip"] != _chip(mesh.device):
        raise CompileError(
            f"{source} has kernels for {manifest.facts['chip']}, here is {_chip(mesh.device)}; export it on such a machine"
        )
    there = join(mesh.device)
    if not there:
        raise CompileError(
            f"{source} is for a job of {ranks} ranks with the mesh {_told(mesh)}, and no job is running; start it by torchrun, "
            "or call torch.distributed.init_process_group first"
        )
    if there != ranks:
        raise CompileError(
            f"{source} is for a job of {ranks} ranks with the mesh {_told(mesh)}, this one has {there} ranks; "
            f"start {ranks}, or export for a mesh of this job"
        )
    return mesh


def _is_there(device: str) -> bool:
    return device == "cpu" or torch.get_device_module(torch.device(device)).is_available()


def _told(mesh: Mesh) -> str:
    """A mesh with what tells it from others of its shape."""
    ranks = "" if mesh.ranks == tuple(range(len(mesh.ranks))) else f" of ranks {list(mesh.ranks)}"
    return f"{mesh}{ranks} on {mesh.device}" + (" (simulated)" if mesh.world == "simulated" else "")
