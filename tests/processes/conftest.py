"""The `pool` fixture: `pool(4).run(function, *args)` calls a top-level function on four Gloo ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.pool import Pool

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests in one worker under `--dist loadgroup`, so that one set of pools serves them all."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    pools: dict[int, Pool] = {}
    yield lambda size: pools.setdefault(size, Pool(size))
    for each in pools.values():
        each.close()
