"""Checks each of torch's operators on many placements: results, written arguments and gradients are those of one device."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import trace_comm
from ..layouts.mesh import Mesh
from ..layouts.placement import Partial, Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from .compare import difference
from .pool import TimeOut
from .samples import Case, cases, chosen, is_random, operators, uninitialised
from .spread import flat, spread

#: How many samples of an operator are tried, and how many combinations of placements of each.
SAMPLES, COMBINATIONS = 6, 14
#: Gradients pass through more steps than values.
GRADIENTS = 2e-3

Combination = tuple[tuple[Placement, ...], ...]


@dataclass(frozen=True)
class Sweep:
    """What is swept: a mesh, a dtype (none: float32 where an operator has it), in-place forms or not.

    >>> Sweep((2, 2)).mesh
    Mesh(a=2, b=2)
    """

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype | None = None
    inplace: bool = False

    @property
    def mesh(self) -> Mesh:
        """The simulated mesh."""
        return Mesh(tuple("abcdef"[: len(self.shape)]), self.shape, range(math.prod(self.shape)), "cpu", "simulated")


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
    found = operators()
    return [n for n, op in found.items() if not sweep.inplace or op.get_inplace() is not None]


def check_operator(name: str, sweep: Sweep) -> Verdict:
    """Compare one operator with one device on many placements."""
    verdict = Verdict(name)
    if uninitialised(name):
        return Verdict(name, "uninitialised")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        several = cases(operators()[name], sweep.dtype, SAMPLES, sweep.inplace)
        run = [case for case in several if _runs(case)]
        if not run:
            return Verdict(name, "no samples")
        if any(is_random(case) for case in run):
            return Verdict(name, "random")
        with trace_comm() as log:
            found = [pair for number, case in enumerate(chosen(run, SAMPLES)) for pair in _check_case(case, sweep, number)]
    failed = [pair for pair in found if pair[0] != "right"]
    if failed:
        verdict.outcome, verdict.text = next((pair for pair in failed if pair[0] == "WRONG"), failed[0])
    verdict.counts = dict(Counter(outcome for outcome, _ in found))
    verdict.gathered, verdict.decomposed = sorted(set(log.fallbacks)), sorted(set(log.decomposed))
    return verdict


def _runs(case: Case) -> bool:
    try:
        case.run([t.clone() for t in case.tensors])
    except Exception:  # samples are made for devices and builds of every kind
        return False
    return True


def placements_of(tensor: Tensor, mesh: Mesh) -> list[tuple[Placement, ...]]:
    """The placements of a tensor that are tried: replicated, sharded along every dim, also into nothing and all,
    Partial(sum)."""
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    if tensor.dtype is not torch.bool:
        options.append(Partial("sum"))
    if mesh.ndim == 1 and tensor.ndim:
        options.append(Shard(0, sizes=(*(0,) * (mesh.size() - 1), tensor.shape[0])))
    return list(itertools.product(options, repeat=mesh.ndim))


def combinations(tensors: Sequence[Tensor], mesh: Mesh, limit: int, seed: int) -> list[Combination]:
    """Placements for all tensors together: every combination, or a fixed choice of `limit`."""
    every = [placements_of(tensor, mesh) for tensor in tensors]
    total = 1
    for options in every:
        total *= len(options)
    if total <= limit:
        return list(itertools.product(*every))
    chance = random.Random(seed)
    return list(dict.fromkeys(tuple(chance.choice(options) for options in every) for _ in range(limit)))


def _check_case(case: Case, sweep: Sweep, seed: int) -> Iterator[tuple[str, str]]:
    mesh = sweep.mesh
    dense: dict[bool, Outputs] = {}
    for number, placements in enumerate(combinations(case.tensors, mesh, COMBINATIONS, seed)):
        wanted = case.differentiable and (not sweep.inplace or number % 2 == 1)
        if wanted not in dense:
            dense[wanted] = run_dense(case, wanted, sweep.inplace)
        want = dense[wanted]
        shown = " ".join(f"{list(p)}" for p in placements)
        try:
            several = enumerate(zip(case.tensors, placements, strict=True), number)
            given = [spread(t, mesh, p, turn) for turn, (t, p) in several]
            got = _run(case, given, want.differentiable, sweep.inplace, _spread_cotangents(mesh, number))
        except TimeOut:
            raise
        except Exception as error:
            yield "error", f"{shown}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300]
            continue
        text = _differences(got, want)
        yield ("right", "") if text is None else ("WRONG", f"sample {seed}, {shown}: {text}")


@dataclass
class Outputs:
    """What one run gave: results, the arguments after it, and their gradients."""

    results: Any
    arguments: list[Any]
    gradients: list[Any]
    differentiable: bool


def run_dense(case: Case, differentiable: bool, inplace: bool) -> Outputs:
    """The call on one device; without gradients where it has none for these arguments."""
    if differentiable:
        try:
            return _run(case, [t.clone() for t in case.tensors], True, inplace, lambda out, cotangent: cotangent)
        except RuntimeError:
            pass
    return _run(case, [t.clone() for t in case.tensors], False, inplace, lambda out, cotangent: cotangent)


def _run(case: Case, tensors: list[Any], differentiable: bool, inplace: bool, placed: Any) -> Outputs:
    if not differentiable:
        with torch.no_grad():
            return Outputs(case.run(tensors), tensors, [], False)
    leaves = [t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in tensors]
    results = case.run([t.clone() if inplace and number == 0 else t for number, t in enumerate(leaves)])
    outs = [out for out in flat(results) if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(out.shape, dtype=out.dtype, generator=generator) for out in outs]
        torch.autograd.backward(outs, [placed(out, cotangent) for out, cotangent in zip(outs, cotangents, strict=True)])
    return Outputs(results, tensors, [t.grad for t in leaves], True)


def _spread_cotangents(mesh: Mesh, number: int) -> Any:
    """Gradients of results are replicated, shard or partial, in turn."""

    def placed(out: Any, cotangent: Tensor) -> Any:
        if not isinstance(out, DTensor):
            return cotangent
        shard: Placement = Shard(0) if cotangent.ndim else Replicate()
        placement = (Replicate(), shard, Partial("sum"))[number % 3]
        return spread(cotangent, mesh, [placement] * mesh.ndim, number)

    return placed


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
