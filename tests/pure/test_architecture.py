"""The shape of the package, read from its syntax trees: layers, cycles, sizes, and names that stay in their place.

A check takes one parsed file and gives the lines that break it, so each is shown below to find what it looks for.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardwise"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ROW = re.compile(r"^\| `([\w./]+)` \|", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+/?)  +\S", re.MULTILINE)


def files_of(folder: str) -> list[str]:
    """The files of a folder in the order that the docstring of its `__init__` lists them, which itself comes last."""
    text = (PACKAGE / folder / "__init__.py").read_text()
    names = ENTRY.findall(ast.get_docstring(ast.parse(text), clean=False) or "")
    below = [files_of(f"{folder}/{name[:-1]}") if name.endswith("/") else [f"{folder}/{name}.py"] for name in names]
    return [file for several in below for file in several] + [f"{folder}/__init__.py"]


ROWS = ROW.findall((ROOT / "docs" / "layout.md").read_text())
LAYERS = [file for row in ROWS for file in (files_of(row[:-1]) if row.endswith("/") else [row])]

MAX_BODY, MAX_FILE = 50, 600
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PEER = re.compile(r"torch\.distributed\._?tensor(\.|$)")
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)")
# An operator's schema is data, whatever its name: torch.ops.aten._softmax is no private attribute of torch.
OPERATORS = re.compile(r"torch\.ops(\.|$)")
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|Users|work|opt|mnt)/\w")
TEXT_FILES = (".py", ".md", ".toml", ".lock", "Makefile", "run")


class Source(NamedTuple):
    """One parsed file: its dotted module name, whether it is a package's `__init__`, its lines and its tree."""

    module: str
    is_package: bool
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, file: str, text: str) -> "Source":
        module, is_package = module_name(file), file.endswith("__init__.py")
        return cls(module, is_package, text, ast.parse(text))


def module_name(file: str) -> str:
    parts = ["shardwise", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read(file: str) -> Source:
    return Source.parse(file, (PACKAGE / file).read_text())


# ── names ──


def imported(source: Source) -> Iterator[tuple[ast.stmt, str, str]]:
    """Each import as (statement, dotted target, name it binds); `from a import b` is both `a` and `a.b`."""
    base = source.module.split(".") if source.is_package else source.module.split(".")[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            prefix = base[: len(base) - node.level + 1] if node.level else []
            stem = ".".join([*prefix, *([node.module] if node.module else [])])
            yield node, stem, ""
            for alias in node.names:
                yield node, f"{stem}.{alias.name}", alias.asname or alias.name


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain on a name, else nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def used_names(source: Source) -> Iterator[tuple[int, str]]:
    """Every imported or mentioned dotted name, aliases resolved: `t.ones` is `torch.ones` after `import torch as t`."""
    alias_of = {bound: target for _, target, bound in imported(source) if bound and "." not in bound}
    for statement, target, _ in imported(source):
        yield statement.lineno, target
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            yield node.lineno, f"{alias_of.get(first, first)}.{rest}"


# ── checks: one file in, offending lines out ──


def imports_inside_functions(source: Source) -> list[int]:
    functions = [node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS)]
    inside = {child for node in functions for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)}
    return sorted(node.lineno for node in inside)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code of a function, its docstring not counted."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


def long_functions(source: Source) -> list[int]:
    functions = (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS))
    return [node.lineno for node in functions if body_lines(node) > MAX_BODY]


def long_files(source: Source) -> list[int]:
    lines = source.text.count("\n")
    return [lines] if lines > MAX_FILE else []


def raises_without_message(source: Source) -> list[int]:
    raises = (node for node in ast.walk(source.tree) if isinstance(node, ast.Raise))
    return [node.lineno for node in raises if is_silent(node.exc)]


def is_silent(exception: ast.expr | None) -> bool:
    """`raise Name` and `raise Name()`; a bare `raise` passes on an exception that has its message."""
    return isinstance(exception, ast.Name) or (isinstance(exception, ast.Call) and not exception.args)


def global_statements(source: Source) -> list[int]:
    return [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Global)]


def uses_of_the_peer(source: Source) -> list[int]:
    return sorted({line for line, name in used_names(source) if PEER.match(name)})


def private_torch_names(source: Source) -> list[int]:
    if source.module.startswith("shardwise._torch.") or source.module == "shardwise.verify.samples":
        return []
    return sorted({line for line, n in used_names(source) if PRIVATE.match(n) and not OPERATORS.match(n)})


CHECKS: list[Callable[[Source], list[int]]] = [
    imports_inside_functions,
    long_functions,
    long_files,
    raises_without_message,
    global_statements,
    uses_of_the_peer,
    private_torch_names,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_has_no(check):
    found = [f"shardwise/{file}:{line}" for file in FILES for line in check(read(file))]
    assert not found, "\n".join([check.__name__, *found])


LONG = "def f():\n" + "    x = 1\n" * (MAX_BODY + 1)
EXAMPLES = [
    (imports_inside_functions, "def f():\n    import os", "import os"),
    (long_functions, LONG, LONG.replace("    x = 1\n", "", 1)),
    (long_files, "\n" * (MAX_FILE + 1), "\n" * MAX_FILE),
    (raises_without_message, "raise ValueError", "raise ValueError('no')"),
    (raises_without_message, "raise ValueError()", "try: f()\nexcept E: raise"),
    (global_statements, "def f():\n    global x", "def f():\n    nonlocal_ = 1"),
    (uses_of_the_peer, "from torch.distributed.tensor import Shard", "from torch.distributed import device_mesh"),
    (uses_of_the_peer, "from torch.distributed import tensor", "from torch import distributed"),
    (uses_of_the_peer, "import torch.distributed as d\nd.tensor.Shard", "import torch.distributed as d\nd.tensors"),
    (private_torch_names, "import torch\ntorch._C.x", "import torch\ntorch.ops.aten._softmax.default"),
    (private_torch_names, "from torch import _prims", "from torch import __version__"),
    (private_torch_names, "from torch.utils._pytree import tree_map", "from torch.utils import data"),
    (private_torch_names, "from torch import Tensor as T\nT._make_subclass", "def f(x): return x._local"),
]


@pytest.mark.parametrize(("check", "bad", "good"), EXAMPLES, ids=lambda value: getattr(value, "__name__", ""))
def test_check_finds_what_it_looks_for(check, bad, good):
    assert check(Source.parse("mesh.py", bad))
    assert not check(Source.parse("mesh.py", good))


# ── layers ──


def own_imports(source: Source, known: set[str]) -> set[str]:
    """The package's own modules that a file imports, those under TYPE_CHECKING included."""
    return {target for _, target, _ in imported(source) if target in known and target != source.module}


def upward_imports(sources: list[Source]) -> list[str]:
    """`a imports b` for each import of a module that does not stand before its importer.

    `from . import mesh` imports the whole package as well, which stands last: write `from .mesh import Mesh`.
    """
    order = {source.module: place for place, source in enumerate(sources)}
    edges = [(source.module, target) for source in sources for target in own_imports(source, set(order))]
    return sorted(f"{module} imports {target}" for module, target in edges if order[target] > order[module])


def import_cycle(sources: list[Source]) -> list[str]:
    known = {source.module for source in sources}
    try:
        TopologicalSorter({source.module: own_imports(source, known) for source in sources}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_contents_pages_list_every_file_once():
    assert FILES, "the package has no files"
    assert not set(FILES) - set(LAYERS), "files that no contents page lists"
    assert not set(LAYERS) - set(FILES), "files that a contents page lists and the package lacks"
    assert len(LAYERS) == len(set(LAYERS)), "files that are listed twice"


def test_root_holds_at_most_five_files():
    assert len([file for file in FILES if "/" not in file]) <= 5


def test_imports_go_down():
    found = upward_imports([read(file) for file in LAYERS if file in FILES])
    assert not found, "\n".join(["imports of files further down (docs/layout.md, then the docstring of each __init__)", *found])


def test_no_import_cycle():
    found = import_cycle([read(file) for file in FILES])
    assert not found, " -> ".join(found)


def test_layer_checks_find_what_they_look_for():
    low = Source.parse("low.py", "from .high import f")
    high = Source.parse("high.py", "from shardwise.low import g")
    assert upward_imports([low, high]) == ["shardwise.low imports shardwise.high"]
    assert upward_imports([high, low]) == ["shardwise.high imports shardwise.low"]
    assert import_cycle([low, high])
    assert not import_cycle([low, Source.parse("high.py", "")])


# ── size is a budget ──

#: Most lines of each folder, beside what they are spent on. A folder that needs more says why here.
LINES = {
    "_torch": 1400,  # private names with a reason each, and the table of patches
    "base": 800,  # argument checks, caches, settings, schemas
    "layouts": 1800,  # meshes, placements, layouts
    "planning": 1420,  # search, bounds and proof of plans
    "propagation": 830,  # notation, table and decision
    "comm": 3680,  # two worlds, failures, and what watches
    "redistribution": 970,  # plans on local tensors
    "random": 930,  # numbers by global index, with kernels for GPUs
    "kernels": 680,  # integer powers, grouped products, parts of attention
    "tensor": 2950,  # the subclass, dispatch, constructors, checkpoints
    "p2p": 880,  # messages
    "rules": 5080,  # some 590 rows
    "programs": 2290,  # capture, passes, one compilation for a job
    "remat": 1690,  # eager and traced
    "pipeline": 1070,  # schedules and the loop that runs them
    "package": 1030,  # export and load
    "verify": 1620,  # proof and sweeps
}
WHOLE = 29_300  # of the package: what it does, said once; a capability that needs more says so above
MAX_IGNORES = 20


def lines_of(folder: str) -> int:
    return sum(path.read_text().count("\n") for path in (PACKAGE / folder).rglob("*.py"))


def test_no_folder_is_over_its_budget():
    assert set(LINES) == {file.partition("/")[0] for file in FILES if "/" in file}
    over = [f"{folder}: {lines_of(folder)} lines, budget {most}" for folder, most in LINES.items() if lines_of(folder) > most]
    assert not over, "\n".join(over)
    assert lines_of("") <= WHOLE


def test_few_lint_and_type_ignores():
    text = "".join((PACKAGE / file).read_text() for file in FILES)
    assert text.count("# type: ignore") + text.count("# noqa") <= MAX_IGNORES


# ── tests that mirror the package ──

#: Folders of tests without a folder of the package: whole models, written by others or as others write them.
BESIDE = {"models"}


def misplaced(tests: list[Path], folders: set[str]) -> list[str]:
    """Tests that lie neither in tests/NEED nor in tests/NEED/FOLDER, where FOLDER is one of the package."""
    return sorted(test.as_posix() for test in tests if len(test.parts) > 3 or not set(test.parts[1:-1]) <= folders | BESIDE)


def test_tests_lie_where_the_package_has_what_they_test():
    tests = ROOT / "tests"
    found = [
        path.relative_to(tests)
        for need in ("pure", "simulated", "processes", "compiled")
        for path in (tests / need).rglob("test_*.py")
    ]
    folders = {file.partition("/")[0] for file in FILES if "/" in file}
    assert found and not misplaced(found, folders)
    assert misplaced([Path("pure/nowhere/test_x.py")], folders)


def test_no_test_module_imports_another():
    found = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^from tests\.\w+\.(\w+\.)?test_", path.read_text(), re.MULTILINE)
    ]
    assert not found


# ── the repository ──


def test_no_machine_paths():
    hidden = {".venv", ".release", ".git", ".hypothesis"}
    files = [p for p in ROOT.rglob("*") if p.is_file() and not hidden & set(p.parts) and p.name.endswith(TEXT_FILES)]
    assert [str(p.relative_to(ROOT)) for p in files if MACHINE_PATH.search(p.read_text())] == []
    assert MACHINE_PATH.search("see " + "/home" + "/someone/x")


def test_python_and_torch_versions_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "requirements.lock").read_text().splitlines()
    assert project["requires-python"] == ">=3.11"
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert "torch==2.13.0" in pins
    assert all("==" in line for line in pins if line and not line.startswith("#"))
