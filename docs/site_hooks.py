"""What mkdocs asks while it builds the site: pages made of scripts and of files at the root, the reference, and the navigation.

A script of the documentation is prose and code in one file: comments at the left margin are Markdown, `# →` comments are what
the code above them prints. Nothing is imported: public names are read from the syntax of the package.
"""

import ast
import posixpath
import re
from itertools import groupby
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
#: Files at the root that are pages, with the pages they become.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "LICENSE": "license.md"}
GUIDES = "layouts recipes jobs costs redistribution compiling debugging random_numbers own_operators pipelines experts "
GUIDES += "ring_attention rematerialisation packages point_to_point pooling integer_powers measuring"
#: Public names by page; one that stands nowhere is an error.
REFERENCE = {
    "Tensors": "DTensor distribute_tensor distribute_module zeros ones empty full rand randn randint randperm each_rank Bundle",
    "Meshes and layouts": "Mesh init_mesh init_device_mesh simulate Layout layout Placement Shard Replicate Partial "
    "StridedShard",
    "Communication": "trace_comm communication debug_mode plan relabel calibrate p2p debug",
    "Programs": "capture Program compile compile_report save_artifacts load_artifacts export load_package Package",
    "Training": "pipeline Pipeline Schedule remat remat_module save ring_attention grouped_mm int_pow",
    "Rules and caches": "rule cache_info cache_clear",
    "Errors": "ShardwiseError ArgumentError MissingFileError MeshError LayoutError PlanError OperatorError CommunicationError "
    "RematError PipelineError CompileError MismatchError RankError WorldError",
}
#: Public names that are modules.
MODULES = ("p2p", "save", "debug")


# ── pages ──


def script_page(text):
    """The Markdown of a script: its docstring, then comments as prose, code and printed lines as blocks.

    >>> print(script_page('\"\"\"A title.\\n\\nProse.\\n\"\"\"\\n\\n# More.\\nprint(1)\\n# → 1\\n'))
    # A title
    <BLANKLINE>
    Prose.
    <BLANKLINE>
    More.
    <BLANKLINE>
    ```python
    print(1)
    ```
    <BLANKLINE>
    ```text
    1
    ```
    <BLANKLINE>
    """
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, rest = docstring.partition("\n")
    parts = [f"# {title.rstrip('.')}\n", f"{rest.strip()}\n"] if title else []
    code = text.split('"""', 2)[2] if docstring else text
    for kind, lines in groupby(code.splitlines(), _kind):
        block = "\n".join(lines)
        if block.strip():
            parts.append(_BLOCK[kind](block.strip("\n")))
    return "\n".join(parts)


def _kind(line):
    if re.match(r" *# →( |$)", line):
        return "output"
    return "prose" if line == "#" or line.startswith("# ") else "code"


_BLOCK = {
    "output": lambda block: "```text\n" + re.sub(r"^ *# → ?", "", block, flags=re.MULTILINE) + "\n```\n",
    "prose": lambda block: re.sub(r"^# ?", "", block, flags=re.MULTILINE) + "\n",
    "code": lambda block: f"```python\n{block}\n```\n",
}


def public_names(folder=ROOT / "shardwise"):
    """What a package exports, in the order of its contents page."""
    tree = ast.parse((folder / "__init__.py").read_text())
    lists = [node.value for node in tree.body if ast.unparse(node).startswith(("__all__ =", "__all__ +="))]
    return [name for each in lists for name in ast.literal_eval(each)]


def reference_pages():
    """A page for each group of public names."""
    grouped = {title: names.split() for title, names in REFERENCE.items()}
    missing = sorted(set(public_names()) ^ {name for names in grouped.values() for name in names})
    if missing:
        raise ValueError(f"public names and docs/site_hooks.py REFERENCE differ in {', '.join(missing)}")
    for title, names in grouped.items():
        entries = [entry for name in names for entry in _entries(name)]
        yield f"reference/{_slug(title)}.md", "\n".join([f"# {title}\n", *entries])


def _entries(name):
    """What mkdocstrings is asked to show of a public name."""
    folder = ROOT / "shardwise" / name
    if name in MODULES and folder.is_dir():
        inside = [f"::: {_qualified(each, folder)}\n    options: {{heading_level: 3}}\n" for each in public_names(folder)]
        return [f"::: shardwise.{name}\n    options: {{members: false}}\n", *inside]
    if name == "RankError":
        return ["::: shardwise.errors.RankError\n"]
    return [f"::: {f'shardwise.{name}' if name in MODULES else _qualified(name)}\n"]


def _qualified(name, folder=ROOT / "shardwise"):
    """The module that defines what a package exports, since a folder or file of the same name would hide it; where it goes by
    another name there, the name of the package."""
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        for alias in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
            if (alias.asname or alias.name) == name:
                source = folder.joinpath(*node.module.split("."))
                return (
                    _qualified(name, source) if source.is_dir() else _dotted(source if alias.asname is None else folder, name)
                )
    return _dotted(folder, name)


def _dotted(path, name):
    return ".".join([*path.relative_to(ROOT).parts, name])


def _slug(title):
    return title.lower().replace(" ", "_")


def scripts():
    """The scripts that are pages, by the page that each becomes."""
    inside = [DOCS / "tour.py", *(DOCS / "guides").glob("*.py"), *(DOCS / "extending").glob("*.py")]
    pages = {path.relative_to(DOCS).with_suffix(".md").as_posix(): path for path in inside}
    return pages | {f"examples/{path.stem}.md": path for path in (ROOT / "examples").glob("*.py")}


def on_files(files, config):
    """Add pages that are no Markdown files under docs/."""
    made = {to: (ROOT / name).read_text() for name, to in PAGES.items()}
    made["license.md"] = f"# Licence\n\n```text\n{made['license.md']}```\n"
    made |= {to: script_page(path.read_text()) for to, path in scripts().items()} | dict(reference_pages())
    for to, text in made.items():
        files.append(File.generated(config, to, content=text))
    return files


# ── links ──


def on_page_markdown(markdown, page, config, files):
    """Let links to files of the repository lead to their pages."""
    uri = page.file.src_uri
    origin = {to: name for name, to in PAGES.items()}.get(uri) or f"docs/{uri}"
    if uri.startswith("examples/"):
        origin = uri
    base = posixpath.dirname(origin)

    def link(match):
        target, _, anchor = match[1].partition("#")
        if "://" in target or not target:
            return match[0]
        to = _page_of(posixpath.normpath(posixpath.join(base, target)))
        return f"]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{'#' * bool(anchor)}{anchor})"

    if uri == "coverage.md":  # placements of two tensors, beside one another, are no link
        markdown = re.sub(r"\] \[", r"] \\[", markdown)
    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)


def _page_of(path):
    """The page of a file, both from the root of the repository and of the site."""
    if path in PAGES:
        return PAGES[path]
    path = path.removeprefix("docs/")
    return path.removesuffix(".py") + ".md" if path.endswith(".py") else path


# ── navigation ──


def on_config(config):
    """Fill in the lists of pages."""
    design = [{_title(path.read_text()): f"design/{path.name}"} for path in sorted((DOCS / "design").glob("*.md"))]
    extending = [f"extending/{name}.md" for name in ("add_a_rule", "add_a_pass", "add_a_step_kind")]
    lists = {
        "Guides": [f"guides/{name}.md" for name in GUIDES.split()] + [{"Examples": sorted(_examples())}],
        "How to extend": [*extending, "contributing.md"],
        "Reference": [f"reference/{_slug(title)}.md" for title in REFERENCE],
        "Design decisions": design,
    }
    config.nav = [{name: lists.get(name, to) for name, to in entry.items()} for entry in config.nav]
    return config


def _examples():
    return [f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")]


def _title(markdown):
    return markdown.partition("\n")[0].lstrip("# ")
