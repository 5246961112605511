"""Whole training steps as one program: replacements for optimizer methods that torch does not trace.

torch's `Optimizer.step` breaks the graph on purpose and its `zero_grad` refuses to be traced, because under torch.compile a
backward lies between two graphs. A captured or compiled step has its backward inside, and needs neither.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .._torch.compiler import has_traced_backward, optimizer_hooks
from .._torch.patches import install_patches
from .._torch.replacements import HOOKS
from .._torch.tensors import tree_map_only


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
