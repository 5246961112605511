"""Views: operators that rearrange dims without touching values. Data moves only where no layout describes the result.

Everything partial passes. `call` runs on the local tensors as they are, so the result is a view of the local storage and writes
go through; where a dim has to be made whole first, the result is no view any more (dispatch marks it as a copy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import OperatorError
from ..layouts.layout import Dim, Factor, Layout, PerRank, canonical, sharded, whole
from ..layouts.mesh import Mesh
from ..propagation.notation import Call, Kernel, LocalCopy, Proposal
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import by_shard, indices

aten = torch.ops.aten


def local_sizes(layout: Layout) -> list[int] | PerRank:
    """The local shape: one for all ranks where the layout is even."""
    return list(layout.local_shape(0)) if layout.even else PerRank(lambda place: list(layout.local_shape(place)))


# ── view ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Misfit(Exception):
    """The axes that keep a shape from being split as asked."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        super().__init__(f"axes {axes} shard across the new dims")
        self.axes = axes


def _view(call: Call) -> Proposal:
    layout = call.tensors[0]
    shape = call.results[0].shape
    while True:
        try:
            out = call.result(0, reshape(layout, shape), layout.partials)
        except Misfit as misfit:
            layout = layout.without(misfit.axes)
        else:
            return Proposal((layout,), (out,), {"size": local_sizes(out)}, call=partial(_view_or_tell, torch.Tensor.view))


def _view_or_tell(view: Kernel, x: Tensor, *args: Any) -> Tensor:
    """A view; raises LocalCopy where the local memory is laid out otherwise than the global one would be."""
    try:
        return view(x, *args[:1])
    except (RuntimeError, ValueError):  # the second from fake tensors
        raise LocalCopy("a local tensor cannot be viewed", view(x.contiguous(), *args[:1])) from None


def _view_or_copy(x: Tensor, *args: Any) -> Tensor:
    try:
        return _view_or_tell(torch.Tensor.view, x, args[-1])
    except LocalCopy as copy:
        return copy.args[1]


def reshape(layout: Layout, shape: Sequence[int]) -> list[Dim]:
    """The dims of a reshaped layout; raises Misfit where some axes have to be gathered first."""
    if math.prod(shape) == 0:
        if layout.states and any(isinstance(state, int) for state in layout.states.values()):
            raise Misfit(tuple(axis for axis, state in layout.states.items() if isinstance(state, int)))
        return [(whole(n),) for n in shape]
    dims: list[Dim] = []
    loose: list[Factor] = []
    for ins, outs in _groups(layout.shape, shape):
        loose += canonical(factor for i in ins for factor in layout.dims[i])
        if outs:
            dims += _split(canonical(loose), [shape[j] for j in outs], layout.mesh)
            loose = []
    axes = tuple(axis for factor in loose for axis in factor.axes)
    if axes and not dims:
        raise Misfit(axes)
    if axes:
        dims[-1] = canonical([*loose, *dims[-1]])
    return dims


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """The smallest runs of dims on both sides that hold the same number of elements.

    >>> _groups((2, 3, 4), (6, 2, 2))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        first, start = i, j
        left = right = 1
        while i == first or j == start or left != right:
            if i < len(before) and (left <= right or j >= len(after)):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                break
        groups.append((range(first, i), range(start, j)))
    return groups


def _split(factors: Sequence[Factor], sizes: Sequence[int], mesh: Mesh) -> list[Dim]:
    """The factors of a group dealt out to dims of the given sizes, major first; raises Misfit."""
    queue, dims = list(factors), []
    for size in sizes:
        got: list[Factor] = []
        while size > 1 or (queue and queue[0].size == 1):
            factor = queue.pop(0)
            if size % factor.size:
                parts = _divide(factor, size, mesh)
                if parts is None:
                    raise Misfit(next(f.axes for f in (factor, *queue) if f.axes))
                factor = parts[0]
                queue.insert(0, parts[1])
            got.append(factor)
            size //= factor.size
        dims.append(canonical(got))
    return dims


def _divide(factor: Factor, size: int, mesh: Mesh) -> tuple[Factor, Factor] | None:
    """A factor as a product of one of `size` (major) and the rest, if it is one."""
    minor = factor.size // size
    if factor.size % size:
        return None
    if not factor.axes:
        return whole(size), whole(minor)
    if all(n % minor == 0 for n in factor.sizes):
        return Factor(size, factor.axes, tuple(n // minor for n in factor.sizes)), whole(minor)
    for count in range(1, len(factor.axes)):
        step = math.prod(mesh.axis_sizes[axis] for axis in factor.axes[count:])
        rows = [factor.sizes[i : i + step] for i in range(0, len(factor.sizes), step)]
        full = {row for row in rows if sum(row)}
        if len(full) == 1 and sum(row := full.pop()) == minor:  # the first axes shard rows, the others every row alike
            major = tuple(int(sum(r) > 0) for r in rows)
            return Factor(size, factor.axes[:count], major), Factor(minor, factor.axes[count:], row)
    return None


rule("view.default _unsafe_view _reshape_alias view_copy.default", function=_view)


# ── dims that change places ───────────────────────────────────────────────────────────────────────────────────────────


def _permute(call: Call, order: Sequence[int]) -> Proposal:
    layout = call.tensors[0]
    return Proposal((layout,), (call.result(0, [layout.dims[i] for i in order], layout.partials),))


def _transpose(call: Call) -> Proposal:
    ndim = call.tensors[0].ndim
    order = list(range(ndim))
    if ndim:
        a, b = int(call["dim0"]) % ndim, int(call["dim1"]) % ndim
        order[a], order[b] = order[b], order[a]
    return _permute(call, order)


rule("transpose.int transpose_copy.int", function=_transpose)
rule("t t_copy", function=lambda call: _permute(call, range(call.tensors[0].ndim)[::-1]))
rule("permute permute_copy", function=lambda call: _permute(call, call.dims("dims") if call["dims"] else ()))


def _unsqueeze(call: Call) -> Proposal:
    layout = call.tensors[0]
    (at,) = call.dims("dim", layout.ndim + 1)
    return Proposal((layout,), (call.result(0, [*layout.dims[:at], (whole(1),), *layout.dims[at:]], layout.partials),))


rule("unsqueeze unsqueeze_copy", function=_unsqueeze)


def _squeeze(call: Call, dims: Sequence[int]) -> Proposal:
    layout = call.tensors[0]
    gone = sorted(d for d in dims if layout.shape[d] == 1) if layout.ndim else []
    kept = {i: layout.dims[i] for i in range(layout.ndim) if i not in gone}
    if not kept:  # nothing is left to say where the one element lies
        layout = layout.without(axis for d in gone for axis in layout.axes_of(d))
    is_whole = not any(layout.axes_of(d) for d in gone)
    for d in () if is_whole else gone:
        _attach(kept, d, layout.dims[d])
    out = call.result(0, list(kept.values()), layout.partials)
    if is_whole:
        return Proposal((layout,), (out,), call=lambda x, *_: aten.squeeze.dims(x, gone))
    return Proposal((layout,), (out,), extra=(local_sizes(out),), kernel=_view_or_copy)


def _attach(dims: dict[int, Dim], gone: int, factors: Dim) -> None:
    """Give the sharding of a dim of size 1 that goes away to the next dim (or the one before): who holds it, holds that."""
    at = min((i for i in dims if i > gone), default=max(dims))
    dims[at] = canonical([*factors, *dims[at]])


rule("squeeze.default squeeze_copy.default", function=lambda call: _squeeze(call, range(call.tensors[0].ndim)))
rule(
    "squeeze.dim squeeze.dims squeeze_copy.dim squeeze_copy.dims",
    function=lambda call: _squeeze(call, () if call["dim"] == () else call.dims("dim")),
)


def _expand(call: Call) -> Proposal:
    layout = call.tensors[0]
    shape = call.results[0].shape
    new = len(shape) - layout.ndim
    grown = [d for d in range(layout.ndim) if layout.shape[d] != shape[new + d]]
    layout = layout.without(axis for d in grown for axis in layout.axes_of(d))
    dims: list[Dim] = [(whole(n),) for n in shape[:new]]
    dims += [(whole(shape[new + d]),) if d in grown else layout.dims[d] for d in range(layout.ndim)]
    out = call.result(0, dims, layout.partials)
    return Proposal((layout,), (out,), {"size": local_sizes(out)})


rule("expand expand_copy", function=_expand)


# ── parts of a dim ────────────────────────────────────────────────────────────────────────────────────────────────────


def _slice(call: Call) -> Proposal:
    layout, (dim,) = call.tensors[0], call.dims("dim")
    start, stop, step = indices(call["start"], call["end"], call["step"], layout.shape[dim])
    if (start, step) == (0, 1) and stop >= layout.shape[dim]:
        return Proposal((layout,), (call.result(0, layout.dims, layout.partials),))
    if len(layout.dims[dim]) > 1:
        layout = layout.without(layout.axes_of(dim))
    factor = layout.dims[dim][0]
    size = call.results[0].shape[dim]
    dims = list(layout.dims)
    if not factor.axes:
        dims[dim] = (whole(size),)
        return Proposal((layout,), (call.result(0, dims, layout.partials),))
    spans = [_span(first, n, start, stop, step) for first, n in zip(factor.starts, factor.sizes, strict=False)]
    dims[dim] = (Factor(size, factor.axes, tuple(len(range(a, b, step)) for a, b in spans)),)
    ends = {"start": by_shard(layout, factor, [a for a, _ in spans]), "end": by_shard(layout, factor, [b for _, b in spans])}
    return Proposal((layout,), (call.result(0, dims, layout.partials),), ends)


def _span(first: int, size: int, start: int, stop: int, step: int) -> tuple[int, int]:
    """The part of a global slice that falls on a shard, in the shard's own indices."""
    low = max(start, first)
    low += (start - low) % step
    high = min(stop, first + size)
    return (low - first, high - first) if low < high else (0, 0)


rule("slice.Tensor slice_copy.Tensor", function=_slice)


def _select(call: Call) -> Proposal:
    layout, (dim,) = call.tensors[0], call.dims("dim")
    if len(layout.dims[dim]) > 1 or layout.ndim == 1:
        layout = layout.without(layout.axes_of(dim))
    factor = layout.dims[dim][0]
    kept = {i: d for i, d in enumerate(layout.dims) if i != dim}
    if not factor.axes:
        return Proposal((layout,), (call.result(0, list(kept.values()), layout.partials),))
    index = int(call["index"]) % layout.shape[dim]
    owner = next(k for k, stop in enumerate(factor.starts[1:]) if index < stop)
    _attach(kept, dim, (Factor(1, factor.axes, tuple(int(k == owner) for k in range(len(factor.sizes)))),))
    out = call.result(0, list(kept.values()), layout.partials)
    mine = PerRank(lambda place: index - factor.starts[owner] if layout.shard(factor, place) == owner else None)

    def select(x: Tensor, dim: int, index: int, mine: int | None, size: list[int]) -> Tensor:
        return x.new_empty(size) if mine is None else x.select(dim, mine)

    return Proposal((layout,), (out,), extra=(mine, local_sizes(out)), kernel=select)


rule("select.int select_copy.int", function=_select)


def _on_diagonal(call: Call) -> tuple[Layout, list[Dim], dict[str, Any]]:
    """A layout, the dims of the diagonal between two of its dims, and where it starts on each rank. A rank that holds some rows
    and columns holds what lies in both, which is one interval, and the intervals come in the order of rows, then columns."""
    layout, offset = call.tensors[0], int(call["offset"])
    pair = [int(call[name]) % layout.ndim for name in ("dim1", "dim2")]
    layout = layout.without(axis for d in pair if len(layout.dims[d]) > 1 for axis in layout.axes_of(d))
    rows, columns = (layout.dims[d][0] for d in pair)
    down, right = max(0, -offset), max(0, offset)
    size = max(0, min(rows.size - down, columns.size - right))
    ends = [overlaps(rows, down, size).starts, overlaps(columns, right, size).starts]
    sizes = [max(0, min(b, d) - max(a, c)) for a, b in pairwise(ends[0]) for c, d in pairwise(ends[1])]
    kept = [d for i, d in enumerate(layout.dims) if i not in pair]
    axes = rows.axes + columns.axes
    if not axes:
        return layout, [*kept, (whole(size),)], {}
    start = PerRank(lambda place: offset + layout.interval(rows, place)[0] - layout.interval(columns, place)[0])
    return layout, [*kept, (Factor(size, axes, tuple(sizes)),)], {"offset": start}


def _diagonal(call: Call) -> Proposal:
    layout, dims, here = _on_diagonal(call)
    if len(call.tensors) == 1:
        return Proposal((layout,), (call.result(0, dims, layout.partials),), here)
    source = call.tensors[1].replace(dims=dims, partials=())
    return Proposal((layout.reduced(), source), (call.result(0, layout.dims),), here)


rule("diagonal diagonal_copy diagonal_scatter", function=_diagonal)


def _windows(call: Call) -> Proposal:
    """A dim becomes one of windows and one of positions in them."""
    layout, shape = call.tensors[0], call.results[0].shape
    if not layout.ndim:
        return Proposal((layout,), (call.result(0, [(whole(shape[0]),)], layout.partials),))
    dim = int(call["dimension"]) % layout.ndim
    layout = layout.without(layout.axes_of(dim))
    dims = [(whole(shape[dim]),) if i == dim else own for i, own in enumerate(layout.dims)]
    return Proposal((layout,), (call.result(0, [*dims, (whole(shape[-1]),)], layout.partials),))


rule("unfold unfold_copy", function=_windows)
rule("flip", "...[dims] -> ...[dims]", whole="[]", passes="all")

# ── complex numbers as pairs ──────────────────────────────────────────────────────────────────────────────────────────


def _summed(layout: Layout) -> Layout:
    """With nothing partial but sums: numbers are multiplied and compared otherwise than their parts."""
    return layout.replace(partials=[(axis, kind) for axis, kind in layout.partials if kind in ("sum", "avg")])


def _as_pairs(call: Call) -> Proposal:
    layout = _summed(call.tensors[0])
    return Proposal((layout,), (call.result(0, [*layout.dims, (whole(2),)], layout.partials),))


def _of_pairs(call: Call) -> Proposal:
    layout = _summed(call.tensors[0])
    layout = layout.without(layout.axes_of(-1))
    out = call.result(0, layout.dims[:-1], layout.partials)
    return Proposal((layout,), (out,), call=partial(_view_or_tell, torch.view_as_complex))


rule("view_as_real view_as_real_copy", function=_as_pairs)
rule("view_as_complex view_as_complex_copy", function=_of_pairs)

# ── several results, several arguments ────────────────────────────────────────────────────────────────────────────────


def _parts(call: Call) -> Proposal:
    """split, which leaves a dim of each part, and unbind, which does not."""
    layout, (dim,) = call.tensors[0], call.dims("dim")
    if layout.axes_of(dim):
        return Proposal((layout,), (), program=_slices)
    left = [[(whole(n),) for n in one.shape[dim : dim + len(one.shape) + 1 - layout.ndim]] for one in call.results]
    outs = [call.result(i, [*layout.dims[:dim], *own, *layout.dims[dim + 1 :]], layout.partials) for i, own in enumerate(left)]
    return Proposal((layout,), tuple(outs))


def _slices(tools: Toolbox, op: Any, x: Tensor, sizes: Any = None, dim: int = 0) -> list[Tensor]:
    """split and unbind along a sharded dim, as slices and selections, which are views still."""
    if "unbind" in str(op):
        dim = sizes or 0
        return [aten.select.int(x, dim, i) for i in range(x.shape[dim])]
    total = x.shape[dim]
    if not isinstance(sizes, list | tuple):  # a symbolic size is specialised
        sizes = [min(int(sizes), total - i) for i in range(0, total, int(sizes))] if total else [0]
    stops = list(accumulate(sizes))
    return [aten.slice.Tensor(x, dim, stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]


rule("split.Tensor split_with_sizes unbind.int", function=_parts)


def _cat(call: Call) -> Proposal:
    """Every tensor is sharded where the result's chunks fall on it, so that the local shards join to the result's chunk."""
    ndim = len(call.results[0].shape)
    dim = int(call["dim"]) % max(ndim, 1)
    real = [t for t in call.tensors if t.ndim == ndim]
    lead = max(real, key=lambda t: math.prod(t.shape) * t.dtype.itemsize)
    axes = lead.axes_of(dim) if len(lead.dims[dim]) == 1 else ()
    lead = lead.without(axis for axis in lead.axes_of(dim) if axis not in axes)
    partials = [item for item in lead.partials if all(item in t.partials for t in real)]
    total = call.results[0].shape[dim]
    joined = sharded(total, axes, lead.mesh) if axes else whole(total)
    wants, offset = [], 0
    for t in call.tensors:
        if t.ndim != ndim:
            wants.append(t.replicated())
            continue
        part = overlaps(joined, offset, t.shape[dim])
        offset += t.shape[dim]
        dims = [(part,) if i == dim else d for i, d in enumerate(lead.dims)]
        wants.append(t.replace(dims=dims, partials=partials))
    dims = [(joined,) if i == dim else d for i, d in enumerate(lead.dims)]
    return Proposal(tuple(wants), (call.result(0, dims, partials),))


def overlaps(factor: Factor, offset: int, size: int) -> Factor:
    """The part of a factor from `offset`, `size` long, sharded where the factor is."""
    ends = [(first, first + n) for first, n in zip(factor.starts, factor.sizes, strict=False)]
    sizes = tuple(max(0, min(stop, offset + size) - max(start, offset)) for start, stop in ends)
    return Factor(size, factor.axes, sizes)


rule("cat", function=_cat)


rule(
    "stack", program=lambda tools, op, tensors, dim=0: aten.cat.default([aten.unsqueeze.default(t, dim) for t in tensors], dim)
)


def _roll(tools: Toolbox, op: Any, x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Along a sharded dim, two slices that change places: only what leaves its rank moves."""
    if not dims:
        return op(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        at = -shift % x.shape[dim]
        if at and tools.layout(x).axes_of(dim):
            x = aten.cat.default([aten.slice.Tensor(x, dim, at), aten.slice.Tensor(x, dim, 0, at)], dim)
        else:
            x = op(x, [shift], [dim]) if at else x.clone()
    return x


rule("roll", "...[dims] -> ...[dims]", whole="[]", passes="all", program=_roll)


def _resize_as(tools: Toolbox, op: Any, x: Any, template: Any, memory_format: Any = None) -> Any:
    """Either may be a plain tensor."""
    return x.resize_(template.shape, memory_format=memory_format or torch.contiguous_format)


rule("resize_as_", program=_resize_as)


def _set(tools: Toolbox, op: Any, x: Any, source: Any = None, *rest: Any) -> Any:
    if rest or not tools.is_distributed(x) or not tools.is_distributed(source):
        raise OperatorError(
            f"{op._schema.name} would make a tensor share memory with another one, and a DTensor has none of its own: "
            "give it another DTensor, or write to to_local()"
        )
    tools.become(x, source)
    return x


rule("set_", program=_set)
