"""The site builds without a warning, and its pages open in a browser without an error."""

from __future__ import annotations

import doctest
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.scripts import ROOT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.xdist_group("site")  # built once
if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings_handlers") is None:
    pytest.skip("mkdocs-material and mkdocstrings are not installed", allow_module_level=True)


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build the site, warnings being errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice about the future of the generator, not about these pages
    return subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Opened(NamedTuple):
    """A page as the browser shows it, and what its scripts wrote to the console."""

    dom: str
    console: list[str]


def opened(url: str, profile: Path) -> Opened:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=3000"]
    command = [BROWSER, *options, "--enable-logging=stderr", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Opened(done.stdout, re.findall(r"CONSOLE.*", done.stderr))


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian: apt-get install chromium)")


@needs_browser
@pytest.mark.parametrize(
    ("page", "title", "code"),
    [
        ("", "Shardwise", "sw.trace_comm()"),
        ("tour/", "Tour - Shardwise", "class Mesh:"),
        ("reference/tensors/", "Tensors - Shardwise", "sw.init_mesh(dp=2, tp=4)"),
    ],
)
def test_a_page_opens(address: str, tmp_path: Path, page: str, title: str, code: str) -> None:
    dom, console = opened(f"{address}/{page}", tmp_path)
    assert f"<title>{title}</title>" in dom
    assert re.search(r'<input[^>]*class="md-search__input"', dom)
    blocks = [unescape(re.sub(r"<[^>]+>", "", block)) for block in re.findall(r"<pre.*?</pre>", dom, re.S)]
    assert any(code in block for block in blocks)
    assert not console


@needs_browser
def test_an_error_on_a_page_is_seen(site: Path, address: str, tmp_path: Path) -> None:
    (site / "broken.html").write_text("<script>undefined_function()</script>")
    assert "undefined_function" in opened(f"{address}/broken.html", tmp_path).console[0]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    asked = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(https?:)?//')
    assert [path.name for path in site.rglob("*.html") if asked.search(path.read_text())] == []


def test_only_three_public_names_are_modules(site: Path) -> None:
    pages = [path.read_text() for path in (site / "reference").rglob("index.html")]
    modules = [name for page in pages for name in re.findall(r'doc-module">\s*<h2 id="([\w.]+)"', page)]
    assert sorted(modules) == ["shardwise.debug", "shardwise.p2p", "shardwise.save"]


def test_the_search_index_has_every_part(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    for page in (
        "tour/",
        "guides/compiling/",
        "extending/add_a_rule/",
        "reference/programs/",
        "design/",
        "glossary/",
        "changelog/",
    ):
        assert f'"location":"{page}' in index.replace('"location": "', '"location":"')


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    other = tmp_path / "mkdocs.yml"
    other.write_text("site_name: x\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    done = build(tmp_path / "site", "--config-file", str(other))
    assert done.returncode != 0 and "nowhere.md" in done.stderr


@pytest.mark.parametrize("name", ["site_hooks", "griffe_docstrings"])
def test_the_examples_of_the_generator_hold(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0
