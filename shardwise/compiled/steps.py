"""Whole training steps as one program: what is traced in place of an optimizer's own methods.

Torch's `Optimizer.step` breaks the graph on purpose and its `zero_grad` refuses to be traced, since for torch.compile a
backward lies between two graphs. A captured or compiled step has its backward inside, and needs neither.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .._torch import optimizer_hooks, trace_whole_steps
from .align import fresh


def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """An optimizer's step with its hooks, as `Optimizer.step` does it."""
    before, after = optimizer_hooks(optimizer)
    for hook in itertools.chain(*before):
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        result = inspect.unwrap(type(optimizer).step)(optimizer, *args, **kwargs)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler of learning rates looks for
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
                p.grad.detach_().zero_()


def traceable(function: Any) -> Any:
    """The function that is traced in place of another: for an optimizer's `step`, which lies in wrappers, one that calls it."""
    owner = getattr(function, "__self__", None)
    trace_whole_steps({"step": step, "zero_grad": zero_grad})
    if not isinstance(owner, Optimizer) or getattr(function, "__name__", "") not in ("step", "zero_grad"):
        return function
    name = function.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    return fresh(call)


def whole_steps(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Mark what `torch.compile` is given as its backend: in functions that it compiles, steps are traced whole."""
    backend.whole_steps = True  # type: ignore[attr-defined]
    return backend
