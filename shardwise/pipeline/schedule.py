"""`Schedule`: what each stage of a pipeline runs when, as a table; those of GPipe and 1F1B; what every table must hold.

Pure functions over small tuples. A row is a stage, a column a tick; a cell is the forward or the backward of a microbatch, or
nothing.

>>> print(gpipe(2, 2))
stage 0  F0 F1 .  .  B0 B1
stage 1  .  F0 F1 B0 B1 .
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ..base.argument_checks import a_text, choice, instance, integer, number, refuse, several
from ..errors import PipelineError
from .timeline import Span, Timeline


class Entry(NamedTuple):
    """Forward (F) or backward (B) of a microbatch."""

    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Cell = Entry | None
#: A time, or one for each stage.
Cost = float | Sequence[float]
#: Characters of the widest drawing, and microbatches of the longest table.
WIDEST, MOST_MICROBATCHES = 10_000, 65_536


@dataclass(frozen=True, slots=True)
class Schedule:
    """A table of what runs when: a row for each stage, as long as all others; a cell of None is idle.

    >>> Schedule.read("F0 .  .  B0", ".  F0 B0 . ").alive
    (1, 1)
    """

    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        words = "Schedule: rows", "a row for each stage, each several entries (F or B of a microbatch) or None"
        if not isinstance(self.rows, tuple | list) or not self.rows:
            refuse(*words, self.rows)
        for cell in [cell for row in self.rows for cell in several(row, *words)]:
            instance(cell, (Entry, type(None)), *words)

    @staticmethod
    def read(*rows: str) -> Schedule:
        """The table that is written as `print` shows it, one text for each stage, checked."""
        texts = [a_text(row, "Schedule.read: each of *rows", "a text such as 'F0 . B0'") for row in rows]
        return check(Schedule(tuple(tuple(_cell(word) for word in row.split()) for row in texts)))

    @property
    def stages(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return len({cell.microbatch for cell in self.rows[0] if cell})

    @property
    def columns(self) -> tuple[tuple[Cell, ...], ...]:
        """Tick by tick, what each stage runs."""
        return tuple(zip(*self.rows, strict=True))

    @property
    def alive(self) -> tuple[int, ...]:
        """For each stage how many microbatches it holds at most, forward done and backward not."""
        changes = ([1 if cell.kind == "F" else -1 for cell in row if cell] for row in self.rows)
        return tuple(max(accumulate(row, initial=0)) for row in changes)

    def bubble(self, forward: Cost = 1.0, backward: Cost = 1.0) -> float:
        """The share of time in which stages wait, where a forward and a backward take so long, everywhere or on each stage.

        >>> gpipe(4, 4).bubble(), one_f_one_b(4, 4).bubble(backward=2.0)  # (p - 1) / (m + p - 1) is 3/7
        (0.4285714285714286, 0.4285714285714286)
        """
        return self.timeline(forward, backward).bubble

    def timeline(self, forward: Cost = 1.0, backward: Cost = 1.0) -> Timeline:
        """When each entry runs, where a stage waits for nothing but what its entries need."""
        forward, backward = _cost(forward, "forward", self.stages), _cost(backward, "backward", self.stages)
        done: dict[tuple[int, Entry], float] = {}
        free, spans = [0.0] * self.stages, []
        for column in self.columns:
            for stage, cell in enumerate(column):
                if cell is not None:
                    start = max([free[stage], *(done[need] for need in needs(stage, cell, self.stages))])
                    cost = forward if cell.kind == "F" else backward
                    done[stage, cell] = free[stage] = start + cost[stage]
                    spans.append(Span(stage, *cell, start, free[stage]))
        return Timeline(tuple(f"stage {stage}" for stage in range(self.stages)), tuple(spans))

    def draw(self, backward: float = 2.0, width: int = 96) -> str:
        """The timeline as text, where a backward takes so many times as long as a forward."""
        integer(width, "Schedule.draw: width", 1, WIDEST)
        return self.timeline(1.0, backward).draw(width)

    def svg(self, path: str | os.PathLike[str] | None = None, backward: float = 2.0) -> str:
        """The timeline as a picture, written to `path` if one is given."""
        return self.timeline(1.0, backward).svg(path)

    def __str__(self) -> str:
        words = [[str(cell or ".") for cell in row] for row in self.rows]
        wide = max((len(word) for row in words for word in row), default=1)
        lines = (f"stage {stage}  " + " ".join(f"{word:<{wide}}" for word in row) for stage, row in enumerate(words))
        return "\n".join(line.rstrip() for line in lines)


def _cost(cost: Any, name: str, stages: int) -> list[float]:
    """A time for each stage."""
    what = f"Schedule: {name}"
    each = [cost] * stages if isinstance(cost, int | float) else several(cost, what, "a time, or one for each stage")
    found = [number(one, what, least=0.0, most=1e12) for one in each]
    if len(found) != stages:
        raise PipelineError(f"{name} is a time, or one for each of {stages} stages, got {len(found)} times")
    return found


def needs(stage: int, entry: Entry, stages: int) -> list[tuple[int, Entry]]:
    """What an entry comes after: the forward of the stage before; its own forward and the backward of the stage behind.

    >>> needs(1, Entry("B", 0), 3)
    [(1, Entry(kind='F', microbatch=0)), (2, Entry(kind='B', microbatch=0))]
    """
    if entry.kind == "F":
        return [(stage - 1, entry)] if stage else []
    return [(stage, Entry("F", entry.microbatch)), *([(stage + 1, entry)] if stage + 1 < stages else [])]


def _cell(word: str) -> Cell:
    if word == ".":
        return None
    if word[:1] not in "FB" or not word[1:].isdigit():
        raise PipelineError(
            f"a cell of the rows of a schedule is F or B with the number of a microbatch, or a dot, got {word!r}"
        )
    return Entry(word[0], int(word[1:]))


# ── the tables that have a name ───────────────────────────────────────────────────────────────────────────────────────


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _timed([[Entry(kind, j) for kind in "FB" for j in range(microbatches)]] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward, after as many forwards as there are stages behind: a stage holds few microbatches.

    >>> print(one_f_one_b(2, 3))
    stage 0  F0 F1 .  B0 F2 B1 .  B2
    stage 1  .  F0 B0 F1 B1 F2 B2 .
    """
    rows = []
    for stage in range(stages):
        first = min(stages - stage - 1, microbatches)
        order = [Entry("F", j) for j in range(first)]
        for j in range(microbatches - first):
            order += [Entry("F", first + j), Entry("B", j)]
        rows.append(order + [Entry("B", j) for j in range(microbatches - first, microbatches)])
    return _timed(rows)


def forwards(stages: int, microbatches: int) -> Schedule:
    """Forwards alone.

    >>> print(forwards(2, 2))
    stage 0  F0 F1 .
    stage 1  .  F0 F1
    """
    return _timed([[Entry("F", j) for j in range(microbatches)]] * stages)


def _timed(orders: Sequence[Sequence[Entry]]) -> Schedule:
    """The table in which each stage runs its entries in order, each at the first tick at which all it needs is done."""
    done: set[tuple[int, Entry]] = set()
    left, rows = [list(order) for order in orders], [list[Cell]() for _ in orders]
    while any(left):
        ready = [
            order[0] if order and done.issuperset(needs(stage, order[0], len(orders))) else None
            for stage, order in enumerate(left)
        ]
        for stage, cell in enumerate(ready):
            rows[stage].append(cell)
            if cell is not None:
                done.add((stage, left[stage].pop(0)))
    return Schedule(tuple(map(tuple, rows)))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def make_schedule(name: str | Schedule, stages: int, microbatches: int | None) -> Schedule:
    """The table of a name for so many stages and microbatches; or a user's own, checked."""
    if isinstance(name, Schedule):
        check(name)
        if name.stages != stages or microbatches not in (None, name.microbatches):
            raise PipelineError(
                f"the schedule is for {name.stages} stages and {name.microbatches} microbatches, the pipeline has {stages} "
                f"stages{'' if microbatches is None else f' and {microbatches} microbatches'}; make one for these"
            )
        return name
    choice(name, "pipeline: schedule (or it is a Schedule)", SCHEDULES)
    count = stages if microbatches is None else integer(microbatches, "pipeline: microbatches", 1, MOST_MICROBATCHES)
    return SCHEDULES[name](stages, count)


# ── what every table must hold ────────────────────────────────────────────────────────────────────────────────────────


def check(schedule: Schedule) -> Schedule:
    """The schedule, if each stage runs each microbatch forward and backward once, and nothing before what it needs."""
    rows = schedule.rows
    if not rows or len({len(row) for row in rows}) != 1:
        raise PipelineError(f"a schedule has a row for each stage, all of one length, got lengths {[len(row) for row in rows]}")
    expected = {Entry(kind, j) for j in range(schedule.microbatches) for kind in "FB"}
    for stage, row in enumerate(rows):
        cells = [cell for cell in row if cell is not None]
        wrong = [*expected.symmetric_difference(cells), *(cell for cell in cells if cells.count(cell) > 1)]
        if wrong:
            raise PipelineError(
                f"stage {stage} of the schedule runs {min(wrong)} {cells.count(min(wrong))} times: each stage runs F and B of "
                f"microbatches 0 to {schedule.microbatches - 1} once"
            )
    at = {(stage, cell): tick for stage, row in enumerate(rows) for tick, cell in enumerate(row) if cell}
    for (stage, cell), tick in at.items():
        for need in needs(stage, cell, schedule.stages):
            if at[need] >= tick:
                raise PipelineError(
                    f"stage {stage} of the schedule runs {cell} at tick {tick}, and {need[1]} of stage {need[0]}, which it "
                    f"needs, at tick {at[need]}; run it before"
                )
    return schedule
