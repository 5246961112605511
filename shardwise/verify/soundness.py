"""Whether a rule is *sound*: every placement that it offers, on every mesh, gives the result of one device.

Two ways: every candidate of a sentence is taken as it is, whatever would be cheapest; and the operator is called on many
placements, so that what functions propose and programs do is checked with the moves around it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..base.schema import schema_of
from ..layouts.mesh import Mesh
from ..layouts.placement import Partial, Placement, Replicate, Shard
from ..propagation.decide import Candidate, State, along, offers
from ..propagation.notation import Call, Rule
from ..propagation.operator import operator_of
from ..propagation.table import find
from ..tensor.arguments import bind, keyed
from ..tensor.dispatch import carry_out
from ..tensor.dtensor import DTensor
from .calls import Sample, literal
from .spread import difference, shards_of, simulated_mesh, spread

#: How many pairs of candidates on a mesh of two axes, and how many placements of all tensors, are tried of one sample.
PAIRS, PLACEMENTS = 6, 8


@cache
def meshes() -> tuple[Mesh, ...]:
    """The simulated meshes that samples are spread over."""
    return simulated_mesh((2,)), simulated_mesh((3,)), simulated_mesh((2, 2))


@dataclass(frozen=True)
class Trial:
    """A sample with placements of its tensors on a mesh, and the candidate taken along each axis, if one is forced; `text` says
    how a counterexample differs from one device."""

    sample: Sample
    mesh: Mesh
    placements: tuple[tuple[Placement, ...], ...]
    choices: tuple[Candidate, ...] | None = None
    turn: int = 0
    text: str = ""

    def spread(self) -> list[DTensor]:
        """The tensors, distributed."""
        several = enumerate(zip(self.sample.tensors, self.placements, strict=True), self.turn)
        return [spread(tensor, self.mesh, placement, turn) for turn, (tensor, placement) in several]

    def run(self, tensors: Sequence[DTensor]) -> Any:
        """The operator on DTensors."""
        args, kwargs = self.sample.given(tensors)
        op = self.sample.op if self.choices is None else partial(taking, self.choices, self.sample.op)
        return op(*args, **kwargs)

    def __str__(self) -> str:
        shown, taken = ", ".join(str(list(placement)) for placement in self.placements), f" taking {self.choices}"
        return f"{self.sample.name} on {self.mesh} with {shown}{taken if self.choices else ''}: {self.text}"

    def program(self) -> str:
        """A short program that shows it."""
        sample, names = self.sample, [f"x{number}" for number in range(len(self.sample.tensors))]
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.axis_sizes.items())
        lines = ["import torch", "import shardwise as sw", "from math import inf, nan", "from shardwise import *", ""]
        lines += [f"mesh = sw.init_mesh({axes})"]
        for name, tensor, placement, x in zip(names, sample.tensors, self.placements, self.spread(), strict=True):
            shards = ", ".join(literal(shard) for shard in shards_of(x))
            given = f"mesh, {list(placement)}, shape={tuple(tensor.shape)}, run_check=False"
            lines += [f"{name} = {literal(tensor)}", f"d{name} = DTensor.from_local(sw.Bundle([{shards}]), {given})"]
        lines += [f"print({sample.written(names)})  # one device"]
        call = sample.written([f"d{name}" for name in names])
        if self.choices is None:
            lines += [f"print({call})"]
        else:
            lines.insert(4, "from shardwise.propagation.decide import Candidate\nfrom shardwise.verify.soundness import taking")
            target, _, rest = call.partition("(")
            lines += [f"print(taking({list(self.choices)}, {target}, {rest})"]
        return "\n".join(lines)


def taking(choices: Sequence[Candidate], op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator on DTensors in the way that the given candidates, one for each axis, say."""
    row = find(op)
    if row is None:
        raise LookupError(f"{op} has no rule")
    return carry_out(
        DTensor, op, args, kwargs, lambda call: along(row, call, dict(zip(call.tensors[0].mesh.axes, choices, strict=True)))
    )


def bound_call(sample: Sample, tensors: Sequence[DTensor]) -> Call:
    """The call of a sample as a rule reads it."""
    return bind(operator_of(sample.op), keyed(DTensor, operator_of(sample.op), *sample.given(tensors))[1])


def trials(sample: Sample, rule: Rule) -> Iterator[Trial]:
    """Everything that is tried of a sample."""
    candidates = _candidates(sample, rule)
    for mesh in meshes():
        chosen: list[tuple[tuple[Candidate, ...], tuple[int, ...] | None]]
        if mesh.ndim == 1:
            chosen = [((one,), sizes) for one in candidates for sizes in (None, (*(0,) * (mesh.size() - 1), -1))]
        else:
            pairs = list(itertools.product(candidates, repeat=2))
            chosen = [(pair, None) for pair in random.Random(0).sample(pairs, min(PAIRS, len(pairs)))]
        for by_axis, sizes in chosen:
            placed = _placed(by_axis, sample, sizes)
            if placed is not None:
                yield Trial(sample, mesh, placed, by_axis)
        for number, placements in enumerate(_placements(sample.tensors, mesh)):
            yield Trial(sample, mesh, placements, None, number)


def _candidates(sample: Sample, rule: Rule) -> list[Candidate]:
    if schema_of(sample.op).written or not sample.tensors or (not rule.inputs and rule.function is None):
        return []
    replicated = [spread(tensor, meshes()[0], [Replicate()]) for tensor in sample.tensors]
    possible = [kinds_of(tensor) for tensor in sample.tensors]
    return [
        candidate
        for candidate in offers(rule, bound_call(sample, replicated))
        if all(not isinstance(state, str) or state in kinds for state, kinds in zip(candidate.wants, possible, strict=True))
    ]


def kinds_of(tensor: Tensor) -> list[str]:
    """The kinds of partial values that a tensor is tried with."""
    if tensor.dtype is torch.bool:
        return ["max", "min"]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return ["sum", "max", "min"]
    kinds = ["sum", "product"] if tensor.is_complex() else ["sum", "max", "min", "product"]
    large = tensor.numel() and bool((tensor.isfinite() & (tensor.abs() > torch.finfo(tensor.dtype).max / 16)).any())
    return kinds if large else ["avg", *kinds]


def _placed(choices: Sequence[Candidate], sample: Sample, sizes: Any) -> tuple[tuple[Placement, ...], ...] | None:
    """The placements that candidates want; explicit sizes (-1: all) for what is sharded. None where there is nothing to shard
    so, or a tensor cannot be partial in two ways."""
    if sizes is not None and not any(isinstance(state, int) for choice in choices for state in choice.wants):
        return None
    for by_axis in zip(*((*choice.wants, *choice.results) for choice in choices), strict=True):
        if len({state for state in by_axis if isinstance(state, str)}) > 1:
            return None
    wants = zip(*(choice.wants for choice in choices), strict=True)
    pairs = zip(sample.tensors, wants, strict=True)
    return tuple(tuple(placement_of(state, tensor, sizes) for state in states) for tensor, states in pairs)


def placement_of(state: State, tensor: Tensor, sizes: Any = None) -> Placement:
    """The placement of a tensor along an axis; `sizes` of its shards, where -1 is all of it."""
    if isinstance(state, int):
        return Shard(state, sizes=sizes and tuple(tensor.shape[state] if n < 0 else n for n in sizes))
    return Replicate() if state is None else Partial(state)


def _placements(tensors: Sequence[Tensor], mesh: Mesh) -> list[Any]:
    """Placements of all tensors: a fixed choice among all there are."""
    chance = random.Random(len(tensors))
    every: list[list[Placement]] = []
    for tensor in tensors:
        shards = [Shard(dim) for dim in range(tensor.ndim)]
        if mesh.ndim == 1:
            shards += [Shard(dim, sizes=(tensor.shape[dim], *(0,) * (mesh.size() - 1))) for dim in range(tensor.ndim)]
        every.append([Replicate(), *shards, *map(Partial, kinds_of(tensor))])
    if mesh.ndim == 1 and len(tensors) == 1:
        return [((one,),) for one in every[0]]
    picks = (tuple(_pick(options, mesh, chance) for options in every) for _ in range(PLACEMENTS if tensors else 0))
    return list(dict.fromkeys(picks))


def _pick(options: list[Placement], mesh: Mesh, chance: random.Random) -> tuple[Placement, ...]:
    first = chance.choice(options)
    rest = [o for o in options if not (o.is_partial() and first.is_partial() and o != first)]
    return (first, *(chance.choice(rest) for _ in range(mesh.ndim - 1)))


def check(sample: Sample, rule: Rule) -> tuple[int, list[Trial]]:
    """How many trials of a sample there were, and those that are not what one device gives."""
    dense = [t.clone() for t in sample.tensors]
    with torch.no_grad():
        want = sample.run(dense)
    writes = bool(schema_of(sample.op).written)
    found, every = [], list(trials(sample, rule))
    for trial in every:
        tensors = trial.spread()
        try:
            text = difference(trial.run(tensors), want)
            # Shards were filled once: one of a later version was written to.
            if text is None and (writes or any(shard._version > 1 for x in tensors for shard in shards_of(x))):
                text = difference(tensors, dense)
        except Exception as error:
            text = f"raises {type(error).__name__}: {error}"
        if text is not None:
            found.append(replace(trial, text=text))
    return len(every), found
