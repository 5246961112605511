"""Tests that compile: in one worker, with those that start processes, since they would fight over the cores."""

from pathlib import Path

import pytest

from tests.processes.conftest import pool as pool

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests in one worker under `--dist loadgroup`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))
