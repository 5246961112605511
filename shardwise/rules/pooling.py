"""Pooling: batch and channels may be sharded. Windows that do not overlap are dealt out whole where a spatial dim is sharded,
so that rows at the borders move at most (others: `rules/windows.py`); the indices of a maximum stay those of the whole plane.

A partial maximum does not pass: the operators give indices with the values, and of those only the values would be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..layouts.layout import Dim, Factor, Layout, Number, whole
from ..propagation.notation import Call, Kernel, Pattern, Proposal, labels, parse
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import at_least_one
from .views import local_sizes

Patterns = tuple[tuple[Pattern, ...], tuple[Pattern, ...]]


def some(patterns: Patterns, call: Call, wants: Sequence[Layout]) -> Kernel | None:
    """torch refuses tensors without channels: a rank that has none runs the operator on zeros and drops what they give; over a
    dim that is lost they add nothing."""
    if all(min(factor.sizes) for layout in wants for dim in layout.dims for factor in dim):
        return None
    op, (inputs, outputs) = call.op, patterns
    named = [labels(inputs[call.slots.index(i)], call, layout.ndim) for i, layout in enumerate(wants)]

    def run(*args: Any, **kwargs: Any) -> Any:
        names = iter(named)
        empty: set[str] = set()

        def filled(x: Any) -> Any:
            if isinstance(x, Tensor):
                for dim, label in enumerate(next(names)):
                    if not x.shape[dim]:
                        empty.add(label)
                        x = at_least_one(x, dim)
            return x

        outs = op(*map(filled, args), **{name: filled(x) for name, x in kwargs.items()})
        several = [x for x in outs if x is not None] if isinstance(outs, tuple) else [outs]
        for i, (x, pattern) in enumerate(zip(several, outputs, strict=False)):
            for dim, label in enumerate(labels(pattern, call, x.ndim)):
                several[i] = several[i].narrow(dim, 0, 0) if label in empty else several[i]
        rest = iter(several)
        return tuple(x if x is None else next(rest) for x in outs) if isinstance(outs, tuple) else several[0]

    return run


def spatial(names: str, text: str, **words: Any) -> None:
    """Rows of operators that look at their whole planes, and refuse empty ones."""
    rule(names, text, **{"kernel": partial(some, parse(text)), **words})


# ── windows that do not overlap ───────────────────────────────────────────────────────────────────────────────────────


def _windows(call: Call) -> Proposal | None:
    """Where each window begins after the one before it ends, whole windows are dealt out along sharded dims."""
    layout, plane = call["self"], _plane(call)
    count = len(plane)
    words = (call["kernel_size"], call["stride"] or call["kernel_size"], call["padding"], call.arguments.get("dilation", 1))
    kernel, stride, padding, dilation = (_each(word, count) for word in words)
    apart = [(k - 1) * d < s and not p for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)]
    free = [d for d, alone in zip(plane, apart, strict=True) if alone and len(layout.dims[d]) == 1 and layout.axes_of(d)]
    if not free:
        return None
    layout = layout.without(axis for d in plane if d not in free for axis in layout.axes_of(d))
    backward = "grad_output" in call.arguments
    pooled = call["grad_output"].shape if backward else call.results[0].shape
    rows, windows = list(layout.dims), [*layout.dims[: plane.start], *((whole(pooled[d]),) for d in plane)]
    for d in free:
        (rows[d], windows[d]) = _dealt(layout.dims[d][0], stride[d - plane.start], pooled[d])
    linear = not backward and len(call.results) == 1 and layout.dtype.is_floating_point
    pending = [(axis, kind) for axis, kind in layout.partials if linear and kind in ("sum", "avg")]
    wants = [t.replace(dims=windows, partials=()) for t in call.tensors]
    at = call.tensor_names.index("self")
    wants[at] = call["self"] if backward else layout.replace(dims=rows, partials=pending)
    outs = [Layout.of(layout.mesh, rows if backward else windows, pending, r.dtype, r.stride) for r in call.results]
    numbers = [_start(layout, rows[d]) for d in plane]
    sizes = [layout.shape[d] for d in plane]
    kernel_of = _scattered if backward else _pooled
    return Proposal(tuple(wants), tuple(outs), kernel=kernel_of(call, sizes), extra=(local_sizes(outs[0]), *numbers))


def _plane(call: Call) -> range:
    """The spatial dims, of which the name of an operator tells how many there are."""
    ndim = call["self"].ndim
    return range(ndim - next(count for count in (1, 2, 3) if f"{count}d" in call.name), ndim)


def _blank(x: Any, shape: Sequence[int]) -> Any:
    """A tensor for an operator that wants to know a shape: it holds no data and moves none."""
    return x.new_empty(()).expand(shape)


def by_shape(call: Call) -> Proposal | None:
    """Gradients take the input for its shape alone: unless it lies as they do, one without data stands for it."""
    x, grad = call["self"], call["grad_output"]
    plane = _plane(call)
    alike = x.dims[: plane.start] == grad.dims[: plane.start]
    lies = alike and not x.partials and not any(x.axes_of(d) for d in plane)
    return None if lies or not x.states else Proposal((), (), program=_on_blank)


def _on_blank(tools: Toolbox, op: Any, grad: Any, x: Any, *rest: Any) -> Any:
    return op(grad, _blank(x, x.shape), *rest)


def _windows_back(call: Call) -> Proposal | None:
    return _windows(call) or by_shape(call)


def _each(value: Any, count: int) -> list[int]:
    several = list(value) if isinstance(value, list | tuple) else [value]
    return several * count if len(several) == 1 else several


def _dealt(factor: Factor, stride: int, count: int) -> tuple[Dim, Dim]:
    """A sharded dim with its borders moved to where windows begin, and the `count` windows along it; who has the last window
    has the rest of the rows."""
    ends = [*(min((end + stride // 2) // stride, count) for end in accumulate(factor.sizes[:-1])), count]
    rows = [factor.size if end == count else end * stride for end in ends]
    return tuple(  # type: ignore[return-value]
        (Factor(stops[-1], factor.axes, tuple(b - a for a, b in zip([0, *stops], stops, strict=False))),)
        for stops in (rows, ends)
    )


def _start(layout: Layout, dim: Dim) -> Number:
    return Number(lambda place: sum(dim[0].sizes[: layout.shard(dim[0], place)]))


def _pooled(call: Call, sizes: list[int]) -> Kernel:
    """The operator on a rank's own windows, with indices into the whole plane."""
    op, dtypes, count = call.op, [one.dtype for one in call.results], len(sizes)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        *given, shape = args[:-count]
        if not x.numel():
            outs = tuple(x.new_empty(shape, dtype=dtype) for dtype in dtypes)
            return outs if len(outs) > 1 else outs[0]
        outs = op(x, *given, **kwargs)
        if len(dtypes) == 1:
            return outs
        return outs[0], _renumbered(outs[1], x.shape[-count:], args[-count:], sizes)

    return run


def _scattered(call: Call, sizes: list[int]) -> Kernel:
    """The gradient of a rank's own windows."""
    op, count = call.op, len(sizes)
    at = list(call.arguments).index("indices") if "indices" in call.arguments else None

    def run(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
        *given, shape = args[:-count]
        if not grad.numel():
            return grad.new_empty(shape)
        if at is not None:
            given[at - 2] = _renumbered(given[at - 2], sizes, [-start for start in args[-count:]], shape[-count:])
        return op(grad, _blank(x, shape), *given)

    return run


def _renumbered(index: Tensor, before: Sequence[int], shift: Sequence[Tensor], after: Sequence[int]) -> Tensor:
    """Indices into a plane as indices into another one, in which it lies `shift` further along each dim."""
    out, step = torch.zeros_like(index), 1
    for size, more, new in zip(reversed(before), reversed(shift), reversed(after), strict=True):
        out, index, step = out + (index % size + more) * step, index // size, step * new
    return out


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

#: For one, two and three spatial dims: the letters of a plane, and of what is made from it.
_LETTERS = {"1": ("n c w", "n c q"), "2": ("n c h w", "n c p q"), "3": ("n c d h w", "n c e p q")}


_BY_SHAPE = "sum max min product: the input is read for its shape alone; shard: only planes that are not padded along a dim"


def planes(names: str, text: str, counts: str = "23", **words: Any) -> None:
    """Rows for each number of spatial dims, `#` in the names; in the sentence `x` is the plane, `y` is made from it."""
    for count in counts:
        x, y = _LETTERS[count]
        sentence = text.replace("x", x).replace("y", y)
        words = {"whole": frozenset("dhwepqr"), "lost": None, "unoffered": _BY_SHAPE if "y, x" in text else "", **words}
        spatial(names.replace("#", count), sentence, **words)


def _scatter_back(tools: Toolbox, op: Any, grad: Any, x: Any, *rest: Any) -> Any:
    """torch cannot tell the shape of this one without data."""
    flat = torch.zeros_like(x).flatten(-3).scatter_add(-1, rest[-1].flatten(-3), grad.flatten(-3))
    return flat.view(x.shape)


planes("avg_pool#d", "x -> y", linear=((0,),), rounds=True, function=_windows)
planes("avg_pool#d_backward", "y, x -> x", linear=((0,),), function=_windows_back)
planes("max_pool#d_with_indices", "x -> y, y", function=_windows)
planes("max_pool#d_with_indices_backward", "y, x, y -> x", linear=((0,),), function=_windows_back)
planes("_adaptive_avg_pool#d", "x -> y", linear=((0,),))
planes("_adaptive_avg_pool#d_backward", "y, x -> x", linear=((0,),), function=by_shape)
planes("adaptive_max_pool#d", "x -> y, y")
planes("fractional_max_pool#d", "x, n c r -> y, y", unoffered="shard: the random numbers are sharded alike")
planes("adaptive_max_pool#d_backward", "y, x, y -> x", linear=((0,),), function=by_shape)
spatial(
    "fractional_max_pool2d_backward", "n c p q, n c h w, n c p q -> n c h w", whole="h w p q", linear=((0,),), function=by_shape
)
rule("fractional_max_pool3d_backward", program=_scatter_back)
planes("max_unpool#d", "y, y -> x")  # not linear: of windows that overlap, any one writes
