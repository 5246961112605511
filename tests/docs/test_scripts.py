"""The tour and the guides run, and print what they show."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.docs.scripts import SCRIPTS, check_output, promised


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_prints_what_it_shows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path))
    check_output(capsys.readouterr().out, promised(path.read_text()), path.name)


def test_another_output_is_found() -> None:
    with pytest.raises(AssertionError, match="prints"):
        check_output("f32[8@dp, 16]\n", "f32[8, 16]\n", "a guide")


def test_the_tour_is_short() -> None:
    assert len(SCRIPTS[0].read_text().splitlines()) <= 400
