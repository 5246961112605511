"""The two sweeps of `python -m shardwise verify`: over rules (are they sound, are they complete?) and over the operators of
torch's database (are results, written arguments and gradients those of one device, on many placements?).
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import trace_comm
from ..layouts.mesh import Mesh
from ..layouts.placement import Partial, Placement, Replicate, Shard
from ..propagation.table import TABLE, find, names_of
from ..tensor.dtensor import DTensor
from .calls import Sample
from .completeness import missing
from .pool import run_tasks
from .samples import cases, chosen, is_random, operators, recorded, run, uninitialised
from .soundness import check
from .spread import difference, simulated_mesh, spread

#: How many counterexamples of one operator are kept.
SHOWN = 3
#: Operators whose calls reach rules of every family in a few seconds, and how many samples of each of these are kept.
QUICK, QUICK_SAMPLES = ("amax", "cumsum", "gather", "matmul", "nn.functional.cross_entropy", "roll"), 2
#: How many samples of an operator are tried, and how many combinations of placements of each.
SAMPLES, COMBINATIONS = 6, 14
#: Gradients pass through more steps than values.
GRADIENTS = 2e-3


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    row, verdict = find(samples[name][0].op), RuleVerdict(name, len(samples[name]))
    if row is None or "empty" in name:
        return replace(verdict, aside="its results are not written")
    if row.unoffered.startswith("all:"):
        return replace(verdict, aside=f"refused{row.unoffered.removeprefix('all')}")
    with warnings.catch_warnings(action="ignore"):
        fixed = [sample for sample in samples[name] if is_random(sample) is False]
        if not fixed:
            return replace(verdict, aside="its results are random")
        for sample in fixed:
            count, found = check(sample, row)
            verdict.trials += count
            if len(verdict.unsound) < SHOWN:
                verdict.unsound += [(str(one), one.program()) for one in found[:1]]
        verdict.missing = missing(fixed, row)
    return verdict


def check_rules(chosen: Callable[[str], bool], workers: int, quick: bool = False, show: Any = print) -> list[RuleVerdict]:
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


# ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sweep:
    """What is swept: the shape of a mesh, a dtype (none: float32 where an operator has it), in-place forms or not."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype | None = None
    inplace: bool = False


@dataclass
class Verdict:
    """What became of one operator: how many combinations were right, what went wrong first, and what served it.

    `outcome` is "right", "error", "WRONG", "hang", "abort", "random", "uninitialised" or "no samples" (none on dense tensors).
    """

    name: str
    outcome: str = "right"
    counts: dict[str, int] = field(default_factory=dict)
    text: str = ""
    gathered: list[str] = field(default_factory=list)
    decomposed: list[str] = field(default_factory=list)

    @property
    def served(self) -> str:
        """ "rule", "decomposition" or "gather", whichever is furthest from a rule of its own."""
        return "gather" if self.gathered else "decomposition" if self.decomposed else "rule"

    @property
    def tried(self) -> bool:
        """Whether there was something to compare."""
        return self.outcome not in ("random", "uninitialised", "no samples")

    def __str__(self) -> str:
        if not self.tried:
            return f"{self.outcome:<8} {self.name}"
        right, total = self.counts.get("right", 0), sum(self.counts.values())
        line = f"{self.outcome:<8} {self.name}: {right} of {total} combinations"
        if self.served != "rule":
            line += f"; {self.served}: {', '.join(self.gathered or self.decomposed)}"
        return f"{line}; {self.text}" if self.text else line


def names(sweep: Sweep) -> list[str]:
    """The operators that a sweep is about."""
    return [name for name, op in operators().items() if not sweep.inplace or op.get_inplace() is not None]


def check_operator(name: str, sweep: Sweep) -> Verdict:
    """Compare one operator with one device on many placements."""
    if uninitialised(name):
        return Verdict(name, "uninitialised")
    with warnings.catch_warnings(action="ignore"):
        several = [(case, is_random(case)) for case in cases(operators()[name], sweep.dtype, SAMPLES, sweep.inplace)]
        run = [case for case, random in several if random is not None]
        if not run or any(random for _, random in several):
            return Verdict(name, "random" if run else "no samples")
        with trace_comm() as log:
            found = [pair for number, case in enumerate(chosen(run, SAMPLES)) for pair in _check_case(case, sweep, number)]
    outcome, text = min(found, key=lambda pair: ("WRONG", "error", "right").index(pair[0]), default=("right", ""))
    counts = dict(Counter(outcome for outcome, _ in found))
    return Verdict(name, outcome, counts, text, sorted(set(log.fallbacks)), sorted(set(log.decomposed)))


def placements_of(tensor: Tensor, mesh: Mesh) -> list[tuple[Placement, ...]]:
    """The placements of a tensor that are tried: replicated, sharded along every dim, also into nothing and all,
    Partial(sum)."""
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    if tensor.dtype is not torch.bool:
        options.append(Partial("sum"))
    if mesh.ndim == 1 and tensor.ndim:
        options.append(Shard(0, sizes=(*(0,) * (mesh.size() - 1), tensor.shape[0])))
    return list(itertools.product(options, repeat=mesh.ndim))


def combinations(tensors: Sequence[Tensor], mesh: Mesh, limit: int, seed: int) -> list[tuple[Any, ...]]:
    """Placements for all tensors together: every combination, or a fixed choice of `limit`."""
    every = [placements_of(tensor, mesh) for tensor in tensors]
    if math.prod(map(len, every)) <= limit:
        return list(itertools.product(*every))
    chance = random.Random(seed)
    return list(dict.fromkeys(tuple(chance.choice(options) for options in every) for _ in range(limit)))


def _check_case(case: Sample, sweep: Sweep, seed: int) -> Iterator[tuple[str, str]]:
    mesh = simulated_mesh(sweep.shape)
    dense: dict[bool, Outputs] = {}
    for number, placements in enumerate(combinations(case.tensors, mesh, COMBINATIONS, seed)):
        wanted = case.differentiable and (not sweep.inplace or number % 2 == 1)
        if wanted not in dense:
            dense[wanted] = _run_dense(case, wanted, sweep.inplace)
        want = dense[wanted]
        shown = " ".join(f"{list(p)}" for p in placements)
        try:
            several = enumerate(zip(case.tensors, placements, strict=True), number)
            given = [spread(t, mesh, p, turn) for turn, (t, p) in several]
            got = _run(case, given, want.differentiable, sweep.inplace, number)
        except Exception as error:
            yield "error", f"{shown}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300]
            continue
        text = _differences(got, want)
        yield ("right", "") if text is None else ("WRONG", f"sample {seed}, {shown}: {text}")


class Outputs(NamedTuple):
    """What one run gave: results, the arguments after it, and their gradients."""

    results: Any
    arguments: list[Any]
    gradients: list[Any]
    differentiable: bool


def _run_dense(case: Sample, differentiable: bool, inplace: bool) -> Outputs:
    """The call on one device; without gradients where it has none for these arguments."""
    if differentiable:
        with suppress(RuntimeError):
            return _run(case, [t.clone() for t in case.tensors], True, inplace)
    return _run(case, [t.clone() for t in case.tensors], False, inplace)


def _run(case: Sample, tensors: list[Any], differentiable: bool, inplace: bool, number: int = 0) -> Outputs:
    generator = torch.Generator().manual_seed(0)

    def cotangent(out: Tensor) -> Tensor:
        """A gradient of a result; of DTensors replicated, sharded or partial, by the number of the run."""
        value = torch.randn(out.shape, dtype=out.dtype, generator=generator)
        if not isinstance(out, DTensor):
            return value
        placement = (Replicate(), Shard(0) if value.ndim else Replicate(), Partial("sum"))[number % 3]
        return spread(value, out.mesh, [placement] * out.mesh.ndim, number)

    results = run(case, tensors, differentiable, cotangent, inplace)
    return Outputs(results, tensors, [t.grad for t in tensors] if differentiable else [], differentiable)


def _differences(got: Outputs, want: Outputs) -> str | None:
    text = difference(got.results, want.results)
    if text is not None:
        return text
    text = difference(got.arguments, want.arguments)
    if text is not None:
        return f"argument after the call: {text}"
    for number, (one, other) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if (one is None) != (other is None) and (other if one is None else one).any():
            return f"gradient {number} is {'missing' if one is None else 'there'}, unlike on one device"
        text = _gradient(one, other) if one is not None and other is not None else None
        if text is not None:
            return f"gradient {number} {text}"
    return None


def _gradient(got: Any, want: Tensor) -> str | None:
    """How gradients differ, but for elements that have none on one device: torch has other formulas for tensor subclasses, with
    other ways to come to inf - inf."""
    if want.isnan().any() and isinstance(got, DTensor):
        got = got.full_tensor().masked_fill(want.isnan(), torch.nan)
    return difference(got, want, GRADIENTS)


def sweep_operators(names: Sequence[str], sweep: Sweep, workers: int, show: Callable[[str], Any] = print) -> list[Verdict]:
    """Check operators, and print a line for each and a summary."""
    verdicts = []
    for done in run_tasks(partial(check_operator, sweep=sweep), names, workers):
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
