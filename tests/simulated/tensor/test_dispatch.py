"""One operator call, cold: how often its row is looked up, its moves are planned, and how many calls Python makes for it."""

import cProfile
import pstats
from collections import Counter

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.base.schema import schema_of
from shardwise.propagation.table import TABLE, rule
from shardwise.tensor.dispatch import forget

#: The most calls that a first `mm` takes where nothing moves, as cProfile counts them.
MAX_CALLS = 500


class Profile:
    """What Python called during a call of which nothing is known yet."""

    def __init__(self, x: sw.DTensor, w: sw.DTensor) -> None:
        torch.mm(x, w)  # the simulated world and torch know the operator; Shardwise forgets it
        forget()
        schema_of.cache_clear()
        sw.cache_clear()
        profile = cProfile.Profile()
        profile.enable()
        self.result = torch.mm(x, w)
        profile.disable()
        stats = pstats.Stats(profile)
        self.calls: int = stats.total_calls  # type: ignore[attr-defined]
        self.counts: Counter[str] = Counter()
        for (path, _, name), (_, count, *_) in stats.stats.items():  # type: ignore[attr-defined]
            folder, _, file = path.rpartition("/")
            self.counts[f"{folder.rpartition('/')[2]}/{file}:{name}"] += count


def operands(x_placements: list[sw.Placement], w_placements: list[sw.Placement]) -> tuple[sw.DTensor, sw.DTensor]:
    mesh = sw.init_mesh(dp=2, tp=2)
    return sw.ones(8, 16, mesh=mesh, placements=x_placements), sw.ones(16, 8, mesh=mesh, placements=w_placements)


def test_a_cold_mm_needs_few_calls() -> None:
    cold = Profile(*operands([Shard(0), Replicate()], [Replicate(), Shard(1)]))
    assert cold.result.layout == sw.layout((8, 8), cold.result.mesh, [Shard(0), Shard(1)])
    assert cold.calls <= MAX_CALLS
    assert cold.counts["propagation/table.py:find"] == 1
    assert cold.counts["planning/plan.py:_plan"] == 0


@pytest.mark.parametrize(
    ("x_placements", "w_placements", "moves"),
    [
        ([Shard(0), Replicate()], [Shard(0), Replicate()], 1),
        ([Shard(0), Shard(1)], [Shard(1), Replicate()], 2),
    ],
)
def test_a_cold_mm_finds_its_row_once_and_plans_each_move_once(
    x_placements: list[sw.Placement], w_placements: list[sw.Placement], moves: int
) -> None:
    x, w = operands(x_placements, w_placements)
    cold = Profile(x, w)
    assert cold.counts["propagation/table.py:find"] == 1
    assert cold.counts["planning/plan.py:plan"] == cold.counts["planning/plan.py:_plan"] == moves
    torch.testing.assert_close(cold.result.full_tensor(), x.full_tensor() @ w.full_tensor())


def _raises(*_: object) -> None:
    raise TypeError("a fault of this rule")


def _traced(function: object, x: Tensor) -> None:
    torch.compile(function, dynamic=True, backend="eager", fullgraph=True)(x)


def test_an_error_of_a_rule_shows_in_a_trace_with_symbolic_sizes() -> None:
    """It was taken for the wish to specialise the size, and the operator ran a second time."""
    known = TABLE["aten.frac"]
    x = sw.ones(8, 4, mesh=sw.init_mesh(tp=2), placements=[Shard(0)])
    try:
        del TABLE["aten.frac"]
        rule("frac", "... -> ...", kernel=_raises)
        forget()
        with pytest.raises(Exception, match="a fault of this rule"):
            _traced(torch.frac, x)
    finally:
        TABLE["aten.frac"] = known
        forget()
        torch.compiler.reset()
