"""torch's own database of operators for tests (`op_db`): names, sample inputs, in-place forms. The one file that reads it.

Not imported by the package itself: the database takes seconds to load.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch.tensors import tree_leaves
from ..propagation.table import find
from .calls import Sample, grouped
from .completeness import DTYPES

try:
    from torch.testing._internal.common_methods_invocations import op_db
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing}: `shardwise verify` reads torch's own tests; pip install 'shardwise[verify]'"
    ) from None

#: Of recorded calls: samples of each operator that are run, most elements, how many are noted and kept of each overload.
RECORDED, LARGEST, NOTED, KEPT = 5, 4000, 120, 8


def operators() -> dict[str, Any]:
    """Every entry of the database by its full name, as `nn.functional.conv2d` or `std.unbiased`."""
    return {op.full_name: op for op in op_db}


def uninitialised(name: str) -> bool:
    """Whether an operator gives memory as it is: there is nothing to compare."""
    return "empty" in name or "resize_" in name


def cases(op: Any, dtype: torch.dtype | None, limit: int, inplace: bool = False) -> list[Sample]:
    """Up to four times `limit` calls on dense tensors (variants of one follow one another). Without a dtype, of the first of
    `DTYPES` that the operator has; none where it has no such dtype, or no in-place form."""
    function, known = op.get_inplace() if inplace else op, op.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in known), None) if dtype is None else dtype
    if function is None or dtype not in known:
        return []
    torch.manual_seed(0)
    differentiable = bool(op.supports_inplace_autograd if inplace else op.supports_autograd)
    with warnings.catch_warnings(action="ignore"):
        inputs = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 4 * limit)
        found = [Sample(function, (x.input, *x.args), x.kwargs, differentiable) for x in inputs]
    return [one for one in found if one.tensors and all(t.layout is torch.strided for t in one.tensors)]


def chosen(several: list[Sample], limit: int) -> list[Sample]:
    """Some of the calls, at equal distances."""
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


def is_random(case: Sample) -> bool | None:
    """Whether a call draws random numbers; None where it cannot be made: samples are for devices and builds of every kind."""
    with _Draws() as mode, suppress(Exception):
        case.run()
        return mode.drawn
    return None


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
                copies = [t.detach().resolve_conj().resolve_neg().clone() for t in sample.tensors]
                several[key] = Sample(func, *sample.given(copies))
        return func(*args, **kwargs)


def _lists(name: str, *arguments: Any) -> Callable[[], Any]:
    x, y = torch.randn(3, 4), torch.rand(5)
    several = [[x, y] if argument is list else argument for argument in arguments]
    return lambda: getattr(torch.ops.aten, f"_foreach_{name}")(*several)


_UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
    rsqrt sigmoid sign sin sinh sqrt tan tanh trunc norm zero"""
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min")
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
    *(_lists(name, list, list) for name in (*_BINARY, "copy")),
    *(_lists(name, list, 2.0) for name in (*_BINARY, "pow")),
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
        with recorder, suppress(NotImplementedError):
            make()
    run_under(recorder, chosen_operators, DTYPES, RECORDED)
    return {name: _few(list(several.values()), kept) for name, several in sorted(recorder.noted.items()) if several}


def run_under(mode: TorchDispatchMode, several: Iterable[Any], dtypes: Sequence[torch.dtype], limit: int) -> None:
    """Run up to `limit` samples of each operator and dtype, forward and backward, under a mode that watches."""
    for op, dtype in itertools.product(several, dtypes):
        for case in chosen(tolerant(op, dtype), limit):
            with mode, suppress(Exception), warnings.catch_warnings(action="ignore"):
                run(case, [t.clone() for t in case.tensors], case.differentiable, torch.randn_like)


def tolerant(op: Any, dtype: torch.dtype, limit: int = RECORDED) -> list[Sample]:
    """`cases`, or none where they cannot be made: some need what this machine lacks."""
    with suppress(Exception):
        return cases(op, dtype, limit)
    return []


def run(case: Sample, tensors: Sequence[Any], differentiable: bool, cotangent: Any, inplace: bool = False) -> Any:
    """The result of a call, with its gradients left in the tensors; `cotangent(out)` is that of an output. In place, the call
    writes to a copy of the first tensor."""
    if not differentiable:
        with torch.no_grad():
            return case.run(tensors)
    for t in tensors:
        t.requires_grad_(t.is_floating_point() or t.is_complex())
    results = case.run([t.clone() if inplace and number == 0 else t for number, t in enumerate(tensors)])
    outs = [out for out in tree_leaves(results) if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        torch.autograd.backward(outs, [cotangent(out) for out in outs])
    return results


def _few(several: list[Sample], kept: int) -> list[Sample]:
    """At most two of a kind, the smallest that are not trivial, and of all kinds a bounded number."""
    groups = grouped(sorted(several, key=lambda s: (s.size < 4, s.size)), lambda s: s.key(sizes=False))
    return [group[i] for i in range(2) for group in groups if i < len(group)][:kept]
