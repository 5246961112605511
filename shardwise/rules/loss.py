"""Losses: a mean divides local sums by the global count, so it is exact on uneven shards.

Classes may be sharded: each rank then counts the targets among its own classes, and the rest is Partial(sum); the logits stay
where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layouts.layout import Layout, whole
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import ShardPosition

#: torch's numbers for how a loss is reduced (0: not at all).
MEAN, SUM = 1, 2
#: Stands for a target that is not to be counted here; no class has it, whatever `ignore_index` is.
IGNORED = -100

# ── element by element ────────────────────────────────────────────────────────────────────────────────────────────────


def _local_call(call: Call, changed: dict[str, Any], first: Callable[[Tensor], Tensor] | None = None) -> Callable[..., Any]:
    """The operator with some arguments replaced, however they were given, and its first one passed through a function."""
    op, names = call.op, list(call.arguments)
    at = [(names.index(name), name, value) for name, value in changed.items()]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for position, name, value in at:
            if position < len(given):
                given[position] = value
            else:
                kwargs = {**kwargs, name: value}
        if first is not None:
            given[0] = first(given[0])
        return op(*given, **kwargs)

    return kernel


def _count(wants: Sequence[Layout]) -> int:
    return math.prod(torch.broadcast_shapes(*(layout.shape for layout in wants)))


def _mean(call: Call, wants: Sequence[Layout]) -> Any:
    """A local sum over the global count."""
    if call["reduction"] != MEAN or not any(layout.states for layout in wants):
        return None
    count, total = _count(wants), _local_call(call, {"reduction": SUM})
    return lambda *args, **kwargs: total(*args, **kwargs) / count


def _mean_backward(call: Call, wants: Sequence[Layout], count: Callable[[Sequence[Layout]], int] = _count) -> Any:
    """The gradient of a sum, of a gradient divided by the global count."""
    if call["reduction"] != MEAN or not any(layout.states for layout in wants):
        return None
    number = count(wants)
    return _local_call(call, {"reduction": SUM}, lambda grad: grad / number)


def _like_input(arguments: dict[str, Any]) -> list[tuple[Sequence[int], torch.dtype]]:
    x = arguments["self"]
    return [(x.shape, x.dtype)]


rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    "..., ..., ..., ... -> ...",
    kernel=_mean,
)
# (torch's own account of their shapes divides by the number of elements.)
rule("mse_loss_backward", "..., ..., ... -> ...", linear=((0,), (1, 2)), kernel=_mean_backward, gives=_like_input)
rule(
    "smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward",
    "..., ..., ..., ... -> ...",
    linear=((0,),),
    unoffered="max min: losses are not partial",
    kernel=_mean_backward,
    gives=_like_input,
)


def _one_row(call: Call) -> Proposal | None:
    """A single row may have a target of one element, which cannot be sharded as rows are."""
    if call["self"].ndim > 1:
        return None
    mesh = call["self"].mesh
    results = [Layout.of(mesh, [(whole(n),) for n in one.shape], (), one.dtype) for one in call.results]
    return Proposal(tuple(t.replicated() for t in call.tensors), tuple(results))


_by_row = partial(_mean_backward, count=lambda wants: math.prod(wants[1].shape[:-1]))
_words: dict[str, Any] = {"linear": ((0,),), "whole": "c", "kernel": _by_row, "function": _one_row, "gives": _like_input}
rule("multi_margin_loss_backward", "n, n c, n, c -> n c", **_words)
rule("multilabel_margin_loss_backward", "n, n c, n c, n c -> n c", **_words)


# What torch says of tensors without data is another shape for a single row.
def _margin(arguments: dict[str, Any]) -> list[tuple[Sequence[int], torch.dtype]]:
    return [(() if arguments["reduction"] else arguments["target"].shape, arguments["self"].dtype)]


def _margin_of_labels(arguments: dict[str, Any]) -> list[tuple[Sequence[int], torch.dtype]]:
    x = arguments["self"]
    return [(() if arguments["reduction"] else x.shape[:-1], x.dtype), (x.shape, x.dtype)]


def _mean_of_rows(call: Call, wants: Sequence[Layout]) -> Any:
    """A local sum over the global number of rows, none of which is a loss of 0."""
    rows, mean = wants[0].shape[0], call["reduction"] == MEAN
    total = _local_call(call, {"reduction": SUM if mean else call["reduction"]})

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = total(*args, **kwargs)
        loss, *rest = out if isinstance(out, tuple) else (out,)
        loss = torch.zeros_like(loss) if not args[0].numel() else loss / rows if mean else loss
        return (loss, *rest) if rest else loss

    return kernel


_words = {"whole": "c", "kernel": _mean_of_rows, "function": _one_row}
rule("multi_margin_loss", "n c, n, c -> n", gives=_margin, **_words)
rule("multilabel_margin_loss_forward", "n c, n c -> n, n c", gives=_margin_of_labels, **_words)

# ── by class ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _own_classes(logits: int) -> Callable[[Call, Sequence[Layout]], Any]:
    """The operator on the targets among this rank's classes; `logits` is the position of the logits, the target follows."""

    def make(call: Call, wants: Sequence[Layout]) -> Any:
        layout = wants[logits]
        dim = min(1, layout.ndim - 1)
        if not layout.axes_of(dim):
            return None
        shard, ignored = ShardPosition(layout, dim), call["ignore_index"]
        local = _local_call(call, {"ignore_index": IGNORED})

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given, numbers = shard.split(args)
            target = given[logits + 1].long()
            position, _ = shard.local(target, numbers, IGNORED)
            given[logits + 1] = torch.where(target == ignored, IGNORED, position)
            try:
                return local(*given, **kwargs)
            except (IndexError, RuntimeError) as error:
                raise shard.naming(error, target[target != ignored]) from None

        return kernel, *shard.numbers

    return make


def _mean_by_weight(call: Call) -> Proposal | None:
    """A mean over sharded targets or classes is a program: sum and weight are reduced together, then divided."""
    is_sharded = any(layout.states for layout in call.tensors)
    return Proposal((), (), program=_reduce_both) if is_sharded and call["reduction"] == MEAN else None


def _reduce_both(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    names = [argument.name for argument in op._schema.arguments]
    total, weight = op(**{**dict(zip(names, args, strict=False)), **kwargs, "reduction": SUM})
    layout = tools.layout(weight)
    pair = layout.replace(dims=[[whole(2)]], stride=(1,))
    both = tools.wrap(tools.each(lambda *two: torch.stack(two), layout.mesh, total, weight), pair)
    reduced = tools.move(both, pair.reduced(), op._schema.name.replace("::", "."))
    mean, weight = tools.each(lambda two: (two[0] / two[1], two[1].clone()), layout.mesh, reduced)
    return tools.wrap(mean, layout.reduced()), tools.wrap(weight, layout.reduced())


rule("nll_loss_forward", "n c, n, c -> n, ", kernel=_own_classes(0), function=_mean_by_weight)
rule("nll_loss2d_forward", "n c h w, n h w, c -> n h w, ", kernel=_own_classes(0), function=_mean_by_weight)
rule("nll_loss_backward", "n, n c, n, c,  -> n c", linear=((0,),), kernel=_own_classes(1))
rule("nll_loss2d_backward", "n h w, n c h w, n h w, c,  -> n c h w", linear=((0,),), kernel=_own_classes(1))
