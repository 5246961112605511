"""The verifier: what it proves in a few seconds, that it finds what is wrong, and rules that users write."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.__main__ import main
from shardwise.errors import ArgumentError, CommunicationError, OperatorError
from shardwise.propagation.table import TABLE, fingerprint, rule
from shardwise.tensor.dispatch import forget
from shardwise.verify import pool
from shardwise.verify.calls import Sample
from shardwise.verify.completeness import missing
from shardwise.verify.coverage import SWEEPS, page
from shardwise.verify.samples import operators
from shardwise.verify.soundness import check
from shardwise.verify.spread import reduced, split, spread
from shardwise.verify.sweeps import Sweep, Verdict, check_operator, check_rules

aten = torch.ops.aten
COVERAGE = Path(__file__).parents[3] / "docs" / "coverage.md"


@pytest.fixture
def table() -> Iterator[dict[str, object]]:
    """The table of rules, put back after the test."""
    before = dict(TABLE)
    yield TABLE
    TABLE.clear()
    TABLE.update(before)
    forget()


# ── rules ──


def test_quick_rules_are_sound_and_complete() -> None:
    lines: list[str] = []
    verdicts = check_rules(lambda name: True, workers=1, quick=True, show=lines.append)
    assert len(verdicts) > 15
    assert [v.unsound for v in verdicts if v.unsound] == []
    assert [(v.name, v.missing) for v in verdicts if v.missing] == []
    assert "0 unsound" in lines[-1]


def test_finds_a_rule_that_is_not_sound(table: dict[str, object]) -> None:
    sample = Sample(aten.atan.default, (torch.randn(4, 3),), {})
    TABLE.pop("aten.atan")
    rule("aten.atan", "... -> ...", linear=((0,),))
    forget()
    count, found = check(sample, TABLE["aten.atan"])
    assert count > 10 and found
    program = found[0].program()
    assert "aten.atan.default on (a=2) with [Partial('sum')]" in str(found[0]) and "gives" in found[0].text
    exec(compile(program, "program", "exec"), {})  # the program runs


def test_finds_what_a_rule_does_not_offer() -> None:
    rule("aten.example", "m k, k n -> m n", linear=((0,),))
    row = TABLE.pop("aten.example")
    samples = [Sample(aten.mm.default, (torch.randn(4, 3), torch.randn(3, 5)), {})]
    assert missing(samples, row) == ["R, sum -> sum"]
    rule("aten.example", "m k, k n -> m n", linear=((0,),), unoffered="sum: a test")
    assert missing(samples, TABLE.pop("aten.example")) == []


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_splits_add_up_exactly(kind: str) -> None:
    x = torch.cat([torch.randn(30), torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])
    for ranks in (1, 2, 4):
        shards = split(x, kind, ranks)
        torch.testing.assert_close(reduced(shards, kind), x, rtol=0, atol=0, equal_nan=True)
        assert ranks == 1 or not torch.equal(shards[0], shards[1])


def test_axes_never_leave_a_tensor_partial_in_two_ways() -> None:
    x, index = torch.randn(4, 3), torch.tensor([[2, 0, 1]] * 4)
    mesh = sw.init_mesh(a=2, b=2)
    for placements in ([Partial("product"), Shard(1)], [Shard(1), Partial("max")]):
        out = torch.gather(spread(x, mesh, placements), 1, index)
        torch.testing.assert_close(out.full_tensor(), x.gather(1, index))


# ── operators ──


def test_operators_are_compared_with_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--operators", "mean,uniform,empty_like", "--mesh", "2x2", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"right +mean: (\d+) of \1 combinations", out)
    assert "random   uniform" in out and "uninitialised empty_like" in out
    assert "1 operators: 1 right on every combination, 0 error, 0 WRONG, 0 hang, 0 abort" in out
    assert check_operator("add", Sweep((2,), inplace=True)).outcome == "right"


def test_a_wrong_operator_is_found(table: dict[str, object]) -> None:
    TABLE.pop("aten.atan")
    rule("aten.atan", "... -> ...", linear=((0,),))
    forget()
    verdict = check_operator("atan", Sweep())
    assert verdict.outcome == "WRONG" and "Partial('sum')" in verdict.text


def _task(name: str) -> str:
    if name == "abort":
        os.kill(os.getpid(), signal.SIGKILL)
    while name == "hang":
        pass
    if name == "fault":
        raise ValueError("no")
    return name


def test_tasks_that_hang_or_abort_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LIMIT", 0.1)
    done = {one.task: (one.result, one.failure) for one in pool.run_tasks(_task, ["a", "abort", "hang", "fault", "b"], 1)}
    assert done["a"] == ("a", "") and done["b"] == ("b", "")
    assert done["abort"][1] == "abort" and done["hang"][1] == "hang" and done["fault"][1] == "fault: ValueError: no"


def test_coverage_is_in_step_with_the_table() -> None:
    text = COVERAGE.read_text()
    listed = re.findall(r"^- `(aten|prims)\.(\w+)`", text, re.MULTILINE)
    assert listed and "not known" not in text, "operators that raise: say why in shardwise/verify/coverage.py"
    ruled = [f"{space}.{name}" for space, name in listed if f"{space}.{name}" in TABLE or f"{space}.{name}.default" in TABLE]
    assert ruled == [], "operators that have a rule now: write docs/coverage.md anew"
    assert set(operators()) <= set(re.findall(r"`([\w.-]+)`", text)), "write docs/coverage.md anew"


def test_the_page_tells_figures_and_reasons() -> None:
    raises = Verdict("b", "error", {"right": 1, "error": 1}, "[Shard(0)]: OperatorError: why", ["aten.b"])
    text = page([[Verdict("a", "right", {"right": 2}), raises, Verdict("c", "random")] for _ in SWEEPS])
    assert "| (2, 2) | 2 | 1 (50.0%) | 1 | 0 | 0 | 4 | 3 |" in text
    assert (
        "- `b`: not known ([Shard(0)]: OperatorError: why)" in text and "- `aten.b`: b" in text and "one device: `c`." in text
    )


# ── rules of users ──


@torch.library.custom_op("test_verify::dense", mutates_args=())
def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu()


@dense.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


SAMPLES = [(torch.randn(5, 4), torch.randn(4, 3))]
add = partial(sw.rule, "test_verify::dense", "m k, k n -> m n", samples=SAMPLES)


def test_a_rule_of_a_user_takes_effect_at_once(table: dict[str, object]) -> None:
    x = sw.ones(6, 4, mesh=sw.init_mesh(a=2), placements=[Shard(0)])
    with sw.trace_comm() as log:
        assert dense(x, torch.ones(4, 3)).placements == (Replicate(),)
    assert log.fallbacks == ["test_verify.dense"]
    before = fingerprint()
    add(lost=None)
    assert fingerprint() != before
    with sw.trace_comm() as log:
        assert dense(x, torch.ones(4, 3)).placements == (Shard(0),)
    assert log.fallbacks == log.records == []


def test_a_rule_that_is_not_sound_is_refused_with_a_counterexample(table: dict[str, object]) -> None:
    before = fingerprint()
    with pytest.raises(OperatorError) as refused:
        add()
    text = str(refused.value)
    assert (
        "the rule 'm k, k n -> m n' of test_verify.dense is refused: on tensors [5, 4], [4, 3] with placements [Shard(1)], "
        in text
    )
    assert "where 'k' is sharded and the result is said to be Partial(sum), it gives " in text
    assert "or that it cannot be sharded: whole='k'" in text
    assert fingerprint() == before
    with pytest.raises(OperatorError, match=r"a partial sum is said to pass.*Leave these arguments out of linear="):
        add(whole="k", linear=((0,),))
    with pytest.raises(OperatorError, match=r"where 'm' is sharded.*If 'm' cannot be sharded, say whole='m'"):
        sw.rule(dense, "m k, k n -> n m", samples=[(torch.randn(3, 4), torch.randn(4, 3))], lost=None)


def test_an_operator_has_one_rule(table: dict[str, object]) -> None:
    add(lost=None)
    before = fingerprint()
    with pytest.raises(OperatorError, match=r"test_verify.dense.default has a rule already, at .*test_verify.py:\d+"):
        add(whole="k")
    assert fingerprint() == before


def test_a_rule_needs_samples_and_an_operator_of_the_user(table: dict[str, object]) -> None:
    with pytest.raises(OperatorError, match=r"needs samples=.*proven on them before it is used"):
        add(samples=[])
    with pytest.raises(ArgumentError, match="a tuple of its arguments, got a tensor"):
        add(samples=[torch.ones(2)])
    with pytest.raises(OperatorError, match=r"aten.mm is served by Shardwise"):
        sw.rule("aten::mm", "m k, k n -> m n", samples=SAMPLES)
    with pytest.raises(OperatorError, match="no such operator"):
        sw.rule("test_verify::nothing", "... -> ...", samples=SAMPLES)


# ── fallbacks are visible ──


def test_fallbacks_are_counted_and_can_be_forbidden() -> None:
    x = sw.ones(4, 4, mesh=sw.init_mesh(a=2), placements=[Shard(0)])
    with sw.trace_comm() as log:
        torch.diag_embed(x)
        torch.geqrf(x)
    assert "aten.diag_embed" in log.decomposed and "decomposed for want of a rule: aten.diag_embed (x1)" in str(log)
    assert log.fallbacks and log.fallbacks[0] in str(log)
    with sw.communication("forbid"), pytest.raises(CommunicationError, match="it has no rule, so its inputs are gathered"):
        torch.geqrf(x)
