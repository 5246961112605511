"""Convolution and pooling where the plane is sharded: a rank computes its share of the windows from its shard and the rows that
other ranks send it. What the rows of `rules/` say of batch and channels holds beside.

The windows along a sharded dim are sharded by the same axes, into sizes that follow. Whether rows are sent, or the sharding is
moved to another dim, or the plane gathered, is decided by what each costs. The plane of a transposed convolution is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import check, transport
from ..layouts.dtypes import lowest
from ..layouts.layout import Factor, Layout, Number, PerRank, SymbolicLayout, sharded, whole
from ..planning.cost import PER_WORK, route
from ..planning.plan import plan
from ..propagation.decide import decide
from ..propagation.notation import Call, Kernel, Proposal, Rule
from ..propagation.table import TABLE
from ..redistribution.run import move
from ..tensor.schema import signature
from ..tensor.toolbox import Toolbox
from ..tensor.wrapping import local_on
from .halo import Halo, Windows, brought, given_back, halo, share
from .shard_position import at_least_one

# ── nouns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Plane(NamedTuple):
    """The spatial dims of a call: the windows along each, the size of each kernel; and, of those that are sharded, how the
    plane is (`held`) and how its windows are (`shared`)."""

    dims: range
    windows: tuple[Windows, ...]
    kernel: tuple[int, ...]
    sizes: tuple[int, ...]
    held: dict[int, Factor]
    shared: dict[int, Factor]

    @property
    def axes(self) -> list[str]:
        """The axes that sharding it."""
        return [axis for factor in self.held.values() for axis in factor.axes]

    @property
    def halos(self) -> tuple[Halo, ...]:
        """What ranks need of one another."""
        each = [(d, self.held[d], self.shared[d].sizes, self.windows[d - self.dims.start]) for d in sorted(self.held)]
        return tuple([halo(*one) for one in each])

    def firsts(self, layout: Layout) -> list[Number]:
        """The first row of each rank's stretch along each dim."""
        halos = {one.dim: one for one in self.halos}
        return [halos[d].first(layout) if d in halos else Number(lambda place: 0) for d in self.dims]

    def unpadded(self) -> list[int]:
        """Padding without that of sharded dims, which stretches have in them."""
        return [0 if d in self.held else along.pad for d, along in zip(self.dims, self.windows, strict=True)]


class Way(NamedTuple):
    """How an operator is run on stretches: which words of the call the local operator gets otherwise, what makes the function
    that each rank runs, from the plane, the local operator and the words; and what rows outside hold."""

    words: Callable[[Call, Plane], dict[str, Any]]
    kernel: Callable[[Plane, Kernel, Call], Kernel]
    fill: Callable[[torch.dtype], Any] | None = None


class Choice(NamedTuple):
    """A call on stretches: the layouts that its tensors want (None: the shape alone is asked for), those of its results, and
    that of the plane."""

    plane: Plane
    words: dict[str, Any]
    wants: dict[str, Layout | None]
    results: tuple[Layout, ...]
    source: Layout
    kernel: Kernel
    fill: Any


#: What a tensor is along the plane.
_ROLES = {"input": "plane", "self": "plane", "grad_output": "windows", "indices": "windows"}

# ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _function(row: Rule, way: Way, call: Call) -> Proposal | Rule | None:
    """What the row itself says, unless sending rows costs less."""
    choice = _choice(row, way, call)
    if choice is None or _seconds(choice, call) >= _seconds_otherwise(row, call):
        return row.function(call) if row.function is not None else None
    return Proposal(call.tensors, (), program=partial(_run, choice))


def _choice(row: Rule, way: Way, call: Call) -> Choice | None:
    """The call on stretches; None where no dim of the plane is sharded, or this way is none for it."""
    mask = call.arguments.get("output_mask")
    several = [call.arguments.get(name) for name in (_source(call), "grad_output")]
    if call.arguments.get("transposed") or (mask and mask[2]) or not any(_cut(t, d) for t in several for d in _dims(call)):
        return None
    if any(isinstance(t, SymbolicLayout) for t in call.tensors):
        raise TypeError("which rows are sent depends on the size of a plane: it has to be settled")
    if not all(all(t.shape) for t in call.tensors):
        return None
    plane = _plane(call)
    inner = _inner(call, plane, way.words(call, plane))
    decision = decide(row, inner)
    if decision.program is not None:
        return None
    moved = {i: want for i, _, want in decision.moves}
    wants = {name: moved.get(i, inner.tensors[i]) for name, i in _slots(call).items()}
    wants = {name: _placed(want, plane, _ROLES.get(name, "")) for name, want in wants.items()}
    source = wants[_source(call)]
    results = tuple(_placed(t, plane, role) for t, role in zip(decision.results, _roles(call), strict=True) if t is not None)
    kernel = way.kernel(plane, decision.kernel or call.op, call)
    asked = {name: want if name != _source(call) or _reads(call) else None for name, want in wants.items()}
    return Choice(plane, inner.arguments, asked, results, source, kernel, way.fill(source.dtype) if way.fill else 0)


def _source(call: Call) -> str:
    return "input" if "input" in call.arguments else "self"


def _slots(call: Call) -> dict[str, int]:
    """Which of its tensors the arguments of a call are."""
    return {name: slot for name, slot in zip(call.tensor_names, call.slots, strict=True) if slot is not None}


def _reads(call: Call) -> bool:
    """Whether the values of the plane are asked for, not its shape alone."""
    return "grad_output" not in call.arguments or ("weight" in call.arguments and bool(call["output_mask"][1]))


def _roles(call: Call) -> list[str]:
    """What each result is along the plane; the gradient of a weight is Partial(sum)."""
    if "grad_output" not in call.arguments:
        return ["windows"] * len(call.results)
    asked = call.arguments.get("output_mask", (True,))
    return [role for role, is_asked in zip(("plane", "pending"), asked, strict=False) if is_asked]


def _placed(layout: Layout, plane: Plane, role: str) -> Layout:
    if role == "pending":
        return layout.replace(partials=[*layout.partials, *((axis, "sum") for axis in plane.axes)])
    cuts = {"plane": plane.held, "windows": plane.shared}.get(role, {})
    return layout.replace(dims=[(cuts[d],) if d in cuts else dim for d, dim in enumerate(layout.dims)])


def _each(value: Any, count: int) -> list[int]:
    several = list(value) if isinstance(value, list | tuple) else [value]
    return several * count if len(several) == 1 else several


def _dims(call: Call) -> range:
    """The spatial dims: all but batch and channels, or as many as the name of an operator tells."""
    ndim = call[_source(call)].ndim
    return range(2 if "weight" in call.arguments else ndim - (2 if "2d" in call.name else 3), ndim)


def _plane(call: Call) -> Plane:
    source, outer, dims = call[_source(call)], call.arguments.get("grad_output"), _dims(call)
    kernel = call["weight"].shape[2:] if "weight" in call.arguments else call["kernel_size"]
    count = len(dims)
    made = (call.results[0] if outer is None else outer).shape[dims.start :]
    words = (kernel, call["stride"] or kernel, call["padding"], call.arguments.get("dilation", 1))
    each = zip(*(_each(word, count) for word in words), made, strict=True)
    windows = tuple(Windows(stride, pad, dilation * (k - 1) + 1, n) for k, stride, pad, dilation, n in each)
    held: dict[int, Factor] = {}
    shared: dict[int, Factor] = {}
    for d, along in zip(dims, windows, strict=True):
        cuts = [_cut(layout, d) for layout in (source, outer)]
        free = [c for c in cuts if c and not {axis for f in held.values() for axis in f.axes} & set(c.axes)]
        if free:
            axes = free[0].axes
            held[d] = free[0] if free[0] is cuts[0] else sharded(source.shape[d], axes, source.mesh)
            alike = cuts[1] is not None and cuts[1].axes == axes
            shared[d] = cuts[1] if alike and cuts[1] else Factor(along.total, axes, share(held[d], along))
    return Plane(dims, windows, tuple(_each(kernel, count)), tuple(source.shape[dims.start :]), held, shared)


def _cut(layout: Layout | None, dim: int) -> Factor | None:
    """The dim of a layout, if it is sharded into intervals."""
    if layout is None or len(layout.dims[dim]) > 1:
        return None
    factor = layout.dims[dim][0]
    return factor if len(factor.sizes) > 1 else None


def _inner(call: Call, plane: Plane, words: dict[str, Any]) -> Call:
    """The call as the axes that do not shard the plane see it. Where pooling asks for the shape of a plane alone, it lies as
    its gradient."""
    tensors = {name: call.tensors[i].without(plane.axes) for name, i in _slots(call).items()}
    if "self" in tensors and "grad_output" in tensors:
        dims = [*tensors["grad_output"].dims[: plane.dims.start], *((whole(n),) for n in plane.sizes)]
        tensors["self"] = tensors["self"].replace(dims=dims, partials=())
    return _with(replace(call, arguments={**call.arguments, **words}), tensors)


def _with(call: Call, tensors: dict[str, Layout]) -> Call:
    """A call on other layouts."""
    slots = {i: name for name, i in _slots(call).items()}
    several = tuple(tensors.get(slots[i], t) for i, t in enumerate(call.tensors))
    return replace(call, tensors=several, arguments={**call.arguments, **tensors})


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _seconds(choice: Choice, call: Call) -> float:
    """What it takes to send rows, to move the tensors, and to compute."""
    mesh = choice.source.mesh
    routes = [route(mesh, mesh.sorted_axes(one.held.axes)) for one in choice.plane.halos]
    sent = sum(link.latency + n * link.per_byte for link, n in zip(routes, _bytes(choice), strict=True) if n)
    pairs = [(call[name], want) for name, want in choice.wants.items() if want is not None]
    moves = sum(plan(have, want).cost for have, want in pairs if have is not want)
    outer = choice.wants.get("grad_output") or choice.results[0]
    return _crossings(choice) * sent + moves + _work(outer, call, choice.plane)


def _seconds_otherwise(row: Rule, call: Call) -> float:
    """What it takes as the row itself says."""
    decision, source = decide(row, call), _source(call)
    blank = decision.program is not None  # the plane's shape alone is asked for, and one without data takes its place
    if blank:
        call = _with(call, {source: call[source].replicated()})
        decision = decide(row, call)
    names = {i: name for name, i in _slots(call).items()}
    wants = {names[i]: (have, want) for i, have, want in decision.moves if not (blank and names[i] == source)}
    outer = call.arguments.get("grad_output")
    outer = decision.results[0] if outer is None else wants.get("grad_output", (outer, outer))[1]
    return sum(plan(have, want).cost for have, want in wants.values()) + _work(outer, call, _plane(call))


def _work(outer: Any, call: Call, plane: Plane) -> float:
    """Seconds to compute the windows that the busiest rank has."""
    channels = call["weight"].shape[1] if "weight" in call.arguments else 1
    return float(outer.nbytes / outer.dtype.itemsize * math.prod(plane.kernel) * channels * PER_WORK)


def _bytes(choice: Choice) -> list[int]:
    """Bytes that the worst rank receives for each sharding dim; stretches along one dim travel along the next."""
    layout, found = choice.source, []
    shape = {d: layout.held(d) for d in range(layout.ndim)}
    for one in choice.plane.halos:
        found.append(one.received * math.prod([n for d, n in shape.items() if d != one.dim]) * layout.dtype.itemsize)
        shape[one.dim] = max(stretch.rows for stretch in one.stretches)
    return found


def _crossings(choice: Choice) -> int:
    """How often rows cross: where the plane is read, and where its gradient goes back."""
    return (None not in choice.wants.values()) + _gives_back(choice)


def _gives_back(choice: Choice) -> bool:
    """Whether the first result is the gradient of the plane."""
    mask = choice.words.get("output_mask", (True,))
    return "grad_output" in choice.wants and bool(mask[0])


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(choice: Choice, tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Bring in rows, run the operator on every rank's stretch, and give back what gradients belong to others."""
    mesh, plane, source = choice.source.mesh, choice.plane, choice.source
    total = _crossings(choice) * sum(_bytes(choice))
    if total:
        check(tools.operator, total, lambda: f"it sends rows between the shards of {source}")
    given = {**dict(zip(signature(op).names, args, strict=False)), **kwargs}
    values = dict(choice.words)
    for name, want in choice.wants.items():
        if want is not None:
            local, have = local_on(tools.cls, given[name], mesh)
            local = move(local, have, want, tools.operator)
            values[name] = brought(local, plane.halos, want, choice.fill) if _ROLES.get(name) == "plane" else local
        else:
            values[name] = transport(mesh).each(_blank, mesh, values["grad_output"], _stretched(choice))
    numbers = [transport(mesh).number(first, mesh) for first in plane.firsts(source)]
    starts = [transport(mesh).number(first, mesh) for first in _starts(plane, source)]
    shapes = [PerRank(layout.local_shape) for layout in choice.results]
    outs = transport(mesh).each(choice.kernel, mesh, list(values.values()), numbers, starts, shapes[0])
    several = list(outs) if isinstance(outs, tuple) else [outs]
    if _gives_back(choice):
        several[0] = given_back(several[0], plane.halos, choice.results[0])
    layouts = iter(choice.results)
    wrapped = [None if out is None else tools.wrap(out, next(layouts)) for out in several]
    return tuple(wrapped) if isinstance(outs, tuple) else wrapped[0]


def _stretched(choice: Choice) -> PerRank:
    """The shape of each rank's stretch."""
    layout, halos = choice.source, choice.plane.halos

    def shape(place: int) -> tuple[int, ...]:
        rows = {one.dim: one.stretches[layout.shard(one.held, place)].rows for one in halos}
        return tuple(rows.get(d, n) for d, n in enumerate(layout.local_shape(place)))

    return PerRank(shape)


def _starts(plane: Plane, layout: Layout) -> list[Number]:
    """Which of all windows along each dim is the first of a rank."""

    def number(d: int) -> Number:
        if d not in plane.shared:
            return Number(lambda place: 0)
        sizes = plane.shared[d].sizes
        return Number(lambda place: sum(sizes[: layout.shard(plane.held[d], place)]))

    return [number(d) for d in plane.dims]


def _blank(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor for an operator that wants to know a shape."""
    return like.new_empty(()).expand(shape)


def _trimmed(out: Tensor, shape: Sequence[int]) -> Tensor:
    """What a rank keeps: one without windows has computed one, of rows outside."""
    for d, n in enumerate(shape):
        out = out if out.shape[d] == n else out.narrow(d, 0, n).contiguous()
    return out


def _one_at_least(x: Tensor, plane: Plane) -> Tensor:
    for d in plane.held:
        x = at_least_one(x, d)
    return x


# ── convolution ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _convolved(plane: Plane, run: Kernel, call: Call) -> Kernel:
    def local(values: list[Any], firsts: Any, starts: Any, shape: Sequence[int]) -> Tensor:
        return _trimmed(run(*values), shape)

    return local


def _convolved_back(plane: Plane, run: Kernel, call: Call) -> Kernel:
    def local(values: list[Any], firsts: Any, starts: Any, shape: Sequence[int]) -> Any:
        grad, *rest = values
        return tuple(run(_one_at_least(grad, plane), *rest))

    return local


def _conv_words(call: Call, plane: Plane) -> dict[str, Any]:
    return {"padding": plane.unpadded()}


# ── pooling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _largest(plane: Plane, run: Kernel, call: Call) -> Kernel:
    dilation = _each(call["dilation"], len(plane.dims))

    def local(values: list[Any], firsts: Sequence[Tensor], starts: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        found, index = run(*values)
        stretch = values[0].shape[plane.dims.start :]
        return _trimmed(found, shape), _trimmed(_renumbered(index, stretch, firsts, plane.sizes, dilation), shape)

    return local


def _largest_back(plane: Plane, run: Kernel, call: Call) -> Kernel:
    none = [1] * len(plane.dims)

    def local(values: list[Any], firsts: Sequence[Tensor], starts: Any, shape: Sequence[int]) -> Tensor:
        grad, blank, *words, index = values
        index = _renumbered(index, plane.sizes, [-first for first in firsts], blank.shape[plane.dims.start :], none)
        return run(_one_at_least(grad, plane), blank, *words, _one_at_least(index, plane))

    return local


def _renumbered(
    index: Tensor, before: Sequence[int], shift: Sequence[Tensor], after: Sequence[int], step: Sequence[int]
) -> Tensor:
    """Indices into one plane as indices into another, in which it lies `shift` further along each dim. Where a window holds
    nothing larger than rows outside do, torch names its first row inside."""
    out, width = torch.zeros_like(index), 1
    for size, more, new, gap in zip(reversed(before), reversed(shift), reversed(after), reversed(step), strict=True):
        row = index % size + more
        out = out + torch.where(row < 0, row % gap, row) * width
        index, width = index // size, width * new
    return out


def _averaged(plane: Plane, run: Kernel, call: Call) -> Kernel:
    divisor = _divisor(plane, call)

    def local(values: list[Any], firsts: Any, starts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        out = run(*values)
        return _trimmed(divisor(out, starts), shape)

    return local


def _averaged_back(plane: Plane, run: Kernel, call: Call) -> Kernel:
    divisor = _divisor(plane, call)

    def local(values: list[Any], firsts: Any, starts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        grad, *rest = values
        return run(divisor(_one_at_least(grad, plane), starts), *rest)

    return local


def _is_plain(call: Call, plane: Plane) -> bool:
    """Whether all windows are divided by the same number."""
    inside = call["count_include_pad"] or not any(along.pad for along in plane.windows)
    return bool(call["divisor_override"]) or (inside and not call["ceil_mode"])


def _average_words(call: Call, plane: Plane) -> dict[str, Any]:
    divisor = call["divisor_override"] or (math.prod(plane.kernel) if _is_plain(call, plane) else 1)
    return {"padding": plane.unpadded(), "count_include_pad": True, "divisor_override": divisor}


def _divisor(plane: Plane, call: Call) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    """Divides windows by how many rows of the padded plane, or of the plane alone, each looks at."""
    is_plain, padded = _is_plain(call, plane), bool(call["count_include_pad"])

    def divided(out: Tensor, starts: Sequence[Tensor]) -> Tensor:
        if is_plain:
            return out
        for d, start, along, size in zip(plane.dims, starts, plane.windows, plane.sizes, strict=True):
            first = (torch.arange(out.shape[d], device=out.device) + start) * along.stride - along.pad
            last = (first + along.span).clamp(max=size + along.pad)
            count = (last - first if padded else last.clamp(max=size) - first.clamp(min=0)).clamp(min=1)
            count = count.view([-1 if other == d else 1 for other in range(out.ndim)])
            out = out / count if out.is_floating_point() else torch.div(out, count, rounding_mode="trunc")
        return out

    return divided


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _windowed(names: Iterable[str], way: Way) -> None:
    """Rows that exist already, and let rows be sent where the plane is sharded."""
    for name in names:
        row = TABLE[f"aten.{name}"]
        TABLE[f"aten.{name}"] = replace(row, function=partial(_function, row, way))


_windowed(["convolution"], Way(_conv_words, _convolved))
_windowed(["convolution_backward"], Way(_conv_words, _convolved_back))
_windowed(["max_pool2d_with_indices", "max_pool3d_with_indices"], Way(_conv_words, _largest, lowest))
_windowed(["max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"], Way(_conv_words, _largest_back))
_windowed(["avg_pool2d", "avg_pool3d"], Way(_average_words, _averaged))
_windowed(["avg_pool2d_backward", "avg_pool3d_backward"], Way(_average_words, _averaged_back))
