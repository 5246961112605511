"""One of four Gloo ranks fails, and every other one ends with an error within the job's time-out: no one waits for ever."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.failing_ranks import FAILS, FAILS_AT, FAILURES, KINDS, MODES, RANKS, STEPS, TIMEOUT

#: Seconds beyond the time-out in which a rank tells others, and may be kept by a busy machine.
MARGIN = 6.0
CELLS = [
    f"{how}:{kind}:{mode}"
    for how in FAILURES
    for kind in KINDS
    for mode in MODES
    if how not in ("data", "alike") or (kind != "p2p" and (how, kind) != ("alike", "pipeline"))
]
FEW = ["skip:captured:debug", "kill:pipeline:plain", "sleep:pipeline:plain", "data:eager:plain", "data:pipeline:debug"]
FEW += ["alike:eager:plain"]


def right(kind: str, rank: int, step: int) -> float:
    """What a step gives where no rank fails."""
    if kind == "p2p":
        return 2 * (10.0 * step + (rank - 1) % RANKS)
    return math.sqrt(sum((i + step) % 10 for i in range(8)))


def seen(folder: Path, cells: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """What each rank saw of each cell."""
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.failing_ranks", str(folder), *cells], check=True, timeout=70 * len(cells)
    )
    return {
        cell: {rank: json.loads(file.read_text()) for rank in range(RANKS) if (file := folder / cell / str(rank)).exists()}
        for cell in cells
    }


def check(cell: str, ranks: dict[int, dict[str, Any]]) -> None:
    how, kind, mode = cell.split(":")
    others = {rank: found for rank, found in ranks.items() if rank != FAILS}
    assert len(others) == RANKS - 1, f"{cell}: only ranks {sorted(ranks)} answered"
    late = {rank: found["seconds"] for rank, found in others.items() if found["seconds"] > TIMEOUT + MARGIN}
    assert not late, f"{cell}: {late}"
    for rank, found in ranks.items():
        if kind != "pipeline" and how != "skip":  # what pairs with the wrong one gives numbers, until the end
            assert all(abs(value - right(kind, rank, step)) < 1e-5 for step, value in found["values"]), (cell, rank, found)
    errors = {rank: found["error"] for rank, found in others.items()}
    if how == "alike":
        assert set(errors.values()) == {""} and len(others[0]["values"]) == STEPS - 1, (cell, errors)
    elif how == "skip" and mode == "plain":
        assert any(errors.values()), cell
    else:
        assert all(errors.values()), (cell, errors)
        assert how == "skip" or max(len(found["values"]) for found in others.values()) <= FAILS_AT + 1, cell
    if mode == "debug" and how in ("skip", "sleep"):
        assert {found["error"] for found in ranks.values()} == {"MismatchError"}, (cell, errors)
    if how == "data":
        what = "ValueError: bad data" if kind == "pipeline" else "IndexError: index"
        assert ranks[FAILS]["error"] == what.partition(":")[0], (cell, ranks[FAILS])
        if kind != "compiled":
            assert all(f"rank {FAILS} raised {what}" in found["text"] for found in others.values()), (cell, others)


def test_every_other_rank_ends_with_an_error(tmp_path: Path) -> None:
    for cell, ranks in seen(tmp_path, FEW).items():
        check(cell, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_failure_of_every_kind(tmp_path: Path, kind: str) -> None:
    for cell, ranks in seen(tmp_path, [cell for cell in CELLS if f":{kind}:" in cell]).items():
        check(cell, ranks)
