"""The cases with known answers, on Gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.cases import RANKS


@pytest.mark.parametrize("case", RANKS, ids=lambda case: case.__name__)
def test_case(case: Callable[[], None], pool: Any) -> None:
    pool(RANKS[case]).run(case)
