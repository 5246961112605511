"""The `pool` fixture: `pool(4).run(function, *args)` calls a top-level function on four Gloo ranks."""

from collections.abc import Callable, Iterator

import pytest

from tests.processes.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    pools: dict[int, Pool] = {}
    yield lambda size: pools.setdefault(size, Pool(size))
    for each in pools.values():
        each.close()
