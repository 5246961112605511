"""Checks every rule for soundness and completeness on samples of its operators; gives one verdict for each overload."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..propagation.table import TABLE, find, names_of
from .calls import Sample
from .completeness import missing
from .soundness import check

#: How many counterexamples of one operator are kept.
SHOWN = 3


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fixed = [sample for sample in several if _repeats(sample)]
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


def _repeats(sample: Sample) -> bool:
    """Whether the call can be made again, and draws no random numbers."""
    before = torch.get_rng_state()
    try:
        sample.run()
    except Exception:  # what it reads may be gone: an argument that another operator wrote to
        return False
    return bool(torch.equal(before, torch.get_rng_state()))


def unreached(samples: Mapping[str, list[Sample]]) -> list[str]:
    """The rows of the table that no sample uses."""
    used = {name for several in samples.values() for name in names_of(several[0].op)}
    return sorted(set(TABLE) - used)
