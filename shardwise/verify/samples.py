"""torch's own database of operators for tests (`op_db`): names, sample inputs, in-place forms. The one file that reads it.

Not imported by the package itself: the database takes seconds to load.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..propagation.table import find
from .calls import Sample
from .completeness import DTYPES
from .spread import filled, flat

try:
    from torch.testing._internal.common_methods_invocations import op_db
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing}: `shardwise verify` reads torch's own tests; pip install 'shardwise[verify]'"
    ) from None

#: Operators whose results nobody wrote: there is nothing to compare.
UNINITIALISED = ("empty", "resize_")
#: Of recorded calls: samples of each operator that are run, most elements, how many are noted and kept of each overload.
RECORDED, LARGEST, NOTED, KEPT = 5, 4000, 120, 8


@dataclass(frozen=True)
class Case:
    """One call: `function(*values)`, where the leaves of `values` that are tensors may be replaced."""

    function: Callable[..., Any]
    values: tuple[Any, ...]
    differentiable: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in flat(self.values) if isinstance(leaf, Tensor)]

    def run(self, tensors: list[Any]) -> Any:
        """The call with other tensors."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in flat(self.values)]
        input, args, kwargs = filled(self.values, leaves)
        return self.function(input, *args, **kwargs)


def operators() -> dict[str, Any]:
    """Every entry of the database by its full name, as `nn.functional.conv2d` or `std.unbiased`."""
    return {op.full_name: op for op in op_db}


def uninitialised(name: str) -> bool:
    """Whether an operator gives memory as it is."""
    return any(word in name for word in UNINITIALISED)


def cases(op: Any, dtype: torch.dtype | None, limit: int, inplace: bool = False) -> list[Case]:
    """Up to four times `limit` calls on dense tensors, of the first of `DTYPES` that the operator has where none is given; none
    where it has no such dtype, or no in-place form."""
    function, known = op.get_inplace() if inplace else op, op.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in known), None) if dtype is None else dtype
    if function is None or dtype not in known:
        return []
    torch.manual_seed(0)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs("cpu", dtype, requires_grad=False)
        for sample in itertools.islice(samples, 4 * limit):
            differentiable = op.supports_inplace_autograd if inplace else op.supports_autograd
            one = Case(function, (sample.input, sample.args, sample.kwargs), bool(differentiable))
            if one.tensors and all(t.layout is torch.strided for t in one.tensors):
                found.append(one)
    return found


def chosen(several: list[Case], limit: int) -> list[Case]:
    """Some of the calls; variants of one follow one another, so they are taken at equal distances."""
    return several[:: max(1, len(several) // limit)][:limit]


class _Draws(TorchDispatchMode):
    """Notes whether any operator drew random numbers: it may, and the state of the generator is another one after it."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        self.drawn = self.drawn or not torch.equal(before, torch.get_rng_state())
        return out


def is_random(case: Case) -> bool:
    """Whether a call draws random numbers."""
    with _Draws() as mode:
        case.run([t.clone() for t in case.tensors])
    return mode.drawn


class _CallNotes(TorchDispatchMode):
    """Notes every call of an operator that has a rule, with its arguments as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, dict[Any, Sample]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if find(func) is not None:
            sample = Sample(func, tuple(args), kwargs)
            several = self.noted.setdefault(sample.name, {})
            if sample.size <= LARGEST and len(several) < NOTED and (key := sample.key()) not in several:
                copied = sample.given([t.detach().resolve_conj().resolve_neg().clone() for t in sample.tensors])
                several[key] = Sample(func, *copied)
        return func(*args, **kwargs)


def _lists(name: str, *arguments: Any) -> Callable[[], Any]:
    x, y = torch.randn(3, 4), torch.rand(5)
    several = [[x, y] if argument is list else argument for argument in arguments]
    return lambda: getattr(torch.ops.aten, f"_foreach_{name}")(*several)


_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt tan tanh trunc norm zero"
)
_x, _index = torch.randn(4, 6), torch.randint(8, (3, 5))
_aten = torch.ops.aten
#: Factors of grouped products, and where groups end: every form.
_ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
_PRODUCTS = (
    ((8, 4), (4, 4, 8), _ends),
    ((4, 8, 4), (4, 8), _ends),
    ((4, 8), (8, 4), _ends),
    ((4, 5, 4), (4, 4, 4), None),
)
OTHERS: list[Callable[[], Any]] = [
    *(_lists(name, list) for name in _UNARY.split()),
    *(
        _lists(name, list, list)
        for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min", "copy")
    ),
    *(_lists(name, list, 2.0) for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min")),
    *(_lists(name, list, list, list) for name in ("addcmul", "addcdiv")),
    _lists("lerp", list, list, 0.25),
    *(lambda op=op: op(_index, 2) for op in (_aten.__lshift__, _aten.__rshift__)),
    *(lambda op=op: op(_x) for op in (_aten.alias, _aten.detach_copy, _aten.lift, _aten.lift_fresh_copy)),
    lambda: _aten.conj_physical(torch.complex(_x, _x.exp())),
    lambda: _aten.clamp_max(_x, 0.5),
    lambda: _aten.div(_x, 0.3, rounding_mode="floor"),
    lambda: _aten.squeeze_copy(_x.view(4, 1, 6), [1]),
    lambda: _aten.scatter(_x, 1, _index[:, :4] % 6, 2.0, reduce="multiply"),
    lambda: _aten._neg_view(_x),
    lambda: _aten._reshape_alias(_x, [8, 3], [3, 1]),
    lambda: _aten.slice_copy(_x, 1, 1, 5, 2),
    lambda: _aten.select_copy(_x, 1, 2),
    lambda: _aten._unsafe_index(_x, [torch.tensor([0, 3, 1])]),
    lambda: _aten._unsafe_index_put(_x, [torch.tensor([0, 3])], torch.randn(2, 6)),
    lambda: _aten._index_put_impl(_x, [torch.tensor([0, 3])], torch.randn(2, 6)),
    lambda: _aten.soft_margin_loss(_x, _x.sign()),
    lambda: _aten.soft_margin_loss_backward(torch.randn(()), _x, _x.sign(), 1),
    lambda: _aten._fused_rms_norm(_x, [6], torch.randn(6), 1e-5),
    *(
        lambda op=op, x=x, w=w, ends=ends: op(torch.randn(x), torch.randn(w), ends)
        for x, w, ends in _PRODUCTS
        for op in (_aten._grouped_mm, torch.ops.shardwise.grouped_mm)
    ),
    *(lambda power=power: torch.ops.shardwise.int_pow(_index - 4, power) for power in (0, 2, 41)),
    lambda: torch.ops.shardwise.int_pow.Tensor(_index - 4, torch.tensor([[2], [70], [-1]])),
    lambda: torch.ops.shardwise.int_pow.Tensor(_index.int(), _index[0].to(torch.int8)),
]


def recorded(chosen_operators: Iterable[Any], kept: int = KEPT, others: bool = True) -> dict[str, list[Sample]]:
    """Calls of operators that have a rule, by overload: those that samples of some operators make, forward and backward, and
    those of `OTHERS`, which no operator of the database makes."""
    recorder = _CallNotes()
    for make in OTHERS if others else ():
        with recorder, contextlib.suppress(NotImplementedError):
            make()
    for op in chosen_operators:
        for dtype in DTYPES:
            for case in chosen(_tolerant(op, dtype), RECORDED):
                with recorder, contextlib.suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run_and_back(case, [t.clone() for t in case.tensors])
    return {name: _few(list(several.values()), kept) for name, several in sorted(recorder.noted.items()) if several}


def _tolerant(op: Any, dtype: torch.dtype) -> list[Case]:
    try:
        return cases(op, dtype, RECORDED)
    except Exception:  # some samples need what this machine lacks
        return []


def run_and_back(case: Case, tensors: list[Tensor]) -> None:
    """A call and its gradients."""
    if case.differentiable:
        tensors = [t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in tensors]
    outs = [out for out in flat(case.run(tensors)) if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])


def _few(several: list[Sample], kept: int) -> list[Sample]:
    """At most two of a kind, the smallest that are not trivial, and of all kinds a bounded number."""
    by_kind: dict[Any, list[Sample]] = {}
    for sample in sorted(several, key=lambda s: (s.size < 4, s.size)):
        by_kind.setdefault(repr(sample.kind()), []).append(sample)
    rounds = [[group[i] for group in by_kind.values() if i < len(group)] for i in range(2)]
    return [sample for one in rounds for sample in one][:kept]
