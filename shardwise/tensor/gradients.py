"""`deferred_gradients`: several backwards whose gradients are reduced once, after the last of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from .._torch.compiler import untraced
from ..layouts.layout import Layout
from .dtensor import DTensor, align_grad


@contextlib.contextmanager
def deferred_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """In the block, gradients of these DTensors add up in the layouts in which they come, so that sums stay partial; at its end
    each is reduced to the layout of its leaf, and added to the gradient from before.

    A gradient that would take more memory than its leaf while it is partial is reduced at once.

    >>> import torch, shardwise as sw
    >>> w = sw.ones(2, mesh=sw.init_mesh(dp=2), placements=[sw.Replicate()]).requires_grad_()
    >>> x = sw.ones(4, 2, mesh=w.mesh, placements=[sw.Shard(0)])
    >>> with deferred_gradients([w]):
    ...     (x * w).sum().backward()
    ...     (x * w).sum().backward()
    >>> w.grad.tolist()
    [8.0, 8.0]
    """
    several: list[Any] = [x for x in leaves if x.requires_grad]
    before, hooks = [x.grad for x in several], []
    for x in several:
        x._aligned.remove()
        hooks.append(x.register_hook(partial(_unless_larger, layout=x.layout.reduced())))
        x.grad = None
    try:
        yield
    except BaseException:  # other ranks may stand elsewhere: nothing is communicated
        for x, old in zip(several, before, strict=True):
            x.grad = old
        raise
    finally:
        for x, hook in zip(several, hooks, strict=True):
            hook.remove()
            del x._aligned
            x._align()
    for x, old in zip(several, before, strict=True):
        new = None if x.grad is None else align_grad(x.grad, x.layout.reduced())
        x.grad = new if old is None else old if new is None else old + new


@untraced
def _unless_larger(grad: Any, layout: Layout) -> Any:
    return grad if isinstance(grad, DTensor) and grad.layout.nbytes <= layout.nbytes else align_grad(grad, layout)
