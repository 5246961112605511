"""What is done to a user's function before it is traced.

Gradients of leaves take the layout of their leaf inside the compiled backward: where they can be bucketed and overlap.

In eager mode a hook of the leaf does it, after the backward of the operator that the leaf went into; a compiled program would
leave it to that hook, one collective after the other.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import CompileError
from ..tensor import DTensor, align_grad


def align_leaves(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The graph of a user's function with every leaf that wants a gradient going through `shardwise::aligned` first."""
    if not torch.is_grad_enabled():
        return gm
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    changed = False
    for node, value in zip(places, inputs, strict=True):
        if isinstance(value, DTensor) and value.requires_grad and value.is_leaf and node.users:
            with gm.graph.inserting_after(places[-1]):
                aligned = gm.graph.call_function(torch.ops.shardwise.aligned.default, (node,))
            aligned.meta = dict(node.meta)
            node.replace_all_uses_with(aligned, delete_user_cb=lambda user, aligned=aligned: user is not aligned)
            changed = True
    if changed:
        gm.recompile()
    return gm


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.layout = x._layout.reduced()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return align_grad(grad, ctx.layout)


def _aligned(x: Tensor) -> Tensor:
    found: Tensor = _Aligned.apply(x)
    return found


torch.library.define("shardwise::aligned", "(Tensor(a) x) -> Tensor(a)")
torch.library.impl("shardwise::aligned", "CompositeImplicitAutograd", _aligned)


def traceable(function: Any) -> tuple[Any, bool]:
    """The function that is traced in place of another, and whether it runs without gradients.

    Around an optimizer's own step lie wrappers that look for hooks and refuse to be traced as a whole.
    """
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, torch.optim.Optimizer) or getattr(function, "__name__", "") != "step":
        return function, False
    if owner._optimizer_step_pre_hooks or owner._optimizer_step_post_hooks:
        raise CompileError(
            f"{type(owner).__name__}.step has hooks, which a traced step would leave out; remove them, or trace a function "
            "that does without"
        )
    return functools.partial(inspect.unwrap(type(owner).step), owner), True


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a code object of its own: Dynamo keeps what it knows of a function with its code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
