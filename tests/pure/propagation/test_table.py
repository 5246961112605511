"""The table of rules: one row for a name, whose place is known; `python -m shardwise rules` prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.__main__ import main
from shardwise.errors import OperatorError
from shardwise.propagation.table import PLACES, TABLE, fingerprint, rule

PACKAGE = Path(shardwise.__file__).parent


def test_a_second_row_is_refused_and_the_first_one_named() -> None:
    before = dict(TABLE)
    with pytest.raises(OperatorError, match=rf"aten.mm has a rule already, at {PLACES['aten.mm']}: an operator has one"):
        rule("example_of_tables mm", "m k, k n -> m n")
    TABLE.pop("aten.example_of_tables")
    assert before == TABLE


def test_places_are_the_lines_of_the_rows() -> None:
    assert set(PLACES) >= set(TABLE)
    for name in ("aten.mm", "aten.relu", "aten.max_pool2d_with_indices", "aten.grid_sampler_2d", "aten.convolution"):
        path, _, line = PLACES[name].rpartition(":")
        lines = (PACKAGE / path).read_text().splitlines()[int(line) - 1 :]
        row = "\n".join(lines[: next((i for i, text in enumerate(lines) if text.endswith(")")), 0) + 1])
        words = row.replace("#", "2")
        assert name.removeprefix("aten.") in words, (name, row)


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Other addresses, another hash seed, other lines."""
    code = "import shardwise; from shardwise.propagation.table import fingerprint; print(fingerprint())"
    digests = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(PACKAGE.parent)},
                       capture_output=True, text=True, check=True, timeout=120).stdout.strip()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert digests[0] == digests[1]
    places = dict(PLACES)
    before = fingerprint()
    try:
        PLACES["aten.mm"] = "rules/matmul.py:1"
        assert fingerprint() == before
    finally:
        PLACES.update(places)


def test_the_command_line_prints_one_rule_with_its_words_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "mm"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"aten\.mm\n  rules/matmul\.py:\d+\n  sentence: m k, k n -> m n\n      \w", out)
    assert re.search(r"  linear: \(0\) \(1\)\n +sets of tensor arguments", out)
    assert re.search(r"  lost: sum\n +what sharding a lost dim leaves", out)
    assert main(["rules", "add_"]) == 0 and "aten.add" in capsys.readouterr().out
    assert main(["rules", "max"]) == 0
    assert {"aten.max.default", "aten.max.dim"} <= set(capsys.readouterr().out.split())
    assert main(["rules", "no_such"]) == 1 and "no rule for 'no_such'" in capsys.readouterr().out


def test_the_command_line_prints_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    assert set(TABLE) <= set(out.split())
    assert max(map(len, out.splitlines())) <= 100
    words = " ".join(out.split())
    assert [text for row in TABLE.values() if (text := " ".join(row.text.split())) not in words] == []
