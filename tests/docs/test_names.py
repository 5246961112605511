"""Files that documents name exist, and the glossary stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.scripts import ROOT

DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")})


def missing(text: str) -> list[str]:
    """Paths between backticks that lead nowhere, from the root, from the package and from a folder of it.

    >>> missing("`planning/plan.py`, `tests/docs/scripts.py`, `train.py` and `planning/nothing.py`")
    ['planning/nothing.py']
    """
    named = re.findall(r"`([\w.]+(?:/[\w.*-]+)+\.(?:py|md))`", text)
    return [path for path in named if not any(list(base.glob(path)) for base in (ROOT, ROOT / "shardwise"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_files_exist(path: Path) -> None:
    assert missing(path.read_text()) == []


def test_the_glossary_has_at_most_forty_words_in_order() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 20 < len(words) <= 40
    assert words == sorted(words, key=str.lower)
