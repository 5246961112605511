"""Reduces gradients of leaves to the layout of their leaf inside a traced backward, where they can be bucketed and overlap.

In eager mode a hook of the leaf does it, after the backward of the operator that used the leaf; a compiled program would leave
it to that hook, one collective after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch.compiler import Function
from ..tensor.dtensor import DTensor, align_grad


def align_leaves(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The graph of a user's function with every leaf that wants a gradient going through `shardwise::aligned` first."""
    if not torch.is_grad_enabled():
        return gm
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    changed, apart = False, _apart(gm)
    for node, value in zip(places, inputs, strict=True):
        if isinstance(value, DTensor) and value.requires_grad and value.is_leaf and node.users:
            with gm.graph.inserting_after(places[-1]):
                aligned = gm.graph.call_function(torch.ops.shardwise.aligned.default, (node,))
            aligned.meta = dict(node.meta)
            node.replace_all_uses_with(aligned, delete_user_cb=lambda user, aligned=aligned: user not in (aligned, *apart))
            changed = True
    if changed:
        gm.recompile()
    return gm


def _apart(gm: GraphModule) -> set[Node]:
    """Nodes that use leaves unaligned: calls of `autograd.grad`, and all nodes after the last of these."""
    nodes = list(gm.graph.nodes)
    asking = [i for i, node in enumerate(nodes) if node.target is torch.autograd.grad]
    return {nodes[i] for i in asking} | set(nodes[asking[-1] :]) if asking else set()


class _Aligned(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.layout = x._layout.reduced()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return align_grad(grad, ctx.layout)


torch.library.define("shardwise::aligned", "(Tensor(a) x) -> Tensor(a)")
torch.library.impl("shardwise::aligned", "CompositeImplicitAutograd", lambda x: _Aligned.apply(x))
