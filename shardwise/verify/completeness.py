"""Whether a rule is *complete*: whether it offers every placement that would be right. These are found by brute force over one
mesh axis: the plain operator is run on each rank's shards, and what it gives is compared with shards of the right result.

A placement counts if it holds for every sample like it, on two and on three ranks, for several splits of partial values and for
other values of the tensors, so that no coincidence is taken for a law.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import tree_leaves
from ..base.schema import schema_of
from ..layouts.from_placements import make_layout
from ..layouts.mesh import Mesh
from ..propagation.decide import State, decide, offers
from ..propagation.notation import Rule
from .calls import Sample, grouped
from .soundness import bound_call, kinds_of, meshes, placement_of
from .spread import close, local_shards, reduced, spread

#: Combinations of placements tried of one sample at most, and tensors that are not just replicated.
COMBINATIONS, JOINTLY = 250, 3
#: Operators that read or write beside their tensors when indices or sizes are too large, instead of raising.
UNCHECKED = (
    *("_unsafe_", "_index_put_impl", "_reshape_alias", "as_strided", "embedding_bag", "embedding_dense_backward"),
    *("linalg_ldl_solve", "lu_", "nll_loss", "dot_product"),
)
#: What values are multiplied by to get others.
FACTORS = torch.tensor([-2.0, -0.25, 0.0, 0.05, 5.0])
#: Samples of the first of these that an operator has are asked.
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)

States = tuple[State, ...]


def missing(samples: Sequence[Sample], rule: Rule) -> list[str]:
    """What holds for all samples of a kind but is not offered, as text: `sum, R -> sum`."""
    if rule.zipped or (not rule.inputs and rule.function is None):
        return []  # lists are as complete as what they are lists of; a program takes every placement its own way
    telling = [sample for sample in samples if _tells(sample)]
    dtype = next((d for d in DTYPES if any(d is sample.tensors[0].dtype for sample in telling)), None)
    tried = [sample for sample in telling if sample.tensors[0].dtype is dtype]
    by_dtype = grouped(tried, lambda sample: [t.dtype for t in sample.tensors])
    by_kind = grouped(tried, lambda sample: sample.key(sizes=False))
    found = [
        f"{_shown(states)} -> {' or '.join(map(_shown, results))}"
        for several, options_of in [*((group, _partial_over) for group in by_dtype), *((group, _sharding) for group in by_kind)]
        for states, results in _laws(several, options_of).items()
        if not _has_reason(states, rule) and not _is_offered(several[0], rule, states)
    ]
    return list(dict.fromkeys(found))


def _tells(sample: Sample) -> bool:
    """Whether a sample has enough elements, on both sides, to tell a law from a coincidence; what writes is told by what does
    not."""
    if schema_of(sample.op).written or any(word in sample.name for word in UNCHECKED):
        return False
    results = [out for out in tree_leaves(sample.run()) if isinstance(out, Tensor)]
    floats = [t for t in sample.tensors if t.is_floating_point()] or sample.tensors
    several = all(n > 1 for t in sample.tensors for n in t.shape) and all(t.numel() > 4 and _varies(t) for t in floats)
    return several and all(_varies(out) for out in results)


def _varies(x: Tensor) -> bool:
    """Whether there are elements, and not all, or all but a few truth values, are the same; or one that is hardly right by
    chance."""
    if x.numel() == 1 and x.is_floating_point():
        return bool(x.isfinite()) and x.item() not in (-1, 0, 1)
    values = Counter(map(str, x.reshape(-1).tolist()[:100]))
    return len(values) > 1 and (x.dtype is not torch.bool or min(values.values()) * 4 >= min(x.numel(), 100))


def _partial_over(sample: Sample) -> Iterable[States]:
    """States of all tensors in which only some are partial, all in the same way. An average is a sum that was scaled."""
    count = min(len(sample.tensors), JOINTLY)
    rest = (None,) * (len(sample.tensors) - count)
    for kind in ("sum", "max", "min", "product"):
        can = [kind in kinds_of(tensor) for tensor in sample.tensors[:count]]
        for chosen in itertools.product((False, True), repeat=count):
            if any(chosen) and all(may or not is_chosen for may, is_chosen in zip(can, chosen, strict=True)):
                yield (*(kind if is_chosen else None for is_chosen in chosen), *rest)


def _sharding(sample: Sample) -> Iterable[States]:
    """States of all tensors in which some are sharded; what is partial beside is Partial(sum)."""
    options: list[list[State]] = []
    for number, tensor in enumerate(sample.tensors):
        sums = ["sum"] if "sum" in kinds_of(tensor) else []
        options.append([None, *range(tensor.ndim), *sums] if number < JOINTLY else [None])
    every = (states for states in itertools.product(*options) if any(isinstance(state, int) for state in states))
    return itertools.islice(every, COMBINATIONS)


def _shown(states: Iterable[State]) -> str:
    return ", ".join(f"S({state})" if isinstance(state, int) else state or "R" for state in states)


def _has_reason(states: States, rule: Rule) -> bool:
    """Whether the rule says why it does not offer this: `unoffered="max min: why"` is about all with a partial max or min."""
    kinds = {"shard" if isinstance(state, int) else state or "R" for state in states}
    return any(kinds & set(reason.partition(":")[0].split()) for reason in rule.unoffered.split(";"))


def _laws(several: list[Sample], options_of: Callable[[Sample], Iterable[States]]) -> dict[States, list[States]]:
    """The placements that hold for all samples, with those of the results."""
    held: dict[States, list[States]] = {}
    for number, sample in enumerate(several):
        variants = [one for one in (sample, *(_other_values(sample, seed) for seed in range(4))) if one is not None]
        options = [*held] if number else [*options_of(sample)]
        for states in options:
            results = held.get(states)
            for one, mesh, turn in itertools.product(variants, meshes()[:2], (0, 1)):
                if results is None or results:
                    outs = _results(one, states, mesh, turn)
                    results = outs if results is None else [r for r in results if r in outs]
            held[states] = results or []
        held = {states: results for states, results in held.items() if results}
    return held


def _other_values(sample: Sample, seed: int) -> Sample | None:
    """The sample with floating values in another order, with other signs and other sizes; None if it cannot be run so."""
    generator = torch.Generator().manual_seed(seed)
    tensors, changed = [], False
    for tensor in sample.tensors:
        if tensor.is_floating_point() and tensor.numel() > 1:
            order = torch.randperm(tensor.numel(), generator=generator)
            factor = FACTORS.to(tensor.dtype)[torch.randint(len(FACTORS), tensor.shape, generator=generator)]
            factor = factor / (1 + 20 * (seed % 2))
            calm = torch.where(tensor.isfinite(), tensor, torch.ones_like(tensor))
            tensor, changed = calm.reshape(-1)[order].reshape(tensor.shape) * factor, True
        tensors.append(tensor)
    if not changed:
        return None
    other = Sample(sample.op, *sample.given(tensors))
    try:
        other.run()
    except RuntimeError:
        return None
    return other


def _results(sample: Sample, states: States, mesh: Mesh, turn: int) -> list[States]:
    """In which states the results of the local operators are the result on one device."""
    ranks = []
    for number, (tensor, state) in enumerate(zip(sample.tensors, states, strict=True)):
        layout = make_layout(tensor.shape, mesh, [placement_of(state, tensor)], tensor.dtype)
        ranks.append(local_shards(tensor, layout, turn + 10 * number).shards)  # not split alike
    want = tree_leaves(sample.run())
    try:
        gots = [tree_leaves(sample.run(shards)) for shards in zip(*ranks, strict=True)]
    except Exception:  # whatever an operator raises that is given the wrong shapes
        return []
    if any(len(got) != len(want) for got in gots):
        return []
    each = [_states(one, [got[number] for got in gots]) for number, one in enumerate(want)]
    return list(itertools.product(*each)) if all(each) else []


def _states(want: Any, gots: list[Any]) -> list[State]:
    if not isinstance(want, Tensor):
        return [None] if all(got == want for got in gots) else []
    found: list[State] = [dim for dim in range(want.ndim) if _joins(want, gots, dim)]
    if any(got.shape != want.shape or got.dtype != want.dtype for got in gots):
        return found
    if all(close(got, want) for got in gots):
        found.append(None)
    return found + [kind for kind in kinds_of(want) if close(reduced(gots, kind), want)]


def _joins(want: Tensor, gots: list[Tensor], dim: int) -> bool:
    sizes = [got.shape[dim] if got.ndim == want.ndim else -1 for got in gots]
    if sum(sizes) != want.shape[dim] or max(sizes) == want.shape[dim]:
        return False
    rest = [want.shape[:dim] + want.shape[dim + 1 :] == got.shape[:dim] + got.shape[dim + 1 :] for got in gots]
    return all(rest) and close(torch.cat(gots, dim), want)


def _is_offered(sample: Sample, rule: Rule, states: States) -> bool:
    """Whether some candidate wants the tensors so, or `decide` leaves them as they are."""
    spreads = [spread(t, meshes()[0], [placement_of(s, t)]) for t, s in zip(sample.tensors, states, strict=True)]
    call = bound_call(sample, spreads)
    if any(candidate.wants == states for candidate in offers(rule, call)):
        return True
    decision = decide(rule, call)
    return not decision.moves and decision.program is None
