"""Scaled dot product attention: batch and heads may be sharded, and the queries of the CPU's operator where it is not causal.

Keys with fewer heads than queries serve groups of them (`enable_gqa`): heads are then sharded by whole groups. With dropout the
operators draw random numbers of their own, so all runs whole on every rank, from one seed. Flex attention is decomposed into
operators that have rules: the functions that a user gives see global indices, and the matrix of scores is materialised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import flex_operators
from ..base.schema import schema_of
from ..errors import OperatorError
from ..layouts.layout import Dim, Factor, Layout, sharded, whole
from ..propagation.notation import Call, Kernel, Pattern, Proposal, labels, parse
from ..propagation.table import rule
from ..tensor.draw import seeded
from ..tensor.dtensor import DTensor
from ..tensor.toolbox import Toolbox

Patterns = tuple[Pattern, ...]


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _checked(call: Call, wants: Sequence[Layout]) -> Kernel:
    """The operators misread a last dim that is not contiguous, which a gathered one may be, and do not take a rank without
    batch, heads or queries: what that gives is empty or zero."""
    op, named = call.op, schema_of(call.op).named

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {name: _contiguous(x) for name, x in named(args, kwargs).items()}
        tensors = [x for x in given.values() if isinstance(x, Tensor) and x.ndim == 4]
        if all(x.numel() for x in tensors):
            return op(**given)
        outs = op(**{name: x.to("meta") if isinstance(x, Tensor) else x for name, x in given.items()})
        return tuple(torch.zeros_like(x, device=tensors[0].device) if isinstance(x, Tensor) else x for x in outs)

    return kernel


def _contiguous(x: Any) -> Any:
    return x.contiguous() if isinstance(x, Tensor) and x.ndim in (2, 4) and x.stride(-1) != 1 else x


# ── groups of heads ───────────────────────────────────────────────────────────────────────────────────────────────────


def _by_group(inputs: Patterns, outputs: Patterns, call: Call) -> Proposal | None:
    """Shard batch, or whole groups of query heads (h) with the key heads that serve them (g)."""
    if call["dropout_p"]:
        return None if call.name.endswith("backward") else Proposal((), (), program=seeded)
    heads, groups = call["query"].shape[1], call["key"].shape[1]
    if groups in (heads, 1):
        return None
    names: list[tuple[str, ...]] = [()] * len(call.tensors)
    for slot, index in enumerate(call.slots):
        if index is not None:
            names[index] = labels(inputs[slot], call, call.tensors[index].ndim)
    axes = _axes(call, names)
    group, each = _sharded_by(call["key"], 1, axes["h"]), heads // groups
    by_head = Factor(heads, group.axes, tuple(size * each for size in group.sizes))
    dims: dict[str, Dim] = {"b": (_sharded_by(call["query"], 0, axes["b"]),), "g": (group,), "h": (by_head,)}
    wants = tuple(
        layout.replace(dims=_placed(layout.shape, letters, dims), partials=())
        for layout, letters in zip(call.tensors, names, strict=True)
    )
    results = tuple(
        call.result(i, _placed(one.shape, () if pattern.same else labels(pattern, call, len(one.shape)), dims))
        for i, (pattern, one) in enumerate(zip(outputs, call.results, strict=False))
    )
    return Proposal(wants, results, kernel=_checked(call, wants))


def _axes(call: Call, names: list[tuple[str, ...]]) -> dict[str, list[str]]:
    """The axes that shard the batch and those that shard heads, as the query has it now, else the key, else any tensor."""
    axes: dict[str, list[str]] = {"b": [], "h": []}
    first = (call["query"], call["key"])
    order = sorted(zip(call.tensors, names, strict=True), key=lambda item: item[0] not in first)
    for axis in call.tensors[0].mesh.axes:
        letters = [n[state] for t, n in order if isinstance(state := t.states.get(axis), int) and n[state] in "bgh"]
        if letters:
            axes["b" if letters[0] == "b" else "h"].append(axis)
    return axes


def _sharded_by(layout: Layout, dim: int, axes: list[str]) -> Factor:
    """A dim as it is, where these axes shard it into intervals; else in default chunks."""
    is_so = len(layout.dims[dim]) == 1 and set(layout.axes_of(dim)) == set(axes)
    return layout.dims[dim][0] if is_so else sharded(layout.shape[dim], axes, layout.mesh)


def _placed(shape: Sequence[int], letters: Sequence[str], dims: dict[str, Dim]) -> list[Dim]:
    """Each dim as its letter is sharded; whole where it has another size (1, in a mask)."""
    placed: list[Dim] = [(whole(n),) for n in shape]
    for i, letter in enumerate(letters):
        if letter in dims and math.prod(factor.size for factor in dims[letter]) == shape[i]:
            placed[i] = dims[letter]
    return placed


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention(name: str, text: str, whole: str, **words: Any) -> None:
    by_group = partial(_by_group, *parse(text.replace("b h s", "b g s")))
    rule(f"_scaled_dot_product_{name}", text, whole=whole, kernel=_checked, function=by_group, static="dropout_p", **words)


def _gradients(name: str, text: str, whole: str) -> None:
    _attention(f"{name}_backward", f"b h l f, {QKV}, {text}", whole, linear=((0,),))


DROPPED = " b?dropout_p h?dropout_p l?dropout_p"
QKV = "b h l e, b h s e, b h s f"

_attention("flash_attention_for_cpu", f"{QKV}, b h l s -> b h l f, b h l", "e s f l?is_causal")
_gradients("flash_attention_for_cpu", f"b h l f, b h l, b h l s -> {QKV}", "e s f l?is_causal")
_attention("flash_attention", f"{QKV} -> b h l f, b h l, =, =, =", "e s f l")
_gradients("flash_attention", f"b h l f, b h l, c, c, r, r -> {QKV}", "e s f l c r" + DROPPED)
_attention("efficient_attention", f"{QKV}, b h l s -> b h l f, b h m, =, =", "e s f l m")
_gradients("efficient_attention", f"b h l s, b h l f, b h m, r, r -> {QKV}, b h l s", "e s f l m r" + DROPPED)
_attention("cudnn_attention", f"{QKV}, b h l s -> b h l f, b h l m, =, =, =", "e s f l m")
_gradients("cudnn_attention", f"b h l f, b h l m, r, r, b h l s, c, c -> {QKV}", "e s f l m c r" + DROPPED)
_attention("fused_attention_overrideable", f"{QKV}, b h l s -> b h l f, b h l, =, =, =", "e s f l")
_gradients("fused_attention_overrideable", f"b h l s, b h l f, b h l, c, c, r, r -> {QKV}, b h l s", "e s f l c r" + DROPPED)


def _refuse_nested(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise OperatorError(
        f"{op} makes a nested tensor of {tools.layout(args[0])}, which is one of equal rows; "
        "nn.TransformerEncoder(…, enable_nested_tensor=False) works on it as it is"
    )


rule("_nested_tensor_from_mask", program=_refuse_nested)

for _operator, _meaning in flex_operators():
    _operator.py_impl(DTensor)(_meaning)
