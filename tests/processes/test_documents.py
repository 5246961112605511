"""Code of the documents that is said to run on processes as it runs simulated."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from collections.abc import Callable

import pytest

from tests.docs.scripts import ROOT, check_output, code_blocks
from tests.helpers.process_pool import Pool

BLOCKS = code_blocks((ROOT / "README.md").read_text())


def run_guide(name: str, number: str) -> None:
    os.environ.setdefault("MASTER_PORT", number)  # as torchrun does
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / "docs" / "guides" / f"{name}.py"))


def run_block(code: str, shown: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "README.md", "exec"), {})
    check_output(output.getvalue(), shown, "README.md")


@pytest.mark.parametrize("name", ["jobs", "recipes", "point_to_point"])
def test_a_guide_runs_on_four_ranks(pool: Callable[[int], Pool], name: str) -> None:
    pool(4).run(run_guide, name, str(os.getpid()))


@pytest.mark.parametrize(("code", "shown"), BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_the_readmes_code_prints_the_same_on_four_ranks(pool: Callable[[int], Pool], code: str, shown: str) -> None:
    pool(4).run(run_block, code, shown)
