"""What every test shares: one thread per process, so that parallel workers do not fight over cores; and the seed, shown."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

#: How many random programs are tried, and from which seed (see tests/simulated/test_programs.py).
PROGRAMS = int(os.environ.get("SHARDWISE_PROGRAMS", "400"))
SEED = int(os.environ.get("SHARDWISE_SEED", "20261115"))


def pytest_report_header() -> str:
    return f"random programs: {PROGRAMS}, seed {SEED} (SHARDWISE_PROGRAMS, SHARDWISE_SEED)"


HEAVY = [Path(__file__).parent / name for name in ("processes", "compiled")]


def is_heavy(item: pytest.Item) -> bool:
    return any(folder in item.path.parents for folder in HEAVY)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep tests that start processes or compile in one worker under `--dist loadgroup`: one set of pools serves them all, and
    they do not fight over the cores."""
    if is_heavy(item):
        item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """A pytest that pytest-xdist does not know yet takes the groups for nothing, and says nothing."""
    grouped = getattr(session.config.option, "loadgroup", False)
    lost = [item.nodeid for item in session.items if grouped and is_heavy(item) and not item.nodeid.endswith("@processes")]
    if lost:
        raise pytest.UsageError(f"pytest-xdist has not grouped {lost[0]}: this pytest is too new for it")
