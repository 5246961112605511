"""`each_rank`: a function of local tensors, called on every rank, with gradients; ranks are processes or simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import Function
from ..base.argument_checks import a_function, refuse
from ..comm import Bundle


def each_rank(function: Callable[..., Any], *args: Any) -> Any:
    """What a function makes, on every rank, of what that rank holds: a tensor, or a tuple of tensors.

    On processes it is `function(*args)`. In a simulated world it is called once for each place, with the shards of every
    `Bundle`, which may be of any shapes. All tensors that need gradients have to be arguments.

    >>> x = Bundle([torch.ones(2), torch.ones(3)]).requires_grad_()
    >>> each_rank(lambda x: x.sum() * 2, x).sum().shards
    (tensor(4.), tensor(6.))
    """
    a_function(function, "each_rank: function")
    places = {len(x.shards) for x in args if isinstance(x, Bundle)}
    if not places or torch.compiler.is_compiling():
        return function(*args)
    alone: list[bool] = []

    def run(*given: Any) -> tuple[Tensor, ...]:
        out = function(*given)
        alone[:] = [isinstance(out, Tensor)]
        several = (out,) if alone[0] else out
        if not isinstance(several, tuple | list) or not all(isinstance(x, Tensor) for x in several):
            refuse("each_rank: what the function gives", "a tensor, or a tuple of tensors", out)
        return tuple(several)

    found = _Each.apply(run, min(places), *args)
    return found[0] if alone[0] else found


class _Each(Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], places: int, *args: Any) -> tuple[Tensor, ...]:
        ctx.needed = [isinstance(x, Tensor) and x.requires_grad for x in args]
        ctx.inputs, ctx.results = [], []
        for place in range(places):
            given = [x.shards[place] if isinstance(x, Bundle) else x for x in args]
            leaves = [x.detach().requires_grad_() if need else x for x, need in zip(given, ctx.needed, strict=True)]
            with torch.enable_grad():
                ctx.results.append(run(*leaves))
            ctx.inputs.append([x for x, need in zip(leaves, ctx.needed, strict=True) if need])
        several = [Bundle(out[i].detach() for out in ctx.results) for i in range(len(ctx.results[0]))]
        flows = [any(out[i].requires_grad for out in ctx.results) for i in range(len(several))]
        ctx.mark_non_differentiable(*(x for x, flow in zip(several, flows, strict=True) if not flow))
        ctx.set_materialize_grads(False)
        return tuple(several)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shards = []
        for place, (inputs, results) in enumerate(zip(ctx.inputs, ctx.results, strict=True)):
            flows = [i for i, out in enumerate(results) if out.requires_grad and grads[i] is not None]
            given, outs = [grads[i].shards[place] for i in flows], [results[i] for i in flows]
            found = torch.autograd.grad(outs, inputs, given, allow_unused=True) if flows else [None] * len(inputs)
            shards.append([torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)])
        bundles = iter([Bundle(several) for several in zip(*shards, strict=True)])
        return None, None, *(next(bundles) if need else None for need in ctx.needed)
