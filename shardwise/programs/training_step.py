"""Whole training steps as one program: replacements for optimizer methods that torch does not trace, and leaves' gradients.

torch's `Optimizer.step` breaks the graph on purpose and its `zero_grad` refuses to be traced, because under torch.compile a
backward lies between two graphs. A captured or compiled step has its backward inside, and needs neither.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from .._torch.compiler import Function, has_traced_backward, optimizer_hooks
from .._torch.patches import install_patches
from .._torch.replacements import HOOKS
from .._torch.tensors import tree_map_only
from ..tensor.dtensor import DTensor, align_grad


def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """An optimizer's step with its hooks, as `Optimizer.step` does it."""
    before, after = optimizer_hooks(optimizer)
    for hook in itertools.chain(*before):
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    with torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)):
        result = inspect.unwrap(type(optimizer).step)(optimizer, *args, **kwargs)
    for hook in itertools.chain(*after):
        hook(optimizer, args, kwargs)
    return result


def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """An optimizer's `zero_grad`."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                with torch.no_grad():
                    p.grad.zero_()


HOOKS.optimizer_methods |= {"step": step, "zero_grad": zero_grad}


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to trace in place of another, with a fresh code object, because Dynamo keys its cache by code object.

    An optimizer's `step` is inside wrappers, so it is called by name. Results are detached if a backward inside the function
    has freed their graph.
    """
    install_patches("tracing")
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    of_optimizer = isinstance(owner, Optimizer) and name in ("step", "zero_grad")

    def call(*args: Any, **kwargs: Any) -> Any:
        inner = getattr(owner, name) if of_optimizer else function
        result = inner(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result) if has_traced_backward() else result

    return types.FunctionType(call.__code__.replace(), call.__globals__, name, None, call.__closure__)


def whole_steps(kind: str) -> Callable[[Any], Any]:
    """Mark what `torch.compile` is given as its backend: in functions that it traces, which are "captured" or "compiled", steps
    are one program."""

    def mark(backend: Any) -> Any:
        backend.whole_steps = kind
        return backend

    return mark


# ── gradients of leaves ───────────────────────────────────────────────────────────────────────────────────────────────


def align_leaves(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The graph of a user's function with every leaf that wants a gradient going through `shardwise::aligned` first.

    The gradient is then reduced to the leaf's layout inside the traced backward, where it can be bucketed and overlap; eager
    mode leaves that to a hook of the leaf, one collective after the other.
    """
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
