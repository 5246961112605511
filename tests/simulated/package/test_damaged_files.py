"""Files that were damaged or forged: refused with an error of ours or harmless; no raw error, no hang, no file written.

Damage is a flipped bit, a sharding, a run of bytes gone, doubled, moved or overwritten. Forgery is an edit of what the file
says of itself, with every digest made anew: what makes no sense must then be refused for that.
"""

from __future__ import annotations

import json
import random
import re
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.layouts.from_placements import make_layout
from shardwise.package import load, manifest
from shardwise.package.manifest import Fixed, Manifest, Slot, facts_for, seal, write
from shardwise.programs.job import artifacts, serialize
from shardwise.programs.job.serialize import CompiledPrograms, pack
from shardwise.tensor.wrapping import wrap
from tests.conftest import SEED

TIMES = 1000
#: Seconds that the worst file may take: a hang is a minute or more, and a busy machine is slow.
PATIENCE = 10.0
JOB = "cpu;processes;dp=2,tp=2;;;auto;"


# ── the files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one for the compiler inside; the mesh that the files are for is made."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    monkeypatch.setattr(manifest, "join", lambda device: 4)
    monkeypatch.setattr(load, "transport", lambda mesh: SimpleNamespace(ready=lambda mesh: None))
    monkeypatch.setattr(load, "open_package", lambda path: SimpleNamespace(boxed_run=run))
    (tmp_path / "compiler").mkdir()
    sw.init_mesh(dp=2, tp=2)
    return tmp_path


def artifact_file(path: Path) -> None:
    CacheArtifactManager._ensure_cache_artifacts_registered()
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact("aot_autograd", "a1b2", bytes(range(256)))
        saved, _ = CacheArtifactManager.serialize()
    libraries = {"ab/c1.main.so": bytes(300), "ab/c2.so": b"native code"}
    path.write_bytes(pack(CompiledPrograms(artifacts._facts(), (saved, saved), libraries)))


def package_file(path: Path) -> None:
    mesh = sw.Mesh.read(JOB)
    cut = make_layout((4, 6), mesh, [sw.Shard(0), sw.Replicate()])
    weight = make_layout((6, 8), mesh["tp"], [sw.Shard(1)])
    of = {"dtype": torch.float32, "device": "cpu"}
    told = Manifest(
        facts_for(mesh, 4),
        (Slot("w", weight, (6, 4), (4, 1), **of), Slot("n", None, (3,), (1,), **of)),
        (Slot("x", cut, (2, 6), (1, 2), **of), Fixed("scale", 2.0), Slot("extra", None, (2, 3), (3, 1), **of)),
        nest('"builtins.tuple"', "null", nest('"builtins.tuple"', "null", LEAF, LEAF), nest(DICT, r'"[\"extra\"]"', LEAF)),
        (1, 0, 2, 4),
        ((0, Slot("result 0", cut, (2, 6), (6, 1), **of)), (None, Fixed("result 1", "text"))),
        nest(DICT, r'"[\"y\", \"name\"]"', LEAF, LEAF),
        ((1, 1),),
    )
    told = told._replace(takes=f"[1, {told.takes}]", gives=f"[1, {told.gives}]")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/version", "1")
        archive.writestr("package/data/aotinductor/model/code.so", bytes(range(256)) * 8)
    write(path, told)


LEAF, DICT = '{"type": null, "context": null, "children_spec": []}', '"builtins.dict"'


def nest(kind: str, context: str, *children: str) -> str:
    context = '"null"' if context == "null" else context
    return f'{{"type": {kind}, "context": {context}, "children_spec": [{", ".join(children)}]}}'


def load_artifact_file(path: Path) -> Any:
    sw.load_artifacts(path)
    return "taken in"


def load_package_file(path: Path) -> Any:
    """What the package gives for the inputs that its model had."""
    program = sw.load_package(path)
    mesh = sw.Mesh.read(JOB)
    weight = make_layout((6, 8), mesh["tp"], [sw.Shard(1)])
    cut = make_layout((4, 6), mesh, [sw.Shard(0), sw.Replicate()])
    program.bind({"w": wrap(sw.DTensor, torch.ones(6, 4), weight), "n": torch.zeros(3)})
    return program(wrap(sw.DTensor, torch.ones(2, 6), cut), 2.0, extra=torch.ones(2, 3))


def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What stands for the program of the package."""
    return [torch.ones(2, 6), torch.ones(3)]


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "artifacts": (artifact_file, load_artifact_file),
    "package": (package_file, load_package_file),
}


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes, changed somewhere; half of the changes are near an end, where headers are."""
    size = len(data)
    at = chance.choice((chance.randrange(size), min(chance.randrange(300), size - 1), max(size - 1 - chance.randrange(300), 0)))
    stop = min(size, at + chance.choice((1, 2, 8, 100, size)))
    return chance.choice(
        (
            lambda: data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + data[stop:],
            lambda: data[:stop] + data[at:],
            lambda: data[:at] + chance.randbytes(stop - at) + data[stop:],
            lambda: data[:at] + bytes(stop - at) + data[stop:],
            lambda: data + data[at:stop],
            lambda: data[at:] + data[:at],
        )
    )()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(read: Callable[[Path], Any], path: Path) -> str:
    """How a file is refused, nothing where it is taken; another error goes through. What is refused has written nothing."""
    before, start = tree(path.parent), time.monotonic()
    try:
        read(path)
        refused = ""
    except ShardwiseError as error:
        refused = str(error)
    assert time.monotonic() - start < PATIENCE
    after = tree(path.parent)
    assert after == before if refused else all(name.startswith("compiler/") for name in after.keys() - before.keys())
    return refused


@pytest.mark.parametrize("kind", KINDS)
def test_damage(kind: str, folder: Path) -> None:
    make, read = KINDS[kind]
    make(path := folder / "file")
    whole, chance = path.read_bytes(), random.Random(f"{SEED} damage {kind}")
    for number in range(TIMES):
        path.write_bytes(changed := damaged(whole, chance))
        assert refusal(read, path) or changed == whole, f"damage number {number} was not noticed"
    path.write_bytes(whole)
    assert not refusal(read, path)
    assert (len(tree(folder)) == 1) == (kind == "package")


# ── forgery ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ABSURD = (None, True, -1, 0, 1, 7, 10**9, 2**63, 10**400, 1.5, "", "..", "x" * 999, "float32", "nn", [], [[]], {}, {"a": 1})


def forged(told: Any, chance: random.Random) -> Any:
    """What a file says of itself with one entry changed, gone, doubled, or exchanged with another."""
    spots = [(holder, key) for holder in nodes(told) for key in (holder if isinstance(holder, dict) else range(len(holder)))]
    holder, key = chance.choice(spots)
    other, its = chance.choice(spots)
    if chance.random() < 0.25:
        holder[key], other[its] = other[its], holder[key]
    elif chance.random() < 0.3:
        del holder[key]
    elif isinstance(holder, list) and chance.random() < 0.3:
        holder.insert(key, holder[key])
    elif isinstance(holder[key], str) and chance.random() < 0.7:
        holder[key] = misspelt(holder[key], chance)
    else:
        holder[key] = chance.choice(ABSURD)
    return told


def nodes(value: Any) -> Iterator[Any]:
    """The lists and dictionaries in a nested value that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from nodes(item)


def misspelt(text: str, chance: random.Random) -> str:
    """A text with a number or a sign in it changed."""
    found = list(re.finditer(r"\d+|\W|\w+", text)) or [re.match("", text)]
    word = chance.choice(found)
    told = chance.choice(
        ("0", "-1", "1000000000", "99999999999999999999", ",", ";", "@", ":", "*", " ", "", "..", "sum@tp", "tp")
    )
    return text[: word.start()] + told + text[word.end() :]


def forge_artifacts(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    start = len(serialize._MAGIC) + serialize._DIGEST_SIZE
    (size,) = struct.unpack_from("<Q", data, start)
    text, body = data[start + 8 : start + 8 + size], data[start + 8 + size :]
    if chance.random() < 0.2:
        body = damaged(body, chance)
    else:
        text = json.dumps(forged(json.loads(text), chance)).encode()
    content = struct.pack("<Q", chance.choice((len(text),) * 9 + (2**63,))) + text + body
    path.write_bytes(serialize._MAGIC + serialize._digest(content) + content)


def forge_package(path: Path, chance: random.Random) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = "package/extra/shardwise.json"
    told = json.loads(members[name])
    if chance.random() < 0.2:  # inside the texts that say how values are nested
        which = chance.choice(("takes", "gives"))
        told[which] = json.dumps(forged(json.loads(told[which]), chance))
    else:
        told = forged(told, chance)
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**members, name: json.dumps(told).encode()}.items():
            archive.writestr(member, content)
    seal(path)


FORGE = {"artifacts": forge_artifacts, "package": forge_package}


@pytest.mark.parametrize("kind", KINDS)
def test_forgery(kind: str, folder: Path) -> None:
    make, read = KINDS[kind]
    make(path := folder / "file")
    whole, chance = path.read_bytes(), random.Random(f"{SEED} forgery {kind}")
    refused = 0
    for _ in range(TIMES):
        path.write_bytes(whole)
        FORGE[kind](path, chance)
        refused += bool(refusal(read, path))
    # Another name of a parameter makes sense, for instance, and so does another of the many meshes that tests have made.
    assert refused > 0.5 * TIMES


NAMES = (
    "../evil.so",
    "/evil.so",
    "package/../../evil.so",
    "package/./evil.so",
    "package//evil.so",
    "C:/evil.so",
    "package\\..\\evil",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_package_stays_in_its_folder(name: str, folder: Path) -> None:
    package_file(path := folder / "file")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"native code")
    seal(path)
    assert "in it would leave its folder; copy or export it again" in refusal(load_package_file, path)


def test_a_package_that_expands_or_has_two_of_a_name_is_refused(folder: Path) -> None:
    package_file(path := folder / "file")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("package/zeros", bytes(1 << 20), compress_type=zipfile.ZIP_DEFLATED)
    seal(path)
    assert "'package/zeros' in it is compressed" in refusal(load_package_file, path)
    package_file(path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("package/version", b"2")
    seal(path)
    assert "two files in it have one name" in refusal(load_package_file, path)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "ranks": (
        lambda told: told["facts"].update(mesh="cpu;processes;dp=1000000000;;;auto;"),
        "a mesh of 1000000000 ranks is in no",
    ),
    "job": (lambda told: told["facts"].update(ranks=10**9), "the number of ranks is 1000000000, and is a number from 0 to"),
    "stride": (lambda told: told["arguments"][0].update(stride=[10**12, 1]), "x: its stride has gaps"),
    "shape": (lambda told: told["arguments"][0].update(shape=[3, 6]), "of which no rank holds torch.float32 [3, 6] on cpu"),
    "layout": (
        lambda told: told["parameters"][0].update(layout=f"{JOB}tp [_,@tp:4:3]  float32 6,8 8,1"),
        "do not add up to their",
    ),
    "another": (
        lambda told: told["parameters"][0].update(layout="cpu;processes;tp=1000000000;;;auto; []  float32  "),
        "on another mesh",
    ),
    "enum": (
        lambda told: told.update(gives=told["gives"].replace(r"\"name\"", r"{\"__enum__\": true, \"fqn\": \"this:x\"}")),
        "values are nested in a 'builtins.dict'",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_a_forged_package_is_refused_for(name: str, folder: Path) -> None:
    package_file(path := folder / "file")
    change, text = FORGED[name]
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    told = json.loads(members["package/extra/shardwise.json"])
    change(told)
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**members, "package/extra/shardwise.json": json.dumps(told).encode()}.items():
            archive.writestr(member, content)
    assert "its bytes are not those that were written" in refusal(load_package_file, path)
    seal(path)
    assert text in (told_why := refusal(load_package_file, path)), told_why
