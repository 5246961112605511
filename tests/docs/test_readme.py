"""The README's code runs and prints what it shows, its links lead somewhere, and every public name has a docstring."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

import shardwise
from tests.docs.scripts import ROOT, check_output, code_blocks

README = (ROOT / "README.md").read_text()
BLOCKS = code_blocks(README)


@pytest.mark.parametrize(("code", "shown"), BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_the_readmes_code_prints_what_it_shows(code: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    check_output(capsys.readouterr().out, shown, "README.md")


def test_all_blocks_are_run() -> None:
    assert len(BLOCKS) == README.count("```python") > 1
    assert len([shown for _, shown in BLOCKS if shown]) == README.count("```text")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("target", sorted({link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link}))
def test_the_readmes_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert (getattr(shardwise, name).__doc__ or "").strip()


def test_the_contents_page_names_every_public_object_once() -> None:
    public = {name for name, value in vars(shardwise).items() if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert sorted(shardwise.__all__) == sorted({*public, "debug", "p2p", "save"})  # modules that users name
