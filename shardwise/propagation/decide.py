"""decide(call): which layouts an operator's tensors should have, which its results then have, and what runs on each rank. Pure.

A rule speaks of one mesh axis; here it is lifted to a mesh axis by axis, so the work grows with the number of axes, not with
their product. For each axis the cheapest of a few candidates is taken: shard a letter that some input is already sharded by (or
one beside it, if it has to be whole), let a partial value pass, or replicate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from .._torch.symbols import hint
from ..layouts.layout import Dim, Layout, sharded, whole
from ..layouts.placement import KINDS
from ..planning.cost import PER_WORK, change, collective, links
from ..planning.plan import Plan, plan
from .notation import Call, Pattern, Proposal, Result, Rule, additive, labels

State = int | str | None
Names = tuple[str | None, ...]
SWAPPED = {"max": "min", "min": "max"}


@dataclass(frozen=True)
class Decision(Proposal):
    """What to do for one operator on given layouts.

    moves      (tensor, from, to)
    copy_back  no local form of an in-place operator keeps its argument's layout: the functional form runs and is copied back
    """

    moves: tuple[tuple[int, Layout, Layout], ...] = ()
    copy_back: bool = False

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each move, made once."""
        return tuple([plan(have, want) for _, have, want in self.moves])

    @property
    def simple(self) -> bool:
        """Whether one local call is all there is to do."""
        return not (self.moves or self.kernel or self.program or self.copy_back)


def decide(rule: Rule, call: Call) -> Decision:
    """The cheapest way to run a call under its rule."""
    found = _said(rule, call)
    if isinstance(found, Proposal):
        return _from_proposal(found, call)
    rule, call = found
    bound = _bind(rule, call)
    if rule.program is not None and _needs_program(rule, bound, call):
        return Decision(copy_back=True) if call.written is not None else Decision(program=rule.program)
    choices: dict[str, Candidate] = {}
    for axis in call.tensors[0].mesh.axes:
        choice = _choose(rule, call, bound, axis, choices)
        if choice is None:
            return Decision(copy_back=True)
        choices[axis] = choice
    return _from_choices(rule, call, bound, choices)


def _said(rule: Rule, call: Call) -> Proposal | tuple[Rule, Call]:
    """What the rule's function proposes, or the sentence that holds for this call."""
    found = rule.function(call) if rule.function is not None else None
    if found is None or isinstance(found, Proposal):
        return (rule, call) if found is None else found
    return found, replace(call, slots=tuple(range(len(call.tensors))))


def offers(rule: Rule, call: Call) -> list[Candidate]:
    """Everything the sentence of a rule allows along one axis, whatever the tensors have; nothing where a function proposes."""
    found = _said(rule, call)
    if isinstance(found, Proposal) or not found[0].inputs:
        return []
    rule, call = found
    bound = _bind(rule, call)
    every = [label for names in bound.inputs for label in names if label is not None and not _is_whole(bound, label)]
    return list(dict.fromkeys((bound.plain, *_passes(rule, call, bound, KINDS), *_shardings(rule, bound, every))))


def along(rule: Rule, call: Call, choices: dict[str, Candidate]) -> Decision:
    """The decision that takes a given candidate along each axis."""
    found = _said(rule, call)
    if isinstance(found, Proposal):
        return _from_proposal(found, call)
    return _from_choices(*found, _bind(*found), choices)


def _from_proposal(proposal: Proposal, call: Call) -> Decision:
    if proposal.program is not None:
        return Decision(program=proposal.program)
    moves = _moves(call, proposal.wants)
    if call.written is not None and call.written in [i for i, _, _ in moves]:
        return Decision(copy_back=True)
    facts = (proposal.edits, proposal.call, proposal.kernel, proposal.extra)
    return Decision(proposal.wants, proposal.results, *facts, moves=moves)


def _moves(call: Call, wants: Iterable[Layout]) -> tuple[tuple[int, Layout, Layout], ...]:
    return tuple([(i, t, w) for i, (t, w) in enumerate(zip(call.tensors, wants, strict=True)) if t is not w])


# ── binding a sentence to a call ──────────────────────────────────────────────────────────────────────────────────────


class Bound(NamedTuple):
    """A sentence with its letters bound: labels per tensor and per result (None for a result that is the same on every rank
    whatever is sharded), sizes per label, tensors linear together (as the rule says, and as dtypes and numbers allow), labels
    that cannot be sharded, and the candidate that replicates everything."""

    inputs: tuple[Names, ...]
    outputs: tuple[Names | None, ...]
    sizes: dict[str, int]
    linear: tuple[tuple[int, ...], ...]
    joint: tuple[tuple[int, ...], ...]
    whole: frozenset[str]
    plain: Candidate


def _bind(rule: Rule, call: Call) -> Bound:
    named: list[tuple[str, ...]] = [()] * len(call.tensors)
    sizes: dict[str, int] = {}
    last = len(rule.inputs) - 1
    for slot, index in enumerate(call.slots):
        if index is None:
            continue
        tensor = call.tensors[index]
        names = named[index] = labels(rule.inputs[slot if slot < last else last], call, tensor.ndim)
        for label, size in zip(names, tensor.shape, strict=True):
            if label not in sizes or sizes[label] == 1:
                sizes[label] = size
    inputs = tuple([_of_size(names, t.shape, sizes) for names, t in zip(named, call.tensors, strict=True)])
    last = len(rule.outputs) - 1
    outputs = []
    for i, result in enumerate(call.results):
        pattern = rule.outputs[i if i < last else last]
        out_names = None if pattern.same else _output_labels(rule, call, pattern, named[0], len(result.shape))
        outputs.append(None if out_names is None else _of_size(out_names, result.shape, sizes))
    words = [word.partition("?") for word in rule.whole]
    unsharded = frozenset([letter for letter, _, argument in words if not argument or call.arguments[argument]])
    joint = tuple([indices for group in rule.linear if group[1:] and (indices := _tensors(group, call))])
    plain = Candidate((None,) * len(inputs), (None,) * len(outputs))
    return Bound(inputs, tuple(outputs), sizes, _linear_sets(rule, call), joint, unsharded, plain)


def _of_size(names: Iterable[str | None], shape: Sequence[int], sizes: dict[Any, int]) -> Names:
    """The labels of dims that have the label's size: not of those that are broadcast."""
    pairs = zip(names, shape, strict=True)
    return tuple([label if label not in sizes or size == sizes[label] else None for label, size in pairs])


def _output_labels(rule: Rule, call: Call, pattern: Pattern, source: tuple[str, ...], ndim: int) -> Names:
    if pattern.named is not None or not pattern.ellipsis or rule.inputs[0].named is None:
        return labels(pattern, call, ndim)
    if ndim == len(source):
        return tuple(None if label.startswith("[]") else label for label in source)
    return tuple(label for label in source if not label.startswith("[]"))


def _linear_sets(rule: Rule, call: Call) -> tuple[tuple[int, ...], ...]:
    """The jointly linear sets as indices of tensors; a number in a set makes the operator affine in it, so it is dropped."""
    if not rule.linear or (rule.rounds and not call.tensors[0].dtype.is_floating_point):
        return ()
    given = enumerate(zip(call.slots, call.tensor_names, strict=False)) if None in call.slots else ()
    numbers = {slot for slot, (i, name) in given if i is None and call.arguments[name] is not None}
    sets = [_tensors(group, call) for group in rule.linear if numbers.isdisjoint(group)]
    if len({result.dtype for result in call.results}.union([tensor.dtype for tensor in call.tensors])) > 1:
        results = [result.dtype for result in call.results]
        sets = [indices for indices in sets if additive([*results, *(call.tensors[i].dtype for i in indices)])]
    return tuple(filter(None, sets))


def _tensors(group: tuple[int, ...], call: Call) -> tuple[int, ...]:
    return tuple([i for slot, i in enumerate(call.slots) if i is not None and slot in group])


def _needs_program(rule: Rule, bound: Bound, call: Call) -> bool:
    if not rule.inputs:
        return True
    return any(
        isinstance(state, int) and names[state] is not None and _is_whole(bound, names[state])
        for names, tensor in zip(bound.inputs, call.tensors, strict=True)
        for axis, state in tensor.states.items()
        if tensor.mesh.axis_sizes[axis] > 1 and all(tensor.shape)  # a tensor without elements is gathered for nothing
    )


def _is_whole(bound: Bound, label: str | None) -> bool:
    if label is None or label in bound.whole:
        return True
    if not bound.whole:
        return False
    return (label.startswith("[]") and "[]" in bound.whole) or (label.startswith(".") and "..." in bound.whole)


# ── one axis ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Candidate(NamedTuple):
    """What one axis could do: the state of each tensor and of each result along it, and the label it shards."""

    wants: tuple[State, ...]
    results: tuple[State, ...]
    label: str | None = None


def _choose(rule: Rule, call: Call, bound: Bound, axis: str, others: dict[str, Candidate]) -> Candidate | None:
    """The cheapest candidate that goes with those of other axes; None if none keeps the layout that is written to."""
    have = tuple([tensor.states.get(axis) for tensor in call.tensors])
    if have == bound.plain.wants:
        return bound.plain
    best, least = None, math.inf
    passes = _passes(rule, call, bound, have) if str in map(type, have) else ()
    for candidate in (*passes, *_shardings(rule, bound, _labels(call, bound, have, axis)), bound.plain):  # the first of equals
        if call.written is not None and not _keeps(candidate, have, call.written):
            continue
        if others and str in map(type, candidate.wants + candidate.results) and _clashes(candidate, others.values()):
            continue
        if best is None and candidate.label is not None and candidate.wants == have and str not in map(type, candidate.results):
            return candidate  # nothing moves, nothing is left to reduce and the work is shared: none costs less
        seconds = _price(candidate, call, bound, have, axis)
        if seconds < least:
            best, least = candidate, seconds
    return best


def _clashes(one: Candidate, others: Iterable[Candidate]) -> bool:
    """Whether a tensor would be partial in two ways, whose order would matter."""
    pairs = [pair for other in others for pair in zip(one.wants + one.results, other.wants + other.results, strict=True)]
    return any(type(a) is type(b) is str and a != b and {a, b} != {"sum", "avg"} for a, b in pairs)


def _keeps(candidate: Candidate, have: tuple[State, ...], written: int) -> bool:
    return candidate.wants[written] == have[written] and candidate.results[:1] in ((), (have[written],))


def _labels(call: Call, bound: Bound, have: tuple[State, ...], axis: str) -> Iterable[str]:
    """The labels that the axis may shard: those that it shards now and, for one that has to be whole, the longest of the
    others, which costs an exchange where replicating costs a gather."""
    for tensor, names, state in zip(call.tensors, bound.inputs, have, strict=True):
        label = names[state] if type(state) is int else None
        if label is not None and _is_whole(bound, label):
            others = [(tensor.held(d), other) for d, other in enumerate(names) if not _is_whole(bound, other)]
            longest, label = max(others, key=lambda pair: pair[0], default=(0, None))
            label = label if longest >= tensor.mesh.axis_sizes[axis] else None
        if label is not None:
            yield label


def _shardings(rule: Rule, bound: Bound, letters: Iterable[str]) -> list[Candidate]:
    """A candidate for each label that may be sharded."""
    candidates = []
    for label in dict.fromkeys(letters):
        kept = False not in [names is None or label in names for names in bound.outputs]
        if not kept and (rule.lost is None or _repeated(label, bound)):
            continue
        joined = [] if kept else [group for group in bound.linear if any(label in bound.inputs[i] for i in group)]
        added = {i for group in joined for i in group} if joined else ()
        inputs = enumerate(bound.inputs)
        wants = [names.index(label) if label in names else "sum" if i in added else None for i, names in inputs]
        results = [None if names is None else names.index(label) if label in names else rule.lost for names in bound.outputs]
        candidates.append(Candidate(tuple(wants), tuple(results), label))
    return candidates


def _repeated(label: str, bound: Bound) -> bool:
    """Whether sharding a label would add an argument once for every rank: it is added to others, none of which has the label,
    or of which it cannot be partial, since dtypes differ."""
    for group in bound.joint:
        having = [label in bound.inputs[i] for i in group]
        if not any(having) or (not all(having) and group not in bound.linear):
            return True
    return False


def _passes(rule: Rule, call: Call, bound: Bound, kinds: Iterable[State]) -> Iterable[Candidate]:
    """A candidate for each way in which a kind of partial value goes through the operator."""
    tensors, floating = range(len(bound.inputs)), call.tensors[0].dtype.is_floating_point
    words = rule.passes if isinstance(rule.passes, tuple) else (rule.passes,)
    worded = [(i, word) for i, word in zip(call.slots, words, strict=False) if i is not None and word is not None]
    together = rule.together if len(call.tensors) == len(rule.inputs) else None  # none of them is a number
    for kind in dict.fromkeys(state for state in kinds if isinstance(state, str)):
        linear: list[tuple[Sequence[int], str]] = [(group, kind) for group in bound.linear if kind in ("sum", "avg")]
        passing = [((i,), _through(word, kind, floating)) for i, word in worded]
        for partial, becomes in (*linear, *passing, (tensors, kind if kind == together else None)):
            if becomes is not None:
                wants = tuple([kind if i in partial else None for i in tensors])
                yield Candidate(wants, tuple([None if names is None else becomes for names in bound.outputs]))


def _through(word: str, kind: str, floating: bool) -> str | None:
    """What a partial kind becomes behind an operator that passes it by a word; None where it does not."""
    way, _, only = word.partition(" ")
    if way in ("all", kind):
        return kind
    if kind not in SWAPPED or way not in ("up", "down") or (only and not floating):
        return None
    return kind if way == "up" else SWAPPED[kind]


def _price(candidate: Candidate, call: Call, bound: Bound, have: tuple[State, ...], axis: str) -> float:
    """Seconds to reach the candidate, to pay later for what it leaves partial, and to compute."""
    mesh, seconds = call.tensors[0].mesh, 0.0
    ranks, link = mesh.axis_sizes[axis], links(mesh)[axis]
    for tensor, now, want in zip(call.tensors, have, candidate.wants, strict=True):
        if now != want:
            seconds += change(now, want, tensor.nbytes, ranks, link)
    triples = zip(call.results, bound.outputs, candidate.results, strict=True)
    partial = [_held(result, names or (), call, bound) for result, names, state in triples if type(state) is str]
    if partial:  # results are reduced together; what becomes partial only here meets more before it is reduced
        seconds += (1.0 if candidate.label is None else 0.5) * collective("all_reduce", sum(partial), ranks, link)
    work = math.prod(map(hint, bound.sizes.values()))
    return seconds + work * PER_WORK / (1 if candidate.label is None else ranks)


def _held(result: Result, names: Names, call: Call, bound: Bound) -> int:
    """Bytes of a result on one rank, if it is sharded as the tensors are now."""
    size = result.dtype.itemsize
    for label, n in zip(names, result.shape, strict=True):
        held = [t.held(i.index(label)) for t, i in zip(call.tensors, bound.inputs, strict=True) if label in i]
        size *= min(held, default=hint(n))
    return size


# ── all axes together ─────────────────────────────────────────────────────────────────────────────────────────────────


def _from_choices(rule: Rule, call: Call, bound: Bound, choices: dict[str, Candidate]) -> Decision:
    axes_of: dict[str | None, list[str]] = {}
    pairs = choices.items()
    for axis, choice in pairs:
        axes_of.setdefault(choice.label, []).append(axis)
    dims = {label: _structure(label, axes, call, bound) for label, axes in axes_of.items() if label is not None}
    wants, results = [], []
    for i, (tensor, names) in enumerate(zip(call.tensors, bound.inputs, strict=True)):
        partials = tuple([(a, kind) for a, c in pairs if type(kind := c.wants[i]) is str])
        placed = _dims(names, tensor.shape, dims)
        unchanged = type(tensor) is Layout and placed == tensor.dims and partials == tensor.partials
        wants.append(tensor if unchanged else tensor.replace(dims=placed, partials=partials))
    for i, (result, out_names) in enumerate(zip(call.results, bound.outputs, strict=True)):
        partials = tuple([(a, kind) for a, c in pairs if type(kind := c.results[i]) is str])
        results.append(call.result(i, _dims(out_names or (None,) * len(result.shape), result.shape, dims), partials))
    made = rule.kernel(call, wants) if rule.kernel is not None else None
    kernel, *extra = made if isinstance(made, tuple) else (made,)
    return Decision(tuple(wants), tuple(results), kernel=kernel, extra=tuple(extra), moves=_moves(call, wants))


def _dims(names: Names, shape: Sequence[int], dims: dict[str, Dim]) -> tuple[Dim, ...]:
    return tuple([dims[label] if label in dims else (whole(n),) for label, n in zip(names, shape, strict=True)])


def _structure(label: str, axes: list[str], call: Call, bound: Bound) -> Dim:
    """How the axes shard the label: as a tensor already has it (the one written to, else the largest), or in default chunks."""
    best, dim = (False, -1), None
    partly: tuple[str, ...] = ()
    for i, (tensor, names) in enumerate(zip(call.tensors, bound.inputs, strict=True)):
        if label in names:
            factors = tensor.dims[names.index(label)]
            have = tuple([axis for factor in factors for axis in factor.axes])
            if set(have) == set(axes) and (i == call.written, tensor.nbytes) > best:
                best, dim = (i == call.written, tensor.nbytes), factors
            elif set(have) < set(axes) and len(have) > len(partly):
                partly = have
    order = [*partly, *(axis for axis in axes if axis not in partly)]
    return dim or (sharded(bound.sizes[label], order, call.tensors[0].mesh),)
