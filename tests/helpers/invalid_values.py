"""Calls with invalid values, made from torch's database of operators: its own error inputs, and samples with one value spoilt.

`check` compares what DTensors make of a call with what one device makes of it: what torch refuses is refused, with an exception
of the same kind, and what it takes gives the same numbers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Partial
from shardwise.verify.calls import Sample
from shardwise.verify.samples import chosen, is_random, operators, tolerant, uninitialised
from shardwise.verify.spread import difference, spread
from shardwise.verify.sweeps import combinations

#: Elements up to which a call is tried.
LARGEST = 100_000
#: Operators whose answer to an invalid call is none: why.
_CRASHES = "lu_unpack linalg.ldl_solve _segment_reduce.offsets linalg.eigvals native_batch_norm _native_batch_norm_legit"
_STRAYS = "grid_sampler_2d grid_sampler_3d nn.functional.ctc_loss"
_INTERNAL = "_unsafe_masked_index _unsafe_masked_index_put_accumulate _softmax_backward_data native_group_norm"
UNDEFINED = {
    **dict.fromkeys(f"{_CRASHES} _batch_norm_with_update".split(), "torch crashes"),
    **dict.fromkeys(_STRAYS.split(), "torch reads memory that is not its own"),
    "to_sparse": "its result has no elements to compare",
    **dict.fromkeys(_INTERNAL.split(), "only formulas of torch's own call it, with arguments that fit"),
}
#: Of sequences that are not sorted, every rank finds another place.
UNSORTED = ("bucketize", "searchsorted")
#: What DTensors take and torch does not: why, by operator and a word of torch's refusal.
TAKEN = {
    ("nn.functional.batch_norm", "scalar type"): "integers among floats are converted",
    ("nn.functional.instance_norm", "scalar type"): "integers among floats are converted",
    ("nn.functional.layer_norm", "scalar type"): "integers among floats are converted",
    ("native_layer_norm", "scalar type"): "integers among floats are converted",
}
#: What torch takes and DTensors do not: why.
REFUSED = {
    "nn.functional.linear_cross_entropy": "a target of one element for one row: torch's own account of its shapes refuses it",
    "nn.functional.multilabel_margin_loss": "likewise",
}
#: What an internal error looks like: it tells the user nothing about the call.
RAW = ("Caffe2", "fault of Shardwise", "INTERNAL ASSERT", "data pointer", "has no attribute", "in the planner")
KINDS = (IndexError, NotImplementedError, RuntimeError, ValueError, TypeError)


class Finding(NamedTuple):
    """How a call on DTensors differs from the one on one device."""

    operator: str
    kind: str
    call: str
    text: str


def invalid(name: str, samples: int) -> Iterator[tuple[str, Sample]]:
    """Calls of an operator that may be invalid: torch's own, and samples with one value spoilt."""
    op = operators()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if op.error_inputs_func is not None:
            for number, error in enumerate(op.error_inputs("cpu")):
                given = error.sample_input
                yield f"error input {number}", Sample(op, (given.input, *given.args), given.kwargs)
        for dtype in (torch.float32, torch.int64):
            several = chosen(tolerant(op, dtype, 2), samples)
            for number, case in enumerate(several):
                leaves, structure = case.leaves
                for at, leaf in enumerate(leaves):
                    for what, other in _others(leaf):
                        args, kwargs = tree_unflatten([*leaves[:at], other, *leaves[at + 1 :]], structure)
                        yield f"{dtype} sample {number}, leaf {at} {what}", Sample(op, args, kwargs)


def _others(leaf: Any) -> Iterator[tuple[str, Any]]:
    """Other values in the place of one argument."""
    if isinstance(leaf, Tensor):
        yield from _other_tensors(leaf)
    elif type(leaf) is int:
        yield from ((f"is {n}", n) for n in (-1, 0, 7, 99, -99) if n != leaf)
    elif type(leaf) is float:
        yield from ((f"is {n}", n) for n in (-1.0, 0.0, 2.5, torch.nan))


def _other_tensors(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if x.dtype is torch.bool or x.is_complex():
        numbers: tuple[Any, ...] = ()
    else:
        numbers = (-1, 0, 2.5, torch.nan) if x.is_floating_point() else (-1, 0, 7, 99, -99)
    for number in numbers if x.numel() else ():
        for where in (0, -1):
            other = x.clone(memory_format=torch.contiguous_format)
            other.view(-1)[where] = number
            yield f"has {number} at {where}", other
    if numbers:
        yield "is zero", torch.zeros_like(x)
    for dim in range(x.ndim):
        yield f"has nothing along {dim}", x.narrow(dim, 0, 0).clone()
        if x.shape[dim] > 2:
            yield f"is one shorter along {dim}", x.narrow(dim, 1, x.shape[dim] - 1).clone()
    yield "has one more dim", x[None].clone()
    if x.ndim:
        yield "has one dim less", x.sum(0, dtype=x.dtype) if x.dtype is not torch.bool else x.any(0)
    yield "is of another dtype", x.to(torch.float32 if x.dtype is torch.int64 else torch.int64)


def check(name: str, mesh: Mesh, samples: int, placements: int) -> Iterator[Finding]:
    """What differs from one device, of one operator; a finding of kind "right" for each call that does not."""
    if uninitialised(name) or name in UNDEFINED:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (what, case) in enumerate(invalid(name, samples)):
            if not case.tensors or not all(map(_ordinary, case.tensors)) or "out" in case.kwargs:
                continue
            want = _outcome(case, [t.clone() for t in case.tensors])
            chance = not isinstance(want, Exception) and is_random(case)
            for places in combinations(case.tensors, mesh, placements, number):
                pairs = enumerate(zip(case.tensors, places, strict=True), number)
                got = _outcome(case, [spread(t, mesh, p, turn) for turn, (t, p) in pairs])
                partials = any(isinstance(placement, Partial) for several in places for placement in several)
                vague = chance or name in UNSORTED or (partials and not _finite(want))
                kind, text = _compared(got, want, vague)
                if _known(name, kind, text, case):
                    kind = "right"
                yield Finding(name, kind, f"{what}: {_shown(case)} on {' '.join(str(list(p)) for p in places)}", text)


def _known(name: str, kind: str, text: str, case: Sample) -> bool:
    """Whether a difference is one that is known and has its reason."""
    if kind == "taken":  # a library below torch that fails is no refusal
        return "MKL" in text or any(name == operator and word in text for operator, word in TAKEN)
    # Where there is nothing, torch looks at few arguments.
    return kind == "refused" and (name in REFUSED or any(not t.numel() for t in case.tensors))


def _ordinary(x: Tensor) -> bool:
    return type(x) is Tensor and x.layout is torch.strided and x.device.type == "cpu" and x.numel() <= LARGEST


def _shown(case: Sample) -> str:
    return str([f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else t for t in case.leaves[0]])[:300]


def _finite(value: Any) -> bool:
    """Summands of what is infinite have no sum; that it is, only the data knows."""
    dense = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.layout is torch.strided]
    return all(bool(x.isfinite().all()) for x in dense if x.is_floating_point())


def _outcome(case: Sample, tensors: list[Any]) -> Any:
    """What a call gives: results and what became of the arguments, or an exception."""
    torch.manual_seed(0)
    with torch.no_grad(), contextlib.suppress(StopIteration):
        try:
            return case.run(tensors), tensors
        except Exception as error:
            return error


def _compared(got: Any, want: Any, chance: bool) -> tuple[str, str]:
    if isinstance(want, Exception) and isinstance(got, Exception):
        if any(word in str(got) for word in RAW) and not any(word in str(want) for word in RAW):
            return "raw", f"{_told(got)} instead of {_told(want)}"
        alike = type(want) is type(got) or any(isinstance(want, kind) and isinstance(got, kind) for kind in KINDS)
        return ("right", "") if alike else ("another kind", f"{_told(got)} instead of {_told(want)}")
    if isinstance(want, Exception):
        return "taken", f"torch refuses: {_told(want)}"
    if isinstance(got, Exception):
        return "refused", _told(got)
    text = None if chance else difference(got, want)
    return ("right", "") if text is None else ("WRONG", text)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}"
