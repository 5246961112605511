"""The cases with known answers, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import shardwise as sw
from tests.helpers.cases import RANKS


@pytest.mark.parametrize("case", RANKS, ids=lambda case: case.__name__)
def test_case(case: Callable[[], None]) -> None:
    with sw.simulate(RANKS[case]):
        case()
