"""The manifest of a package: JSON beside the compiled program that names its torch, Shardwise, job and chip, and describes its
inputs and outputs. It is checked before any native code is loaded.

A package ends with a digest of all its bytes before that. The digest detects damage, not forgery, so every entry of a manifest
is also checked for its form, its bounds and against the other entries.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from .._torch.compiler import treespec_loads
from ..comm.worlds import join
from ..errors import CompileError
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.placement import KINDS
from ..programs.job.serialize import check_versions, processor, versions

_FILE = "extra/shardwise.json"
#: What a package ends with, as the comment of the archive: a digest in hexadecimal digits.
_SEAL_SIZE = 64
#: A package for more ranks than this is refused: a mesh is a list of them.
_MOST_RANKS = 1 << 20
#: How inputs and results may be nested.
_NESTS = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
_PLAIN = (int, float, bool, str, type(None))
_FACTS = {"torch": str, "version": str, "library": str, "chip": str, "mesh": str, "ranks": int}


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
    """Put a manifest into the archive of a compiled program, and seal the archive."""
    entries = {
        **manifest._asdict(),
        "parameters": [_write_value(slot) for slot in manifest.parameters],
        "arguments": [_write_value(value) for value in manifest.arguments],
        "results": [[at, _write_value(value)] for at, value in manifest.results],
    }
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{_root(archive)}/{_FILE}", json.dumps(entries))
    seal(path)


def seal(path: Path) -> None:
    """End an archive with a digest of all that it holds."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"0" * _SEAL_SIZE
    with path.open("r+b") as file:
        found = _digest(file)
        file.seek(-_SEAL_SIZE, os.SEEK_END)
        file.write(found)
        file.flush()
        os.fsync(file.fileno())


def _digest(file: BinaryIO) -> bytes:
    """The digest of what stands before the seal."""
    left = file.seek(0, os.SEEK_END) - _SEAL_SIZE
    file.seek(0)
    found = hashlib.blake2b(digest_size=_SEAL_SIZE // 2)
    while left > 0 and (chunk := file.read(min(left, 1 << 20))):
        found.update(chunk)
        left -= len(chunk)
    return found.hexdigest().encode()


def read(path: Path) -> Manifest:
    """The manifest of a package, if that fits here."""
    source = f"package {str(path)!r}"
    try:
        entries = _opened(path, source)
    except (FileNotFoundError, CompileError):
        raise
    except Exception as error:  # whatever reading an archive that somebody wrote may raise
        raise CompileError(f"{source} is cut short or damaged: {error}; copy or export it again") from None
    try:
        _keys(entries, Manifest._fields, "the manifest")
        facts = entries["facts"]
        _keys(facts, tuple(_FACTS), "what it is for")
        for name, kind in _FACTS.items():
            _require(type(facts[name]) is kind, f"{name} is {facts[name]!r}, and is a {kind.__name__}")
        check_versions(facts, versions(), source, "export the model again")
        mesh = _read_mesh(facts)
        if mesh.device != "cpu" and not torch.get_device_module(torch.device(mesh.device)).is_available():
            remedy = "and there is none here; export it for another device"
            raise CompileError(f"{source} is for the device {mesh.device!r}, {remedy}")
        return _read_manifest(entries, mesh)
    except CompileError:
        raise
    except Exception as error:  # as above: numbers, names and texts that nobody has looked at yet
        raise CompileError(f"{source} says of itself what cannot be: {error}; export the model again") from None


def _opened(path: Path, source: str) -> Any:
    """What a sealed archive says of itself."""
    with path.open("rb") as file:
        whole = _digest(file) == file.read()
    with zipfile.ZipFile(path) as archive:
        name = f"{_root(archive)}/{_FILE}"
        if name not in archive.namelist():
            raise CompileError(f"{source} was not written by sw.export; export the model again with this library")
        _require(whole, "its bytes are not those that were written")
        _check_members(archive)
        return json.loads(archive.read(name))


def _check_members(archive: zipfile.ZipFile) -> None:
    """Refuse what would be unpacked elsewhere, or to more than it is."""
    root, names = _root(archive), archive.namelist()
    for info in archive.infolist():
        name, parts = info.filename, info.filename.split("/")
        inside = parts[0] == root and not {"", ".", ".."} & set(parts) and "\\" not in name and ":" not in name
        _require(inside, f"{name!r} in it would leave its folder")
        stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        _require(stored, f"{name!r} in it is compressed")
    _require(len(set(names)) == len(names), "two files in it have one name")


def _root(archive: zipfile.ZipFile) -> str:
    return next(iter(archive.namelist()), "").partition("/")[0]


def _write_value(value: Slot | Fixed) -> dict[str, Any]:
    if isinstance(value, Fixed):
        return value._asdict()
    layout = None if value.layout is None else value.layout.write()
    return {**value._asdict(), "layout": layout, "dtype": str(value.dtype).removeprefix("torch.")}


# ── what it may say ───────────────────────────────────────────────────────────────────────────────────────────────────


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _keys(entries: Any, names: Sequence[str], what: str) -> None:
    _require(type(entries) is dict and set(entries) == set(names), f"{what} has other entries than {', '.join(names)}")


def _number(value: Any, end: float, what: str) -> int:
    """An integer from 0 to below an end."""
    _require(type(value) is int and 0 <= value < end, f"{what} is {value!r}, and is a number from 0 to below {end}")
    return value


def _read_mesh(facts: dict[str, Any]) -> Mesh:
    """The mesh that a package is for; its ranks are counted before they are listed."""
    text, ranks = facts["mesh"], _number(facts["ranks"], _MOST_RANKS + 1, "the number of ranks")
    axes = (text.split(";") + [""] * 3)[2].split(",")
    size = math.prod(int(axis.rpartition("=")[2]) for axis in axes)
    _require(0 < size <= ranks, f"a mesh of {size} ranks is in no job of {ranks}")
    mesh = Mesh.read(text)
    _require(mesh.text == text and mesh.root is mesh and mesh.world == "processes", f"{text!r} is no mesh of processes")
    _require(all(0 <= rank < ranks for rank in mesh.ranks), f"{text!r} has ranks that no job of {ranks} has")
    return mesh


def _read_manifest(entries: dict[str, Any], mesh: Mesh) -> Manifest:
    parameters = tuple(_read_slot(value, mesh) for value in entries["parameters"])
    arguments = tuple(_read_value(value, mesh) for value in entries["arguments"])
    known = (*parameters, *arguments)
    for slot in known:
        _require(isinstance(slot, Fixed) or _is_dense(slot), f"{slot.name}: its stride has gaps")
    order = tuple(_number(place, len(known), "an input") for place in entries["order"])
    results = tuple(_read_result(at, value, mesh) for at, value in entries["results"])
    goals = [_number(place, len(known), "what is written to") for place, _ in entries["writes"]]
    writes = tuple((place, _number(at, math.inf, "output")) for place, at in entries["writes"])
    _require(all(isinstance(known[place], Slot) for place in (*order, *goals)), "an input of the program is no tensor")
    _require(len(set(order)) == len(order), "an input of the program is given twice")
    _require(len({slot.name for slot in parameters}) == len(parameters), "two parameters have one name")
    for text, several in (("takes", arguments), ("gives", results)):
        found = treespec_loads(checked_nesting(entries[text])).num_leaves
        _require(found == len(several), f"{text!r} nests {found} values, and there are {len(several)}")
    return Manifest(entries["facts"], parameters, arguments, entries["takes"], order, results, entries["gives"], writes)


def checked_nesting(text: str) -> str:
    """The text of nested tuples, lists and dictionaries, and of nothing else: torch's own reader imports what a text names."""
    protocol, nest = json.loads(text)
    _require(protocol == 1, f"values are nested by protocol {protocol!r}")
    left = [nest]
    while left:
        node = left.pop()
        _keys(node, ("type", "context", "children_spec"), "a nest of values")
        kind, context, children = node["type"], node["context"], node["children_spec"]
        if kind is None:
            _require(context is None and children == [], "a leaf of a nest has leaves")
            continue
        keys = json.loads(context)
        named = type(keys) is list and all(type(key) in _PLAIN for key in keys) and len(keys) == len(children)
        fits = named if kind in _NESTS[2:] else keys is None
        _require(kind in _NESTS and fits, f"values are nested in a {kind!r} of {context!r}")
        left += children
    return text


def _read_result(at: Any, entries: Any, mesh: Mesh) -> tuple[int | None, Slot | Fixed]:
    value = _read_value(entries, mesh)
    _require((at is None) == isinstance(value, Fixed), f"{value.name} is no tensor and an output, or neither")
    return None if at is None else _number(at, math.inf, "output"), value


def _read_value(entries: Any, mesh: Mesh) -> Slot | Fixed:
    if type(entries) is dict and "value" in entries:
        _keys(entries, Fixed._fields, "a value")
        plain = type(entries["name"]) is str and type(entries["value"]) in _PLAIN
        _require(plain, f"{entries['name']!r} is no number and no text")
        return Fixed(**entries)
    return _read_slot(entries, mesh)


def _read_slot(entries: Any, mesh: Mesh) -> Slot:
    _keys(entries, Slot._fields, "a tensor")
    name, dtype = entries["name"], getattr(torch, entries["dtype"])
    _require(type(name) is str and isinstance(dtype, torch.dtype), f"{name!r} has no dtype {entries['dtype']!r}")
    shape = tuple(_number(n, math.inf, f"{name}: a size") for n in entries["shape"])
    stride = tuple(_number(n, math.inf, f"{name}: a stride") for n in entries["stride"])
    _require(len(shape) == len(stride), f"{name} has {len(shape)} sizes and {len(stride)} strides")
    layout, kind = None, torch.device(mesh.device).type
    _require(entries["device"] in ("cpu", kind), f"{name} is on {entries['device']!r}, and the mesh on {mesh.device}")
    if entries["layout"] is not None:
        layout = _read_layout(entries["layout"], mesh)
        fits = layout.local_shape(0) == shape and layout.dtype == dtype and entries["device"] == kind
        _require(fits, f"{name} is {layout}, of which no rank holds {dtype} {list(shape)} on {entries['device']}")
    return Slot(name, layout, shape, stride, dtype, entries["device"])


def _is_dense(slot: Slot) -> bool:
    """Whether the elements of a tensor fill its memory: programs are compiled for inputs without gaps."""
    order = sorted(range(len(slot.shape)), key=lambda dim: (slot.stride[dim], slot.shape[dim]), reverse=True)
    return torch.empty_strided(slot.shape, slot.stride, device="meta").permute(order).is_contiguous()


def _read_layout(text: str, mesh: Mesh) -> Layout:
    """The layout that a text tells, if there can be such a one on the mesh of a package."""
    _require(text.startswith(mesh.text), f"{text!r} is on another mesh than {mesh.text!r}")  # or on a sub-mesh of it
    layout = Layout.read(text)
    sizes = layout.mesh.axis_sizes
    axes = [axis for dim in layout.dims for factor in dim for axis in factor.axes] + [axis for axis, _ in layout.partials]
    _require(len(set(axes)) == len(axes) and set(axes) <= set(sizes), f"{text!r} names an axis twice, or one that is not there")
    for factor in (factor for dim in layout.dims for factor in dim):
        fits = len(factor.sizes) == math.prod(sizes[axis] for axis in factor.axes) and sum(factor.sizes) == factor.size
        _require(fits, f"{text!r}: shards do not add up to their dim")
        _require(min(factor.sizes) >= 0, f"{text!r} has a negative size")
    _require(all(kind in KINDS for _, kind in layout.partials), f"{text!r} is partial what no Partial is")
    _require(len(layout.stride) == layout.ndim and min(layout.stride, default=0) >= 0, f"{text!r} has strides of no tensor")
    _require(isinstance(layout.dtype, torch.dtype) and layout.even and layout.write() == text, f"{text!r} is no layout")
    return layout


# ── what a package is for ─────────────────────────────────────────────────────────────────────────────────────────────


def facts_for(mesh: Mesh, ranks: int) -> dict[str, Any]:
    """What a package made here for a mesh, in a job of so many ranks, is for."""
    return {**versions(), "chip": _chip(mesh.device), "mesh": mesh.text, "ranks": ranks}


def _chip(device: str) -> str:
    """What kernels are compiled for."""
    if not device.startswith("cuda"):
        return f"CPU {processor()}"
    return f"{torch.cuda.get_device_name()} {'.'.join(map(str, torch.cuda.get_device_capability()))}"


def check_world(manifest: Manifest, source: str, given: Mesh | None) -> Mesh:
    """The mesh of a package, if this process is in a job for which it was made."""
    mesh, ranks, chip = Mesh.read(manifest.facts["mesh"]), manifest.facts["ranks"], manifest.facts["chip"]
    shown = _as_text(mesh)
    if given is not None and given is not mesh:
        remedy = "make such a mesh, or export for this one"
        raise CompileError(f"{source} is for the mesh {shown}, given is {_as_text(given)}; {remedy}")
    if chip != _chip(mesh.device):
        raise CompileError(f"{source} has kernels for {chip}, here is {_chip(mesh.device)}; export it on such a machine")
    there = join(mesh.device)
    if there != ranks:
        found = f"this one has {there} ranks; start {ranks}, or export for a mesh of this job"
        none = "and no job is running; start it by torchrun, or call torch.distributed.init_process_group first"
        raise CompileError(f"{source} is for a job of {ranks} ranks with the mesh {shown}, {found if there else none}")
    return mesh


def _as_text(mesh: Mesh) -> str:
    """A mesh with its ranks, device and world where they are not the usual ones."""
    ranks = "" if mesh.ranks == tuple(range(len(mesh.ranks))) else f" of ranks {list(mesh.ranks)}"
    return f"{mesh}{ranks} on {mesh.device}" + (" (simulated)" if mesh.world == "simulated" else "")
