"""Convolution: batch and channels may be sharded, and the plane, whose borders are then sent between ranks (`windows.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ..layouts.layout import Layout
from ..propagation.notation import Call, Kernel, Proposal, Rule, parse
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .pooling import Patterns, some
from .windows import LocalWindows, one_at_least, trimmed, windowed

aten = torch.ops.aten

# ── batch and channels ─────────────────────────────────────────────────────────────────────────────────────────────────


def _convolution(call: Call) -> Rule:
    """The bias is added once: where input channels are sharded, it is partial like what it is added to."""
    c, weight, o = _channels(call)
    return linear_sentence(f"n {c} ..., {weight} ..., {o} -> n {o} ...", ((0, 2), (1, 2)))


def _convolution_backward(call: Call) -> Proposal | Rule:
    mask = call["output_mask"]
    if mask[2]:
        return Proposal(call.tensors, (), program=_bias_apart)
    c, weight, o = _channels(call)
    results = [text for text, asked in zip((f"n {c} ...", f"{weight} ..."), mask, strict=False) if asked]
    return linear_sentence(f"n {o} ..., n {c} ..., {weight} ... -> {', '.join(results)}", ((0,),))


@cache
def linear_sentence(text: str, linear: tuple[tuple[int, ...], ...]) -> Rule:
    """A row for one call: linear in some arguments; capitals and the dims of the ellipsis are whole."""
    patterns = parse(text)
    kernel = partial(_own_groups if "g" in text else some, patterns)
    return Rule(*patterns, linear=linear, whole=frozenset("CDEHOWZ") | {"..."}, kernel=kernel, text=text)


def _channels(call: Call) -> tuple[str, str, str]:
    """The letters of the channels of the input, of the weight and of the output; capitals cannot be sharded."""
    if call["groups"] == 1:
        return "c", "c o" if call["transposed"] else "o c", "o"
    return ("g", "g E", "g") if _side_by_side(call) else ("C", "D E", "O")


def _side_by_side(call: Call) -> bool:
    """Whether every sharding of the channels, as they are or in default chunks, falls between groups."""
    outer = call.tensors[0] if "grad_output" in call.arguments else call.results[0]
    channels, groups = call["input"].shape[1], call["groups"]
    if outer.shape[1] != channels:
        return False
    dims = [(t, d) for t in call.tensors for d in range(min(t.ndim, 2)) if t.shape[d] == channels]
    sizes = [size for t, d in dims for factor in t.dims[d] for size in factor.sizes if factor.axes]
    each = channels // groups
    return each == 1 or (groups % call["input"].mesh.size() == 0 and not any(size % each or not size for size in sizes))


def _own_groups(patterns: Patterns, call: Call, wants: Sequence[Layout]) -> Kernel:
    """The operator with as many groups as the rank has channels for."""
    names, op = list(call.arguments), call.op
    at, source, each = names.index("groups"), names.index("input"), call["input"].shape[1] // call["groups"]

    def run(*args: Any) -> Any:
        return op(*args[:at], args[source].shape[1] // each, *args[at + 1 :])

    return some(patterns, replace(call, op=run), wants) or run


def _bias_apart(tools: Toolbox, op: Any, grad: Any, x: Any, weight: Any, *rest: Any) -> tuple[Any, Any, Any]:
    """The gradient of the bias is a sum of its own: input channels, which the others may be sharded by, have no part in it."""
    *words, mask = rest[1:]
    bias = aten.sum.dim_IntList(grad, [0, *range(2, grad.ndim)])
    others = op(grad, x, weight, None, *words, [*mask[:2], False])[:2] if any(mask[:2]) else (None, None)
    return (*others, bias)


def _time_first(tools: Toolbox, op: Any, x: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """conv_tbc as the other convolutions have their dims."""
    planes = aten.convolution(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, [1], [pad], [1], False, [0], 1)
    return planes.permute(2, 0, 1)


_forward = LocalWindows(lambda plane, run, call: lambda values, numbers, shape: trimmed(run(*values), shape))
windowed("convolution", None, _forward, function=_convolution)
_backward = LocalWindows(lambda plane, run, call: lambda values, *_: tuple(run(one_at_least(values[0], plane), *values[1:])))
windowed("convolution_backward", None, _backward, function=_convolution_backward)
rule("conv_tbc", program=_time_first)
