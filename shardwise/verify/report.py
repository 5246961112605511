"""What the command line prints while it checks: a progress bar, one line for each operator, a summary."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from .operators import Sweep, Verdict, check_operator
from .pool import TaskResult, run
from .rules import RuleVerdict, check_rule, unreached
from .samples import operators, recorded

#: Operators whose calls reach rules of every family in a few seconds, and how many samples of each of these are kept.
QUICK, QUICK_SAMPLES = ("amax", "cumsum", "gather", "matmul", "nn.functional.cross_entropy", "roll"), 2


def _followed(results: Iterable[TaskResult], total: int) -> Iterable[TaskResult]:
    """The results, with a bar on a terminal that shows how many there are."""
    shown = sys.stderr.isatty()
    for number, done in enumerate(results, 1):
        if shown:
            sys.stderr.write("\r\033[K")
        yield done
        if shown:
            bar = "#" * (40 * number // total)
            sys.stderr.write(f"[{bar:<40}] {number}/{total} {done.task}")
            sys.stderr.flush()
    if shown:
        sys.stderr.write("\r\033[K")


def sweep_operators(names: Sequence[str], sweep: Sweep, workers: int, show: Callable[[str], Any] = print) -> list[Verdict]:
    """Check operators, and print a line for each and a summary."""
    verdicts = []
    for done in _followed(run(partial(check_operator, sweep=sweep), names, workers), len(names)):
        outcome, _, text = done.failure.partition(": ")
        verdicts.append(done.result or Verdict(done.task, outcome, text=text))
        show(str(verdicts[-1]))
    show(summary(verdicts))
    return sorted(verdicts, key=lambda verdict: verdict.name)


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many operators were right, and how the others were not."""
    tried = [v for v in verdicts if v.tried]
    counts, served = Counter(v.outcome for v in verdicts), Counter(v.served for v in tried)
    aside = ", ".join(f"{counts[word]} {word}" for word in ("random", "uninitialised", "no samples") if counts[word])
    bad = ", ".join(f"{counts[word]} {word}" for word in ("error", "WRONG", "hang", "abort", "fault"))
    ways = ", ".join(f"{how} {n}" for how, n in sorted(served.items()))
    return (
        f"{len(tried)} operators: {counts['right']} right on every combination, {bad}; served by {ways}; "
        f"aside: {aside or 'none'}"
    )


def check_rules(
    chosen: Callable[[str], bool], workers: int, quick: bool = False, show: Callable[[str], Any] = print
) -> list[RuleVerdict]:
    """Check rules, and print a line for each, a program for each that is unsound, and a summary."""
    database = operators()
    if quick:
        samples = recorded([database[name] for name in QUICK], QUICK_SAMPLES, others=False)
    else:
        samples = recorded(database.values())
    names = [name for name in samples if chosen(name)]
    verdicts = []
    for done in _followed(run(partial(check_rule, samples=samples), names, workers), len(names)):
        verdict = done.result or RuleVerdict(done.task, unsound=[(done.failure, "")])
        verdicts.append(verdict)
        show(str(verdict))
        for text, program in verdict.unsound:
            show(f"\n{text}\n\n{program}\n")
    counts = Counter(verdict.outcome for verdict in verdicts)
    trials, entries = sum(v.trials for v in verdicts), sum(len(v.missing) for v in verdicts)
    show(
        f"{len(verdicts)} operators, {trials:,} trials: {counts['UNSOUND']} unsound, {entries} placements of "
        f"{counts['missing']} operators not offered, {counts['aside']} aside"
    )
    if not quick and len(names) == len(samples):
        show(f"rows without a sample: {', '.join(unreached(samples)) or 'none'}")
    return verdicts
