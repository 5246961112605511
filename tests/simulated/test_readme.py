"""The README's code runs as it stands, and every public name has a docstring."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import shardwise

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.S))
def test_the_readmes_code_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {})
    if "print(loss.item())" in block:
        shown = capsys.readouterr().out
        assert "f32[16, 32@tp]" in shown and "all_reduce" in shown


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert (getattr(shardwise, name).__doc__ or "").strip()


def test_the_contents_page_names_every_public_object_once() -> None:
    public = {name for name, value in vars(shardwise).items() if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert sorted(shardwise.__all__) == sorted({*public, "debug", "p2p", "save"})  # modules that users name
