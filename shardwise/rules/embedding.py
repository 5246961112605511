"""Embedding: where the rows of the table are sharded, each rank looks up those it holds, and the result is Partial(sum).

Bags of rows: columns may be sharded, and rows too unless the largest of a bag is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import OperatorError
from ..layouts.layout import Layout, whole
from ..propagation.notation import Call, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import OUTSIDE, ShardPosition, at_least_one, keep, reading

_table = partial(rule, linear=((0,),))
_table("embedding", "v d, ... -> ... d", passes="all", kernel=lambda call, wants: reading(wants[0], 0, 1, call.op))
_table("embedding_dense_backward", "... d, ... -> v d", whole="...?scale_grad_by_freq")


def _refuse_sparse(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise OperatorError(
        f"{op} makes a sparse tensor of DTensors, which are strided; embedding(…, sparse=False) gives a sharded gradient "
        "as its table is"
    )


rule("_sparse_coo_tensor_with_dims_and_tensors", program=_refuse_sparse, unoffered="all: a sparse tensor has no layout")

# ── bags ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

#: torch's numbers for what becomes of the rows of a bag.
SUM, MEAN, MAX = 0, 1, 2


def _bags(tools: Toolbox, op: Any, weight: Any, indices: Any, offsets: Any, *rest: Any) -> Any:
    """Every rank does all bags on its part of the table. (The sizes of what comes beside the bags depend on the device.)"""
    words = [*rest, *(False, SUM, False, None, False, -1)[len(rest) :]]
    mesh = tools.mesh(weight, indices, offsets, words[3])
    plain = [x if x is None else tools.replicated(x, mesh, tools.operator) for x in (indices, offsets, words.pop(3))]
    weight = weight if tools.is_distributed(weight) else tools.replicated(weight, mesh)
    have, mode = tools.layout(weight), words[1]
    rows = have.dims[0] if mode != MAX and len(have.dims[0]) == 1 else (whole(have.shape[0]),)
    partials = [item for item in have.partials if mode != MAX and item[1] in ("sum", "avg")]
    held = have.replace(dims=[rows, have.dims[1]], partials=partials)
    own = _own_rows(op, words, ShardPosition(held, 0)) if held.axes_of(0) else None
    kernel = own or (lambda w, i, offsets, samples, _: op(w, i, offsets, *words[:3], samples, *words[3:]))
    outs = tools.each(kernel, mesh, tools.move(weight, held), *plain, tools.offset(held, 0))
    summed = [*partials, *((axis, "sum") for axis in held.axes_of(0))]
    bags = Layout.of(mesh, [[whole(outs[0].shape[0])], held.dims[1]], summed, held.dtype)
    others = [Layout.of(mesh, [[whole(n)] for n in x.shape], (), x.dtype) for x in outs[1:]]
    if mode == MAX:
        others[-1] = Layout.of(mesh, bags.dims, (), outs[-1].dtype)
    return tuple(tools.wrap(x, layout) for x, layout in zip(outs, (bags, *others), strict=True))


def _own_rows(op: Any, words: list[Any], shard: ShardPosition) -> Any:
    """Rows of other ranks weigh nothing. What comes beside the bags is made of a table of two rows: padding, and not."""
    scale, mode, sparse, last, padding = words

    def kernel(weight: Tensor, indices: Tensor, offsets: Tensor, samples: Any, start: Tensor) -> Any:
        position = indices - start
        counts = indices != padding
        mine = (position >= 0) & (position < weight.shape[0]) & counts
        elsewhere = torch.where((indices < 0) | (indices >= shard.size), OUTSIDE, 0)
        position = torch.where(mine, position, elsewhere).to(indices.dtype)
        weights = mine.to(weight.dtype) if samples is None else keep(samples, mine)
        with shard.naming(indices):
            bags = op(at_least_one(weight, 0), position, offsets, scale, SUM, sparse, weights, last, -1)[0]
        few = weight.new_ones(2, 1), counts.to(indices.dtype)
        _, *others = op(*few, offsets, scale, mode, sparse, samples, last, 0 if padding >= 0 else -1)
        if mode == MEAN:
            bags = bags / others[1][: len(bags), None].clamp(min=1)
        return bags, *others

    return kernel


rule("_embedding_bag _embedding_bag_forward_only", program=_bags)


def _bag_rows(call: Call, wants: Sequence[Layout]) -> Any:
    """The gradient of the weights of the rows that this rank holds; that of the others is zero."""
    if not wants[1].axes_of(0):
        return None
    shard, op = ShardPosition(wants[1], 0), call.op

    def kernel(*args: Any) -> Tensor:
        (grad, weight, indices, *rest), numbers = shard.split(args)
        position, mine = shard.local(indices, numbers)
        padding = rest[3] if len(rest) > 3 else -1
        return keep(op(grad, at_least_one(weight, 0), position, *rest[:3]), mine & (indices != padding))

    return kernel, *shard.numbers


def _dense_only(call: Call) -> Proposal | None:
    return Proposal((), (), program=_refuse_sparse) if call["sparse"] else None


_table("_embedding_bag_backward", "b d, i, o, i, q, m d, i -> v d", whole="b i o q m", function=_dense_only)
_table("_embedding_bag_dense_backward", "b d, i, i, q, m d, i -> v d", whole="b i q m")
rule(
    "_embedding_bag_per_sample_weights_backward",
    "b d, v d, i, o, p -> i",
    linear=((0,), (1,)),
    whole="b i o p",
    kernel=_bag_rows,
)
