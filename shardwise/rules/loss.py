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

from ..base.schema import schema_of
from ..layouts.layout import Layout, whole
from ..propagation.notation import Call, Kernel, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import ShardPosition

#: torch's numbers for how a loss is reduced (0: not at all).
MEAN, SUM = 1, 2
#: Stands for a target that is not to be counted here; no class has it, whatever `ignore_index` is.
IGNORED = -100

# ── element by element ────────────────────────────────────────────────────────────────────────────────────────────────


def _local_call(call: Call, **changed: Any) -> Kernel:
    """The operator with some arguments replaced, however they were given."""
    op, named = call.op, schema_of(call.op).named
    return lambda *args, **kwargs: op(**{**named(args, kwargs), **changed})


def _count(wants: Sequence[Layout]) -> int:
    return math.prod(torch.broadcast_shapes(*(layout.shape for layout in wants)))


def _mean(call: Call, wants: Sequence[Layout]) -> Any:
    """A local sum over the global count."""
    if call["reduction"] != MEAN or not any(layout.states for layout in wants):
        return None
    count, total = _count(wants), _local_call(call, reduction=SUM)
    return lambda *args, **kwargs: total(*args, **kwargs) / count


def _mean_backward(call: Call, wants: Sequence[Layout], count: Callable[[Sequence[Layout]], int] = _count) -> Any:
    """The gradient of a sum, of a gradient divided by the global count."""
    if call["reduction"] != MEAN or not any(layout.states for layout in wants):
        return None
    number, total = count(wants), _local_call(call, reduction=SUM)
    return lambda grad, *args, **kwargs: total(grad / number, *args, **kwargs)


rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    "..., ..., ..., ... -> ...",
    kernel=_mean,
)
# (torch's own account of their shapes divides by the number of elements.)
_backward = partial(rule, linear=((0,),), kernel=_mean_backward, gives=lambda a: [(a["self"].shape, a["self"].dtype)])
_backward("mse_loss_backward", "..., ..., ... -> ...", linear=((0,), (1, 2)))
_backward(
    "smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward",
    "..., ..., ..., ... -> ...",
    unoffered="max min: losses are not partial",
)


def _one_row(call: Call) -> Proposal | None:
    """A single row may have a target of one element, which cannot be sharded as rows are."""
    if call["self"].ndim > 1:
        return None
    results = tuple(call.result(i, [(whole(n),) for n in one.shape]) for i, one in enumerate(call.results))
    return Proposal(tuple(t.replicated() for t in call.tensors), results)


_by_row = partial(_mean_backward, count=lambda wants: math.prod(wants[1].shape[:-1]))
_backward("multi_margin_loss_backward", "n, n c, n, c -> n c", whole="c", kernel=_by_row, function=_one_row)
_backward("multilabel_margin_loss_backward", "n, n c, n c, n c -> n c", whole="c", kernel=_by_row, function=_one_row)


def _mean_of_rows(call: Call, wants: Sequence[Layout]) -> Any:
    """A local sum over the global number of rows, none of which is a loss of 0."""
    rows, mean = wants[0].shape[0], call["reduction"] == MEAN
    total = _local_call(call, reduction=SUM if mean else call["reduction"])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = total(*args, **kwargs)
        loss, *rest = out if isinstance(out, tuple) else (out,)
        loss = torch.zeros_like(loss) if not args[0].numel() else loss / rows if mean else loss
        return (loss, *rest) if rest else loss

    return kernel


# What torch says of tensors without data is another shape for a single row.
_margin = partial(rule, whole="c", kernel=_mean_of_rows, function=_one_row)
_margin("multi_margin_loss", "n c, n, c -> n", gives=lambda a: [(() if a["reduction"] else a["target"].shape, a["self"].dtype)])
_margin(
    "multilabel_margin_loss_forward",
    "n c, n c -> n, n c",
    gives=lambda a: [(() if a["reduction"] else a["self"].shape[:-1], a["self"].dtype), (a["self"].shape, a["self"].dtype)],
)

# ── by class ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _own_classes(logits: int, call: Call, wants: Sequence[Layout]) -> Any:
    """The operator on the targets among this rank's classes; `logits` is the position of the logits, the target follows."""
    dim = min(1, wants[logits].ndim - 1)
    if not wants[logits].axes_of(dim):
        return None
    shard, ignored, local = ShardPosition(wants[logits], dim), call["ignore_index"], _local_call(call, ignore_index=IGNORED)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given, numbers = shard.split(args)
        target = given[logits + 1].long()
        given[logits + 1] = torch.where(target == ignored, IGNORED, shard.local(target, numbers, IGNORED)[0])
        with shard.naming(target, ignored=ignored):
            return local(*given, **kwargs)

    return kernel, *shard.numbers


def _mean_by_weight(call: Call) -> Proposal | None:
    """A mean over sharded targets or classes is a program: sum and weight are reduced together, then divided."""
    is_sharded = any(layout.states for layout in call.tensors)
    return Proposal((), (), program=_reduce_both) if is_sharded and call["reduction"] == MEAN else None


def _reduce_both(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    total, weight = op(**{**schema_of(op).named(args, kwargs), "reduction": SUM})
    layout = tools.layout(weight)
    pair = layout.replace(dims=[[whole(2)]], stride=(1,))
    both = tools.wrap(tools.each(lambda *two: torch.stack(two), layout.mesh, total, weight), pair)
    reduced = tools.move(both, pair.reduced(), tools.operator)
    mean, weight = tools.each(lambda two: (two[0] / two[1], two[1].clone()), layout.mesh, reduced)
    return tools.wrap(mean, layout.reduced()), tools.wrap(weight, layout.reduced())


rule("nll_loss_forward", "n c, n, c -> n, ", kernel=partial(_own_classes, 0), function=_mean_by_weight)
rule("nll_loss2d_forward", "n c h w, n h w, c -> n h w, ", kernel=partial(_own_classes, 0), function=_mean_by_weight)
rule("nll_loss_backward", "n, n c, n, c,  -> n c", linear=((0,),), kernel=partial(_own_classes, 1))
rule("nll_loss2d_backward", "n h w, n c h w, n h w, c,  -> n c h w", linear=((0,),), kernel=partial(_own_classes, 1))
