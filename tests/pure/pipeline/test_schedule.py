"""Schedules are tables: what holds for all of them, and what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardwise.errors import ArgumentError, PipelineError
from shardwise.pipeline import Entry, Schedule, Span, Timeline, check, gpipe, one_f_one_b
from shardwise.pipeline.schedule import SCHEDULES, make_schedule

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_is_valid_and_has_the_bubble_of_theory(name: str) -> None:
    for p, m in SIZES:
        table = check(SCHEDULES[name](p, m))
        assert (table.stages, table.microbatches) == (p, m)
        for backward in (1.0, 2.0, 0.5):
            assert table.bubble(backward=backward) == pytest.approx((p - 1) / (m + p - 1)), (p, m)
        assert len(table.columns) == 2 * (m + p - 1), "no tick more than needed"


def test_one_forward_one_backward_holds_no_more_than_the_stages_behind() -> None:
    for p, m in SIZES:
        assert one_f_one_b(p, m).alive == tuple(min(p - i, m) for i in range(p))
        assert gpipe(p, m).alive == (m,) * p


def test_a_table_is_printed_read_and_drawn(tmp_path: Path) -> None:
    table = one_f_one_b(3, 4)
    rows = [line.partition("  ")[2] for line in str(table).splitlines()]
    assert rows[0] == "F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3"
    assert Schedule.read(*(row + " ." * (len(table.columns) - len(row.split())) for row in rows)) == table
    assert table.draw(width=36).splitlines() == [
        "stage 0  001122        ▒0▒▒33▒1▒▒  ▒2▒▒  ▒3▒▒",
        "stage 1    0011    ▒0▒▒22▒1▒▒33▒2▒▒  ▒3▒▒",
        "stage 2      00▒0▒▒11▒1▒▒22▒2▒▒33▒3▒▒",
    ]
    picture = tmp_path / "table.svg"
    table.svg(str(picture))
    assert len([e for e in ElementTree.parse(picture).iter() if e.tag.endswith("rect")]) == 2 * 3 * 4


def test_a_timeline_tells_how_much_of_it_was_waiting() -> None:
    spans = (Span(0, "F", 0, 5.0, 6.0), Span(1, "F", 0, 6.0, 7.0), Span(1, "B", 0, 7.0, 9.0), Span(0, "B", 0, 9.0, 11.0))
    timeline = Timeline(("rank 0 <a&b>", "rank 1"), spans)
    assert (timeline.wall, timeline.busy, timeline.bubble) == (6.0, (3.0, 3.0), 0.5)
    assert "&lt;a&amp;b>" in timeline.svg()
    assert Timeline(("rank 0",), ()).bubble == 0.0 and Timeline(("rank 0",), ()).draw() == "rank 0"


REFUSED = {
    "stage 1 of the schedule runs F0 at tick 0, and F0 of stage 0, which it needs, at tick 0; run it before": (
        "F0 . B0",
        "F0 B0 .",
    ),
    "stage 0 of the schedule runs B1 0 times": ("F0 B0 F1", ". . ."),
    "stage 1 of the schedule runs F0 2 times": ("F0 . . B0", "F0 F0 B0 ."),
    "stage 1 of the schedule runs B0 0 times": ("F0 . B0", ". F0 ."),
    "all of one length, got lengths [2, 4]": ("F0 B0", ". F0 B0 ."),
    "a cell of the rows of a schedule is F or B with the number of a microbatch, or a dot, got 'W0'": ("F0 W0", "."),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_run_is_refused(words: str) -> None:
    with pytest.raises(PipelineError) as refused:
        Schedule.read(*REFUSED[words])
    assert words in str(refused.value)


def test_a_backward_needs_its_forward_and_the_stage_behind() -> None:
    with pytest.raises(PipelineError, match="runs B0 at tick 0, and F0 of stage 0, which it needs, at tick 1"):
        Schedule.read("B0 F0")
    with pytest.raises(PipelineError, match="stage 0 of the schedule runs B0 at tick 2, and B0 of stage 1"):
        Schedule.read("F0 . B0", ". F0 B0")


def test_which_table_is_meant() -> None:
    assert make_schedule("gpipe", 2, None) == gpipe(2, 2)
    assert make_schedule(gpipe(2, 3), 2, None).rows[0][0] == Entry("F", 0)
    for given, words in [
        (("2f2b", 2, 4), "schedule (or it is a Schedule) is one of 'gpipe', '1f1b', got '2f2b'"),
        (("gpipe", 2, 0), "microbatches is an integer from 1 to 65,536, got 0"),
        ((gpipe(2, 3), 2, 4), "for 2 stages and 3 microbatches, the pipeline has 2 stages and 4 microbatches"),
        ((gpipe(2, 3), 3, None), "for 2 stages and 3 microbatches, the pipeline has 3 stages; make"),
    ]:
        with pytest.raises((PipelineError, ArgumentError)) as refused:
            make_schedule(*given)
        assert words in str(refused.value)
