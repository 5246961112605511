"""Operators on lists of tensors, element by element: `_foreach_*` and the fused optimizers.

All lists run in one local call where each index has one layout; else index by index through the operator on single tensors.
Scalars, which an optimizer changes at every step, are no part of a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import schema
from ..errors import OperatorError
from ..layouts.layout import Layout
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten

_POINTWISE = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor frac lerp "
    "lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh "
    "trunc zero"
)


def _columns(call: Call) -> list[list[int]]:
    """Which of the call's tensors stand at each index of its lists; a single tensor beside the lists stands at every index."""
    lists: list[range] = []
    for value in (call.arguments[name] for name in call.tensor_names):
        count = len(value) if isinstance(value, tuple) else int(isinstance(value, Layout))
        first = lists[-1].stop if lists else 0
        lists += [range(first, first + count)] if count else []
    return [[each[i] if len(each) > 1 else each[0] for each in lists] for i in range(max(map(len, lists)))]


def _aligned(lead: Layout, column: Sequence[Layout]) -> list[Layout] | None:
    """The column with every tensor sharded as the lead and single numbers replicated; None where shapes broadcast otherwise."""
    if any(t.shape != lead.shape and math.prod(t.shape) != 1 for t in column):
        return None
    return [t.replace(dims=lead.dims, partials=()) if t.shape == lead.shape else t.replicated() for t in column]


def _foreach(call: Call) -> Proposal:
    in_place, results = call.name.endswith("_"), []
    wants: dict[int, Layout] = {}
    for i, indices in enumerate(_columns(call)):
        column = [call.tensors[index] for index in indices]
        lead = column[0] if in_place else max(column, key=lambda t: t.ndim)
        aligned = None if any(t.partials for t in column) else _aligned(lead, column)
        if aligned is None:
            return Proposal((), (), program=_one_by_one)
        for index, want in zip(indices, aligned, strict=True):
            wants.setdefault(index, want)
        if not in_place:
            results.append(call.result(i, lead.dims))
    return Proposal(tuple(wants[index] for index in sorted(wants)), tuple(results))


#: The single forms that also take a number.
_SINGLE = {"maximum": "clamp_min", "minimum": "clamp_max"}


def _one_by_one(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on single tensors at each index."""
    name = schema(op).name.partition("_foreach_")[2]
    in_place = name.endswith("_")
    single = getattr(aten, _SINGLE.get(name.rstrip("_"), name.rstrip("_")))
    count = max(len(arg) for arg in args if isinstance(arg, list | tuple))
    outs = []
    for i in range(count):
        row = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
        words = {k: v[i] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
        if name.startswith("addc") and len(row) == 4:  # the scalar is keyword-only in the single form
            words["value"] = row[3][i].item() if isinstance(row[3], Tensor) else row[3]
            row.pop()
        outs.append(single(*row, **words))
        if in_place:
            aten.copy_.default(row[0], outs[-1])
    return None if in_place else outs


for _name in _POINTWISE.split():
    rule(f"_foreach_{_name}", function=_foreach, zipped=True)
# Their scalars are a tensor of values that are read, which tensors without data have none of.
rule("_foreach_addcdiv.Tensor _foreach_addcmul.Tensor", program=_one_by_one, zipped=True)


def _norms(tools: Toolbox, op: Any, tensors: Sequence[Any], order: float = 2, dtype: Any = None) -> list[Any]:
    """The norms of many tensors with one reduction for all that are sharded by the same axes."""
    if order in (float("inf"), float("-inf"), 0):
        return [aten.linalg_vector_norm.default(x, order, None, False, dtype=dtype) for x in tensors]
    groups: dict[Layout, list[int]] = {}
    powers: list[Any] = []
    for i, x in enumerate(tensors):
        layout = tools.layout(x).reduced()
        x = tools.move(x, layout, "_foreach_norm")
        local = tools.each(lambda t: torch.linalg.vector_norm(t, order, dtype=dtype) ** order, layout.mesh, x)
        partials = [(axis, "sum") for axis in layout.states]
        out = Layout.of(layout.mesh, (), partials, dtype or layout.dtype)
        powers.append(tools.wrap(local, out))
        groups.setdefault(out, []).append(i)
    norms: list[Any] = [None] * len(powers)
    for indices in groups.values():
        stacked = aten.stack.default([powers[i] for i in indices])
        whole = tools.move(stacked, tools.layout(stacked).reduced(), "_foreach_norm")
        for i, norm in zip(indices, aten.unbind.int(aten.pow.Tensor_Scalar(whole, 1 / order)), strict=True):
            norms[i] = norm
    return norms


rule("_foreach_norm", program=_norms, zipped=True)


def _fused(call: Call) -> Proposal:
    """Every list is written as the parameters are sharded; the step counts are single numbers."""
    for indices in _columns(call):
        column = [call.tensors[index] for index in indices]
        if column[0].partials:
            raise OperatorError(f"{call.name}: parameter {column[0]} is Partial; make it Replicate() first")
        aligned = _aligned(column[0], column)
        if aligned is None:
            raise OperatorError(f"{call.name}: the state of parameter {column[0]} has another shape: {tuple(column[1:])}")
        if aligned != column:
            return Proposal((), (), program=_fused_after_moves)
    return Proposal(call.tensors, ())


def _fused_after_moves(tools: Toolbox, op: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Bring gradients and states to their parameter's layout, update, and copy what was moved back."""
    moved: list[tuple[Any, Any]] = []

    def aligned(x: Any, parameter: Any) -> Any:
        if not tools.is_distributed(x) or x.shape != parameter.shape:
            return x
        goal = tools.layout(x).replace(dims=tools.layout(parameter).dims, partials=())
        if goal is tools.layout(x):
            return x
        moved.append((x, tools.move(x, goal, schema(op).name)))
        return moved[-1][1]

    def column(arg: Any) -> Any:
        if not isinstance(arg, list | tuple):
            return arg
        return [aligned(x, p) for x, p in zip(arg, params, strict=False)] if arg else []

    op(params, *map(column, args), **kwargs)
    for original, copy in moved:
        original.copy_(copy)


rule("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_", function=_fused, zipped=True)


def _unscale(tools: Toolbox, op: Any, grads: Sequence[Any], found_inf: Tensor, inverse: Tensor) -> None:
    """Each rank scales its shards; what is not finite in any of them is found on every rank."""
    mesh = tools.layout(grads[0]).mesh
    whole = [tools.move(grad, tools.layout(grad).reduced()) for grad in grads]
    axes = dict.fromkeys(axis for grad in whole for axis in tools.layout(grad).states)
    factor = tools.replicated(inverse, mesh)
    local = tools.each(_unscaled, mesh, [tools.local(grad) for grad in whole], factor)
    layout = Layout.of(mesh, (), [(axis, "max") for axis in axes], torch.float32)
    found_inf.copy_(torch.maximum(found_inf, tools.move(tools.wrap(local, layout), layout.reduced())))
    for grad, one in zip(grads, whole, strict=True):
        if tools.layout(grad).partials:
            grad.copy_(one)


def _unscaled(grads: list[Tensor], inverse: Tensor) -> Tensor:
    """Scales in place; 1 where a gradient had a value that is not finite, else 0."""
    found_inf = torch.zeros((), device=inverse.device)
    aten._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
    return found_inf


rule("_amp_foreach_non_finite_check_and_unscale_", program=_unscale, zipped=True)
