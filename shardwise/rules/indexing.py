"""Indexing by tensors and masks: `x[i, :, j]` and `x[i, :, j] = y`. Each call has a sentence of its own: its dims come from
the indices.

Letters: `u` for dims that are not indexed, `s` for those that are, `j` for the dims of the indices, broadcast together. All may
be sharded; an `s` that is sharded is read as a partial sum, and written to with a spare row for what falls to other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import NotTraced, tracing_context
from ..errors import OperatorError
from ..layouts.layout import Dim, Factor, Layout, sharded, whole
from ..layouts.mesh import Mesh
from ..propagation.notation import Call, Kernel, Pattern, Proposal, Rule
from ..propagation.table import rule
from ..tensor.toolbox import Toolbox
from .shard_position import ShardPosition, at_least_one, keep, padded

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)


def _patterns(call: Call) -> tuple[list[Pattern], list[int]]:
    """The letters of the tensor, of the indices together, of what is read, and the dims that are indexed."""
    indices = call["indices"]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    own = [f"s{dim}" if dim in indexed else f"u{dim}" for dim in range(call["self"].ndim)]
    together = [f"j{i}" for i in range(len(torch.broadcast_shapes(*(indices[dim].shape for dim in indexed))))]
    rest = [letter for letter in own if letter.startswith("u")]
    before = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    out = [*rest[:before], *together, *rest[before:]]
    return [Pattern(tuple(letters), False, None, ()) for letters in (own, together, out)], indexed


def _has_masks(call: Call) -> bool:
    return any(index is not None and index.dtype in MASKS for index in call["indices"])


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _ShardedDims:
    """The indexed dims that are sharded, and the numbers that kernels need of them."""

    def __init__(self, layout: Layout, indexed: Sequence[int]) -> None:
        self.shards = {dim: ShardPosition(layout, dim) for dim in indexed if layout.axes_of(dim)}
        self.numbers = [number for shard in self.shards.values() for number in shard.numbers]

    def local(self, x: Tensor, indices: Sequence[Any], numbers: Sequence[Tensor], spare: bool) -> tuple[list[Any], Any]:
        """The indices as positions on this rank, and which elements are all on it (None: all)."""
        positions, mine, rest = list(indices), None, iter(numbers)
        for dim, shard in self.shards.items():
            index = torch.where(indices[dim] < 0, indices[dim] + shard.size, indices[dim])
            own = list(islice(rest, len(shard.numbers)))
            positions[dim], here = shard.local(index, own, elsewhere=x.shape[dim] if spare else 0)
            mine = here if mine is None else mine & here
        return positions, mine

    @contextmanager
    def naming(self, indices: Sequence[Any]) -> Iterator[None]:
        """Puts into an operator's error the index that is none of a sharded dim."""
        with ExitStack() as stack:
            for dim, shard in self.shards.items():
                stack.enter_context(shard.naming(indices[dim], -shard.size))
            yield


def _read(indexed: Sequence[int], behind: int, call: Call, wants: Sequence[Layout]) -> Any:
    """Read what this rank holds; the rest is zero. `behind`: how many dims of the result come after those of the indices."""
    sharding, op = _ShardedDims(wants[0], indexed), call.op
    if not sharding.shards:
        return None

    def kernel(x: Tensor, indices: Sequence[Any], *numbers: Tensor) -> Tensor:
        positions, mine = sharding.local(x, indices, numbers, spare=False)
        for dim in sharding.shards:
            x = at_least_one(x, dim)
        with sharding.naming(indices):
            values = op(x, positions)
        return keep(values, mine[(..., *[None] * behind)])

    return kernel, *sharding.numbers


def _write(indexed: Sequence[int], call: Call, wants: Sequence[Layout]) -> Any:
    """Write what this rank holds, and the rest to a spare row."""
    sharding, op, in_place = _ShardedDims(wants[0], indexed), call.op, call.written is not None
    if not sharding.shards:
        return None

    def kernel(x: Tensor, indices: Sequence[Any], values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        count = len(args) - len(sharding.numbers)
        positions, _ = sharding.local(x, indices, args[count:], spare=True)
        out = x
        for dim in sharding.shards:
            out = padded(out, dim)
        with sharding.naming(indices):
            out = op(out, positions, values, *args[:count], **kwargs)
        for dim in sharding.shards:
            out = out.narrow(dim, 0, x.shape[dim])
        return x.copy_(out) if in_place else out.contiguous()

    return kernel, *sharding.numbers


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _index(call: Call) -> Rule | Proposal:
    if _has_masks(call):
        return Proposal((), (), program=_by_mask)
    (own, together, out), indexed = _patterns(call)
    behind = len(out.before) - out.before.index(together.before[-1]) - 1 if together.before else 0
    kernel = partial(_read, indexed, behind)
    return Rule((own, *[together] * len(indexed)), (out,), linear=((0,),), passes="all", kernel=kernel)


def _index_put(call: Call) -> Rule | Proposal:
    if _has_masks(call):
        return Proposal((), (), program=_put_by_mask)
    (own, together, out), indexed = _patterns(call)
    inputs = (own, *[together] * len(indexed), out)
    row = Rule(inputs, (own,), linear=((0, len(inputs) - 1),), kernel=partial(_write, indexed))
    return row if call["accumulate"] else replace(row, whole=frozenset(together.before), lost=None)


# ── masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Where only the first of a mask's dims is sharded, what it selects is sharded too, into as many elements as each rank finds:
# the ranks tell each other how many these are, and no data moves.


def _selected(tools: Toolbox, mesh: Mesh, mask: Any, *tensors: Any) -> tuple[Factor, list[Any]]:
    """What the ranks select, one after the other; and the mask and the tensors, whose first dims are those of the mask, sharded
    alike along the first of these and along no other."""
    if tracing_context() is not None:
        raise NotTraced(
            f"{tools.operator} in a compiled function: how many elements it selects depends on data; call it outside of "
            "compiled functions, or keep the shape with torch.where or masked_fill"
        )
    several, ndim = [_on(tools, mesh, x) for x in (mask, *tensors)], mask.ndim
    wants = [tools.layout(x).reduced() for x in several]
    axes = [[axis for dim in range(ndim) for axis in layout.axes_of(dim)] for layout in wants]
    lead = max(range(len(axes)), key=lambda i: (len(axes[i]), i))
    first: Dim = wants[lead].dims[0] if ndim else (whole(1),)
    if len(first) > 1 or set(first[0].axes) != set(axes[lead]):
        first = (sharded(mask.shape[0], axes[lead], mesh),)
    if ndim:
        front = [first, *((whole(n),) for n in mask.shape[1:])]
        wants = [layout.replace(dims=[*front, *layout.without(axes[lead]).dims[ndim:]]) for layout in wants]
    several = [tools.move(x, want) for x, want in zip(several, wants, strict=True)]
    count = tools.each(lambda x: x.count_nonzero().view(1), mesh, several[0])
    shards, by = len(first[0].sizes), first[0].axes
    line = Layout.of(mesh, [(Factor(shards, by, (1,) * shards),)], (), torch.int64)
    sizes = tools.plain(tools.wrap(count, line), tools.operator).tolist()
    return Factor(sum(sizes), by, tuple(sizes)), several


def _on(tools: Toolbox, mesh: Mesh, x: Any) -> Any:
    return x if tools.is_distributed(x) and tools.layout(x).mesh is mesh else tools.replicated(x, mesh, tools.operator)


def _on_all(tools: Toolbox, op: Any, mesh: Mesh, *tensors: Any) -> Any:
    """The operator on whole tensors: in a traced program, which has no numbers that depend on data."""
    several = [tools.replicated(x, mesh, tools.operator) for x in tensors]
    return tools.wrap(tools.each(op, mesh, *several), tools.layout(several[0]).replace(stride=None))


def _nonzero(tools: Toolbox, op: Any, x: Any) -> Any:
    mesh = tools.mesh(x)
    elements, (x,) = _selected(tools, mesh, x)
    start = tools.offset(tools.layout(x), 0) if elements.axes else None
    local = tools.each(_numbered, mesh, x, start)
    return tools.wrap(local, Layout.of(mesh, [(elements,), (whole(x.ndim),)], (), torch.int64))


def _numbered(x: Tensor, start: Tensor | None) -> Tensor:
    index = torch.nonzero(x).contiguous()
    if start is not None:
        index[:, 0] += start
    return index


def _masked_select(tools: Toolbox, op: Any, x: Any, mask: Any) -> Any:
    if mask.dtype is not torch.bool:
        raise OperatorError(f"masked_select takes a mask of torch.bool, got {mask.dtype}; compare it first, as in mask != 0")
    shape = torch.broadcast_shapes(x.shape, mask.shape) or (1,)
    return _select(tools, aten.index.Tensor, x.expand(shape), [mask.expand(shape)])


def _select(tools: Toolbox, op: Any, x: Any, indices: Sequence[Any]) -> Any:
    mesh = tools.mesh(x, *indices)
    elements, (mask, x) = _selected(tools, mesh, indices[0], x)
    local = tools.each(lambda x, mask: op(x, [mask]), mesh, x, mask)
    return tools.wrap(local, Layout.of(mesh, [(elements,), *tools.layout(x).dims[mask.ndim :]], (), x.dtype))


def _masked_scatter(tools: Toolbox, op: Any, x: Any, mask: Any, source: Any) -> Any:
    shape, mesh = torch.broadcast_shapes(x.shape, mask.shape), tools.mesh(x, mask, source)
    mask, x = mask.expand(shape), x.expand(shape)
    if tracing_context() is not None:
        return _on_all(tools, op, mesh, x, mask, source)
    elements, (mask, x) = _selected(tools, mesh, mask, x)
    if source.numel() < elements.size:
        raise RuntimeError(f"masked_scatter: the mask selects {elements.size} elements, but source has only {source.numel()}")
    line = _on(tools, mesh, source.reshape(-1)[: elements.size])
    line = tools.move(line, tools.layout(line).replace(dims=[(elements,)], partials=()), tools.operator)
    return tools.wrap(tools.each(op, mesh, x, mask, line), tools.layout(x).replace(stride=None))


def _masked_scatter_backward(tools: Toolbox, op: Any, grad: Any, mask: Any, sizes: list[int]) -> Any:
    values = aten.masked_select(grad, mask)
    return aten.cat([values, values.new_zeros(math.prod(sizes) - values.shape[0])]).reshape(sizes)


rule("nonzero", program=_nonzero)
rule("masked_select", program=_masked_select)
rule("masked_scatter", program=_masked_scatter)
rule("masked_scatter_backward", program=_masked_scatter_backward)


# ── masks among indices ───────────────────────────────────────────────────────────────────────────────────────────────


def _numbers(x: Any, indices: Sequence[Any]) -> list[Any]:
    """The indices with masks replaced by the numbers of their true elements."""
    numbers: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in MASKS:
            masked = x.shape[len(numbers) : len(numbers) + index.ndim]
            if index.shape != masked:
                raise IndexError(f"a mask of shape {list(index.shape)} does not fit dims {list(masked)} of {list(x.shape)}")
            numbers += aten.nonzero(index).unbind(1)
        else:
            numbers.append(index)
    return numbers


def _leads(x: Any, indices: Sequence[Any]) -> bool:
    """Whether the first index is a mask, and the only one, and fits."""
    mask = indices[0]
    return mask is not None and not any(i is not None for i in indices[1:]) and mask.shape == x.shape[: mask.ndim]


def _by_mask(tools: Toolbox, op: Any, x: Any, indices: Sequence[Any]) -> Any:
    return _select(tools, op, x, indices) if _leads(x, indices) else op(x, _numbers(x, indices))


def _put_by_mask(
    tools: Toolbox, op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *unsafe: bool
) -> Any:
    """One value for all elements of one mask is a `masked_fill`, which needs no number of elements."""
    if not _leads(x, indices):
        return op(x, _numbers(x, indices), values, accumulate, *unsafe)
    mask, in_place = indices[0], op._schema.is_mutable
    if values.numel() == 1 and not accumulate:
        mask = mask.to(torch.bool)[(..., *[None] * (x.ndim - mask.ndim))]
        return (aten.masked_fill_ if in_place else aten.masked_fill)(x, mask, values.reshape(()).to(x.dtype))
    out = _put_found(tools, x, mask, values, lambda x, mask, values: aten.index_put(x, [mask], values, accumulate))
    return x.copy_(out) if in_place else out


def _put_found(tools: Toolbox, x: Any, mask: Any, values: Any, put: Kernel) -> Any:
    mesh = tools.mesh(x, mask, values)
    if tracing_context() is not None:
        return _on_all(tools, put, mesh, x, mask, values)
    elements, (mask, x) = _selected(tools, mesh, mask, x)
    layout = tools.layout(x)
    values = _on(tools, mesh, values.expand(elements.size, *x.shape[mask.ndim :]))
    goal = tools.layout(values).replace(dims=[(elements,), *layout.dims[mask.ndim :]], partials=())
    local = tools.each(put, mesh, x, mask, tools.move(values, goal, tools.operator))
    return tools.wrap(local, layout.replace(stride=None))


_MASKS = "sum max min product shard: of masks, of which nobody knows how much they select until it is counted"
rule("index.Tensor _unsafe_index.Tensor", function=_index, unoffered=_MASKS)
rule("index_put _unsafe_index_put _index_put_impl", function=_index_put, unoffered=_MASKS)
