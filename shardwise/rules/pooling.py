"""Pooling: batch and channels may be sharded, and the plane, whose borders are then sent between ranks (`windows.py`); the
indices of a maximum stay those of the whole plane.

A partial maximum does not pass: the operators give indices with the values, and of those only the values would be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layouts.dtypes import lowest
from ..layouts.layout import Layout, Number
from ..propagation.notation import Call, Kernel, Pattern, Proposal, labels, parse
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import at_least_one
from .windows import LocalWindows, Plane, blank, each_dim, one_at_least, trimmed, windowed

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


def spatial(names: str, text: str, local: LocalWindows | None = None, **words: Any) -> None:
    """Rows of operators that look at their whole planes, and refuse empty ones; or at windows of planes, as `local` does."""
    words = {"kernel": partial(some, parse(text)), **words}
    windowed(names, text, local, **words) if local else rule(names, text, **words)


# ── on stretches of a sharded plane ───────────────────────────────────────────────────────────────────────────────────


def _largest(plane: Plane, run: Kernel, call: Call) -> Kernel:
    count = len(plane.dims)
    gaps = each_dim(call["dilation"], count) if any(one.outside for one in plane.halos) else [0] * count

    def local(values: list[Any], firsts: Sequence[Any], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        largest, index = run(*values)
        stretch = values[0].shape[plane.dims.start :]
        return trimmed(largest, shape), trimmed(_renumbered(index, stretch, firsts, plane.sizes, gaps), shape)

    return local


def _largest_back(plane: Plane, run: Kernel, call: Call) -> Kernel:
    none = [int(any(one.outside for one in plane.halos))] * len(plane.dims)

    def local(values: list[Any], firsts: Sequence[Any], shape: Sequence[int]) -> Tensor:
        grad, blank, *words, index = values
        index = _renumbered(index, plane.sizes, [-first for first in firsts], blank.shape[plane.dims.start :], none)
        return run(one_at_least(grad, plane), blank, *words, one_at_least(index, plane))

    return local


def _first_rows(call: Call, plane: Plane, layout: Layout) -> list[Number | int]:
    return plane.numbers(layout, {one.dim: one.firsts for one in plane.halos})


def _renumbered(
    index: Tensor, before: Sequence[int], shift: Sequence[Any], after: Sequence[int], step: Sequence[int]
) -> Tensor:
    """Indices into one plane as indices into another, in which it lies `shift` further along each dim; a number that is no
    tensor says that both are the same along it. Where a window holds nothing larger than rows outside do, torch names its first
    row inside; `step` is 0 where no window looks outside."""
    if not step[0] and all(isinstance(more, int) for more in shift[1:]):
        return index + shift[0] * math.prod(after[1:])
    rows: list[Tensor] = []
    for size in reversed(before[1:]):
        rows.insert(0, index % size)
        index = index // size
    rows.insert(0, index)
    for d, (more, gap) in enumerate(zip(shift, step, strict=True)):
        if not isinstance(more, int):
            row = rows[d] + more
            rows[d] = torch.where(row < 0, row % gap, row) if gap else row
    out = rows[0]
    for row, size in zip(rows[1:], after[1:], strict=True):
        out = out * size + row
    return out


def _averaged(plane: Plane, run: Kernel, call: Call) -> Kernel:
    divided = partial(_divided, plane, bool(call["count_include_pad"]))
    return lambda values, starts, shape: trimmed(divided(run(*values), starts), shape)


def _averaged_back(plane: Plane, run: Kernel, call: Call) -> Kernel:
    divided = partial(_divided, plane, bool(call["count_include_pad"]))
    return lambda values, starts, shape: run(divided(one_at_least(values[0], plane), starts), *values[1:])


def _is_plain(call: Call, plane: Plane) -> bool:
    """Whether all windows are divided by the same number."""
    inside = call["count_include_pad"] or not any(along.pad for along in plane.windows)
    return bool(call["divisor_override"]) or (inside and not call["ceil_mode"])


def _average_words(call: Call, plane: Plane) -> dict[str, Any]:
    divisor = call["divisor_override"] or (math.prod(plane.kernel) if _is_plain(call, plane) else 1)
    return {"count_include_pad": True, "divisor_override": divisor}


def _first_windows(call: Call, plane: Plane, layout: Layout) -> list[Number | int]:
    return [] if _is_plain(call, plane) else plane.numbers(layout, {d: each.starts for d, each in plane.shared.items()})


def _divided(plane: Plane, padded: bool, out: Tensor, starts: Sequence[Any]) -> Tensor:
    """Windows divided by how many rows of the padded plane, or of the plane alone, each looks at; as they are without `starts`,
    where the operator divides all by the same number."""
    for d, start, along, size in zip(plane.dims, starts, plane.windows, plane.sizes, strict=False):
        first = (torch.arange(out.shape[d], device=out.device) + start) * along.stride - along.pad
        last = (first + along.span).clamp(max=size + along.pad)
        count = (last - first if padded else last.clamp(max=size) - first.clamp(min=0)).clamp(min=1)
        count = count.view([-1 if other == d else 1 for other in range(out.ndim)])
        out = out / count if out.is_floating_point() else torch.div(out, count, rounding_mode="trunc")
    return out


# ── gradients that read a shape ───────────────────────────────────────────────────────────────────────────────────────


def by_shape(call: Call) -> Proposal | None:
    """Gradients take the input for its shape alone: unless it lies as they do, one without data stands for it."""
    x, grad = call["self"], call["grad_output"]
    first = x.ndim - next(count for count in (1, 2, 3) if f"{count}d" in call.name)
    lies = x.dims[:first] == grad.dims[:first] and not x.partials and not any(x.axes_of(d) for d in range(first, x.ndim))
    if lies or not x.states:
        return None
    return Proposal((), (), program=lambda tools, op, grad, x, *rest: op(grad, blank(x, x.shape), *rest))


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


_average = LocalWindows(_averaged, _average_words, numbers=_first_windows)
_average_back = LocalWindows(_averaged_back, _average_words, numbers=_first_windows)
_maximum = LocalWindows(_largest, fill=lowest, numbers=_first_rows)
_maximum_back = LocalWindows(_largest_back, numbers=_first_rows)
_AS_PROGRAM = "shard: along the plane a program takes it, whatever the windows"
planes("avg_pool#d", "x -> y", local=_average, linear=((0,),), rounds=True, unoffered=_AS_PROGRAM)
planes("avg_pool#d_backward", "y, x -> x", local=_average_back, linear=((0,),), function=by_shape)
planes("max_pool#d_with_indices", "x -> y, y", local=_maximum, unoffered=_AS_PROGRAM)
planes("max_pool#d_with_indices_backward", "y, x, y -> x", local=_maximum_back, linear=((0,),), function=by_shape)
planes("_adaptive_avg_pool#d", "x -> y", linear=((0,),))
planes("_adaptive_avg_pool#d_backward", "y, x -> x", linear=((0,),), function=by_shape)
planes("adaptive_max_pool#d", "x -> y, y")
planes("fractional_max_pool#d", "x, n c r -> y, y", unoffered="shard: the random numbers are sharded alike")
planes("adaptive_max_pool#d_backward", "y, x, y -> x", linear=((0,),), function=by_shape)
planes("fractional_max_pool#d_backward", "y, x, y -> x", "2", linear=((0,),), function=by_shape)
rule("fractional_max_pool3d_backward", program=_scatter_back)
planes("max_unpool#d", "y, y -> x")  # not linear: of windows that overlap, any one writes
