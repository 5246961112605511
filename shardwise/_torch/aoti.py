"""What packages and artifact files need of torch's private names: its ahead-of-time compiler, the loader of what that makes,
nested values, and the caches of what was compiled.

Only packages and artifact files use them. Supported: torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils._pytree import treespec_dumps as treespec_dumps
from torch.utils._pytree import treespec_loads as treespec_loads


def compile_package(program: Any, path: str, settings: dict[str, Any]) -> None:
    """Write an exported program, compiled ahead of time, to a file (a zip archive, `*.pt2`)."""
    compiler = importlib.import_module("torch._inductor").aoti_compile_and_package
    # The compiler writes what it finds out of this machine into its settings, which are part of the keys of all caches.
    written = importlib.import_module("torch._inductor.config").patch({"aot_inductor.metadata": {}})
    with warnings.catch_warnings(), written, _by_name(torch.ops.aten._grouped_mm.default), _numbered_dtypes():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of what it does itself
        compiler(program, package_path=path, inductor_configs=dict(settings))


def sizes_of_data() -> Any:
    """A block in which the tracer goes on behind operators whose results have a size that depends on data."""
    return importlib.import_module("torch._dynamo.config").patch(capture_dynamic_output_shape_ops=True)


def _by_name(operator: Any) -> Any:
    """In the block Inductor calls an operator by its name if it has no function for it: torch 2.11 takes one for granted."""
    importlib.import_module("torch._inductor.compile_fx")  # fills the table below
    lowering = importlib.import_module("torch._inductor.lowering")
    known = str(operator) in importlib.import_module("torchgen.aoti.fallback_ops").inductor_fallback_ops
    needed = not known and operator in lowering.lowerings
    return _with_entries(lowering.lowerings, {operator: lowering.fallback_handler(operator)} if needed else {})


#: The dtypes by their numbers in C++.
_NUMBERS = dict(
    enumerate(["uint8", "int8", "int16", "int32", "int64", "half", "float", "double", "complex32", "cfloat", "cdouble", "bool"])
) | {15: "bfloat16"}


def _numbered_dtypes() -> Any:
    """In the block an operator that is called by name is told dtypes by their numbers in C++: torch 2.11 reads them as these,
    and writes others, which makes float64 of float32 without an error."""
    table = importlib.import_module("torch._export.serde.serialize")._TORCH_TO_SERIALIZE_DTYPE
    numbers = {getattr(torch, name): number for number, name in _NUMBERS.items()}
    return _with_entries(table, numbers if torch.__version__.startswith("2.11.") else {})


@contextlib.contextmanager
def _with_entries(table: dict[Any, Any], entries: dict[Any, Any]) -> Iterator[None]:
    before = {key: table[key] for key in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(before)


def leaves_with_paths(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """What a nested value holds, each with where it is (`[0]['cache']`), and how it is nested."""
    leaves, structure = tree_flatten_with_path(value)
    return [(keystr(path), leaf) for path, leaf in leaves], structure


def open_package(path: str) -> Any:
    """What runs a compiled program on a list of tensors, which it empties: `boxed_run`. The public loader imports the compiler
    first, which takes seconds."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    single_threaded, runners, this_device = False, 1, -1
    return loader(path, "model", single_threaded, runners, this_device)


def is_group(name: str) -> bool:
    """Whether a process group goes by this name."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        resolve(name)
    except RuntimeError:
        return False
    return True


def read_artifacts(data: bytes) -> Any:
    """torch's artifacts as they were saved, by kind; None where torch cannot read them, or one would be kept outside the
    compiler's folder. (The public function warns of the first and looks at no name.)"""
    record = importlib.import_module("torch.compiler._cache").CacheArtifactManager
    log = logging.getLogger("torch.compiler._cache")
    log.disabled, before = True, log.disabled  # what it would warn of is raised
    try:
        found = record.deserialize(data)
    finally:
        log.disabled = before
    # Names are paths, but those of profiles, in which torch replaces slashes.
    names = [artifact.key for kind, several in (found or {}).items() if kind != "pgo" for artifact in several]
    return None if any(".." in re.split(r"[/\\]", name) or name[:1] in ("/", "\\") for name in names) else found


def keep_artifacts(found: Any) -> None:
    """Put artifacts into torch's caches, so that compiling the same again finds them."""
    importlib.import_module("torch.compiler._cache").CacheArtifactManager.populate_caches(found)
