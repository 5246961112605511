"""The table of docs/guides/pooling.py (pooling, medians, running extremes): which layouts are kept, what is communicated."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Partial, Placement, Replicate, Shard
from tests.helpers.one_device import distributed, equal

Case = tuple[Placement, Placement, dict[str, int]]
MESH = sw.init_mesh(tp=2)
GATHER, SWAP, REDUCE, ROWS = {"all_gather": 1}, {"all_to_all": 1}, {"all_reduce": 1}, {"p2p": 1}
#: The rows of the table, each a list of its cells.
GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "pooling.py").read_text()
ROWS_OF_TABLE = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^# \| (`.*) \|$", GUIDE, re.MULTILINE)]
ANY_PENDING: list[Case] = [(Partial(kind), Replicate(), REDUCE) for kind in ("sum", "avg", "max", "min")]


def check(function: Callable[..., Any], x: torch.Tensor, case: Case) -> None:
    have, want, collectives = case
    spread = distributed(x, MESH, [have])
    with sw.trace_comm() as log:
        got = function(spread)
    dense = function(x)
    for one, other in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (got, dense)), strict=True):
        assert one.placements == (want,)
        equal(one, other, str(have))
    assert log.counts() == collectives and not log.fallbacks, log


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pooling(count: int) -> None:
    average, largest = getattr(F, f"avg_pool{count}d"), getattr(F, f"max_pool{count}d")
    x = torch.randn(4, 6, *[12] * count, generator=torch.Generator().manual_seed(0))
    kept: list[Case] = [(Shard(0), Shard(0), {}), (Shard(1), Shard(1), {})]
    linear: list[Case] = [(Partial(), Partial(), {}), (Partial("avg"), Partial("avg"), {})]
    for case in (*kept, (Shard(2), Shard(2), {})):
        check(lambda t: average(t, 2), x, case)
        check(lambda t: largest(t, 2, return_indices=True), x, case)
    for case in (*kept, (Shard(2), Shard(2), ROWS)):
        check(lambda t: average(t, 3, 1, 1), x, case)
        check(lambda t: largest(t, 3, 1, 1, return_indices=True), x, case)
    check(lambda t: largest(t, 4, return_indices=True), x, (Shard(2), Shard(2), ROWS))
    check(lambda t: average(t, 3, 1, 1), x[:1, :1].contiguous(), (Shard(2), Shard(2), ROWS))
    for case in linear:
        check(lambda t: average(t, 3, 1, 1), x, case)
    for case in ANY_PENDING:
        check(lambda t: largest(t, 2, return_indices=True), x, case)


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_medians(name: str) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    for case in ((Shard(1), Shard(0), {}), (Shard(0), Shard(0), SWAP), *ANY_PENDING):
        check(lambda t: getattr(t, name)(0), x, case)
    check(lambda t: getattr(t, name)(0), x[:, 0].contiguous(), (Shard(0), Replicate(), GATHER))
    for case in ((Shard(0), Replicate(), GATHER), (Shard(1), Replicate(), GATHER), *ANY_PENDING):
        check(getattr(torch, name), x, case)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_running_extremes(name: str) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    for case in ((Shard(1), Shard(1), {}), (Shard(0), Shard(0), GATHER), *ANY_PENDING):
        check(lambda t: getattr(t, name)(0), x, case)


def test_the_table_has_these_operators() -> None:
    named = {name for operators, *_ in ROWS_OF_TABLE for name in re.findall(r"`(\w+)`", operators)}
    assert named == {f"{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)} | {
        "median",
        "nanmedian",
        "cummax",
        "cummin",
    }


def test_the_table_says_what_passes_and_what_is_communicated() -> None:
    collectives = {"messages": ROWS, "all-to-all": SWAP, "all-gather": GATHER}
    assert [passes.split(" (")[0] for *_, passes, _ in ROWS_OF_TABLE] == ["sum, avg", *["none: all-reduce"] * 4]
    last = [collectives[cell.partition(": ")[2].split(" (")[0]] for *_, cell in ROWS_OF_TABLE]
    assert last == [ROWS, ROWS, SWAP, GATHER, GATHER]
