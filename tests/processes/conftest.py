"""The `pool` fixture: `pool(4).run(function, *args)` calls a top-level function on four Gloo ranks."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.process_pool import Pool

# Each takes 300 MB or more: pools that have not been used for longest end when all together would be more than this.
MOST_PROCESSES = 8


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    pools: dict[int, Pool] = {}

    def of_size(size: int) -> Pool:
        pools[size] = pools.pop(size, None) or Pool(size)
        while sum(pools) > MOST_PROCESSES:
            pools.pop(next(iter(pools))).close()
        return pools[size]

    yield of_size
    for each in pools.values():
        each.close()
