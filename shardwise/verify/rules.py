"""Checks every rule for soundness and completeness on samples of its operators; gives one verdict for each overload."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..propagation.table import TABLE, find, names_of
from .calls import Sample
from .completeness import missing
from .pool import run_tasks
from .samples import is_random, operators, recorded
from .soundness import check

#: How many counterexamples of one operator are kept.
SHOWN = 3
#: Operators whose calls reach rules of every family in a few seconds, and how many samples of each of these are kept.
QUICK, QUICK_SAMPLES = ("amax", "cumsum", "gather", "matmul", "nn.functional.cross_entropy", "roll"), 2


@dataclass
class RuleVerdict:
    """What became of one overload: how many trials there were, counterexamples with a program each, what is not offered."""

    name: str
    samples: int = 0
    trials: int = 0
    unsound: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    aside: str = ""

    @property
    def outcome(self) -> str:
        """One word."""
        return "UNSOUND" if self.unsound else "missing" if self.missing else "aside" if self.aside else "sound"

    def __str__(self) -> str:
        line = f"{self.outcome:<8} {self.name}: {self.samples} samples, {self.trials} trials"
        return "; ".join([line, *([self.aside] if self.aside else []), *(f"not offered: {entry}" for entry in self.missing)])


def check_rule(name: str, samples: Mapping[str, list[Sample]]) -> RuleVerdict:
    """Check the rule of one overload on its samples."""
    several = samples[name]
    verdict, row = RuleVerdict(name, len(several)), find(several[0].op)
    if row is None or "empty" in name:
        verdict.aside = "its results are not written"
        return verdict
    if row.unoffered.startswith("all:"):
        verdict.aside = f"refused{row.unoffered.removeprefix('all')}"
        return verdict
    with warnings.catch_warnings(action="ignore"):
        fixed = [sample for sample in several if is_random(sample) is False]
        if not fixed:
            verdict.aside = "its results are random"
            return verdict
        for sample in fixed:
            count, found = check(sample, row)
            verdict.trials += count
            if len(verdict.unsound) < SHOWN:
                verdict.unsound += [(str(one), one.program()) for one in found[:1]]
        verdict.missing = missing(fixed, row)
    return verdict


def check_rules(
    chosen: Callable[[str], bool], workers: int, quick: bool = False, show: Callable[[str], Any] = print
) -> list[RuleVerdict]:
    """Check rules, and print a line for each, a program for each that is unsound, and a summary."""
    every = operators()
    samples = recorded([every[name] for name in QUICK], QUICK_SAMPLES, others=False) if quick else recorded(every.values())
    names = [name for name in samples if chosen(name)]
    verdicts = []
    for done in run_tasks(partial(check_rule, samples=samples), names, workers):
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
        used = {name for several in samples.values() for name in names_of(several[0].op)}
        show(f"rows without a sample: {', '.join(sorted(set(TABLE) - used)) or 'none'}")
    return verdicts
