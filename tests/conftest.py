"""What every test shares: one thread per process, so that parallel workers do not fight over cores; and the seed, shown."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

#: How many random programs are tried, and from which seed (see tests/simulated/tensor/test_random_programs.py).
PROGRAMS = int(os.environ.get("SHARDWISE_PROGRAMS", "400"))
SEED = int(os.environ.get("SHARDWISE_SEED", "20261115"))


def pytest_report_header() -> str:
    return f"random programs: {PROGRAMS}, seed {SEED} (SHARDWISE_PROGRAMS, SHARDWISE_SEED)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run also what takes minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: --slow runs it"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers, whichever tests ran before it in its worker."""
    torch.manual_seed(SEED)


HEAVY = [Path(__file__).parent / name for name in ("processes", "compiled")]


def group_of(item: pytest.Item) -> str | None:
    return next((folder.name for folder in HEAVY if folder in item.path.parents), None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Under `--dist loadgroup` keep tests that start processes in one worker, where one set of pools serves them all, and so
    tests that compile."""
    group = group_of(item)
    if group:
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """A pytest that pytest-xdist does not know yet takes the groups for nothing, and says nothing."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    lost = [item.nodeid for item in session.items if group_of(item) and not item.nodeid.endswith(f"@{group_of(item)}")]
    if lost:
        raise pytest.UsageError(f"pytest-xdist has not grouped {lost[0]}: this pytest is too new for it")
