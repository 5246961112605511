"""A warm compile cache: the example run twice on one cache directory, in fresh processes, is right twice and compiles once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.torchrun import run


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch asks tensors for no key, and nothing is kept")
@pytest.mark.parametrize(("ranks", "rows", "programs"), [(2, 8, 6), pytest.param(4, 7, 12, marks=pytest.mark.slow)])
def test_a_warm_cache_gives_the_same_answers(ranks: int, rows: int, programs: int, tmp_path: Path) -> None:
    cold, warm = run(ranks, rows, tmp_path, "1"), run(ranks, rows, tmp_path, "2")
    assert len(cold) == len(warm) == ranks
    assert all(report["right"] for report in (*cold, *warm))
    for report in cold:
        assert "autograd_cache_bypass" not in report and report["autograd_cache_saved"] >= 1
    for report in warm:
        assert report["autograd_cache_hit"] == programs and "autograd_cache_miss" not in report, report
