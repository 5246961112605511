"""The committed pictures are those that docs/pictures.py draws, and the one of the folders shows them all."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.scripts import ROOT

DRAWN = runpy.run_path(str(ROOT / "docs" / "pictures.py"))


@pytest.mark.parametrize("name", DRAWN["PICTURES"])
def test_a_picture_is_what_is_drawn(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / name).read_text() == DRAWN["PICTURES"][name](), "run python docs/pictures.py"


def test_the_picture_of_folders_shows_them_all() -> None:
    shown = {name for _, folders in DRAWN["FOLDERS"] for name, *_ in folders}
    assert shown == {path.parent.name for path in (ROOT / "shardwise").glob("*/__init__.py")}
