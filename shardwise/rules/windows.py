"""`windowed`: rules of convolution and pooling for a plane that may be sharded. Each rank computes some of the windows, from
its shard and the rows that other ranks send it; where no window crosses a border, nothing is sent.

The windows along a sharded dim are sharded by the same axes, into sizes that follow. Whether rows are sent, or the sharding is
moved to another dim, or the plane gathered, is decided by what each costs. The plane of a transposed convolution is gathered.
What the row itself says of batch and channels holds beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.schema import schema_of
from ..comm import check, transport
from ..errors import Unsettled
from ..layouts.layout import Factor, Layout, Number, PerRank, SymbolicLayout, sharded, whole
from ..planning.cost import PER_WORK, route
from ..planning.plan import plan
from ..propagation.decide import decide
from ..propagation.notation import Call, Kernel, Proposal, Rule
from ..propagation.table import make_row, rule
from ..redistribution.run import move
from ..tensor.toolbox import Toolbox
from ..tensor.wrapping import local_on
from .halo import Halo, Windows, give_back, halo, share, stretched, with_halos
from .shard_position import at_least_one, by_shard

# ── nouns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plane:
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
        """The axes that shard it."""
        return [axis for factor in self.held.values() for axis in factor.axes]

    @cached_property
    def halos(self) -> tuple[Halo, ...]:
        """What ranks need of one another."""
        along = dict(zip(self.dims, self.windows, strict=True))
        return tuple([halo(d, self.held[d], self.shared[d].sizes, along[d]) for d in sorted(self.held)])

    def numbers(self, layout: Layout, values: dict[int, Sequence[int]]) -> list[Number | int]:
        """Along each dim the number that `values` has for a rank's shard; 0 along a dim that is not sharded."""
        return [by_shard(layout, self.held[d], values[d], Number) if d in values else 0 for d in self.dims]


class LocalWindows(NamedTuple):
    """How an operator is run on stretches: what makes the function that each rank runs, from the plane, the local operator and
    the call; which arguments, beside the padding, the local operator gets otherwise; what rows outside hold; and which numbers
    of a rank, from the call, the plane and its layout, the function is given."""

    kernel: Callable[[Plane, Kernel, Call], Kernel]
    words: Callable[[Call, Plane], dict[str, Any]] = lambda call, plane: {}
    fill: Callable[[torch.dtype], Any] | None = None
    numbers: Callable[[Call, Plane, Layout], list[Number | int]] = lambda call, plane, layout: []


@dataclass(frozen=True)
class StretchedCall:
    """A call on stretches: the layouts that its tensors want (None: the shape alone is asked for), those of its results, that
    of the plane, and the shape of each rank's first result. What depends on these alone is worked out once."""

    plane: Plane
    words: dict[str, Any]
    wants: dict[str, Layout | None]
    results: tuple[Layout, ...]
    source: Layout
    kernel: Kernel
    fill: Any
    numbers: list[Number | int]
    shape: PerRank

    @cached_property
    def halos(self) -> tuple[Halo, ...]:
        """Those that take any work: not where every stretch is a shard as it is."""
        return tuple([one for one in self.plane.halos if not one.unchanged])

    @cached_property
    def bytes(self) -> list[int]:
        """What the worst rank receives for each sharded dim; stretches along one dim travel along the next."""
        layout, amounts = self.source, []
        shape = {d: layout.held(d) for d in range(layout.ndim)}
        for one in self.plane.halos:
            amounts.append(one.received * math.prod([n for d, n in shape.items() if d != one.dim]) * layout.dtype.itemsize)
            shape[one.dim] = max(stretch.rows for stretch in one.stretches)
        return amounts

    @cached_property
    def gives_back(self) -> bool:
        """Whether the first result is the gradient of the plane."""
        return "grad_output" in self.wants and bool(self.words.get("output_mask", (True,))[0])

    @cached_property
    def crossings(self) -> int:
        """How often rows cross: where the plane is read, and where its gradient goes back."""
        return (None not in self.wants.values()) + self.gives_back

    @cached_property
    def stretch(self) -> PerRank:
        """The shape of each rank's stretch."""
        return stretched(self.plane.halos, self.source)


#: What a tensor is along the plane.
_ROLES = {"input": "plane", "self": "plane", "grad_output": "windows", "indices": "windows"}

# ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _function(row: Rule, way: LocalWindows, call: Call) -> Proposal | Rule | None:
    """What the row itself says, unless sending rows costs less."""
    choice = _choice(row, way, call)
    if choice is None or _seconds(choice, call) >= _seconds_otherwise(row, call):
        return row.function(call) if row.function is not None else None
    return Proposal(call.tensors, (), program=partial(_run, choice))


def _choice(row: Rule, way: LocalWindows, call: Call) -> StretchedCall | None:
    """The call on stretches; None where no dim of the plane is sharded, or this way is none for it."""
    name, (*_, bias) = _source(call), call.arguments.get("output_mask", (False,))
    several = [call.arguments.get(each) for each in (name, "grad_output")]
    is_sharded = any(_intervals_of(t, d) for t in several for d in _dims(call))
    if call.arguments.get("transposed") or bias or not is_sharded:
        return None
    if any(isinstance(t, SymbolicLayout) for t in call.tensors):
        raise Unsettled("which rows are sent depends on the size of a plane: it has to be specialised")
    if not all(all(t.shape) for t in call.tensors):
        return None
    plane = _plane(call)
    padding = [0 if d in plane.held else along.pad for d, along in zip(plane.dims, plane.windows, strict=True)]
    inner = _inner(call, plane, {"padding": padding, **way.words(call, plane)})
    decision = decide(row, inner)
    if decision.program is not None:
        return None
    moved = {i: want for i, _, want in decision.moves}
    wants = {name: moved.get(i, inner.tensors[i]) for name, i in _slots(call).items()}
    wants = {name: _placed(want, plane, _ROLES.get(name, "")) for name, want in wants.items()}
    source = wants[name]
    results = tuple(_placed(t, plane, role) for t, role in zip(decision.results, _roles(call), strict=True) if t is not None)
    kernel = way.kernel(plane, decision.kernel or call.op, call)
    reads = "grad_output" not in call.arguments or ("weight" in call.arguments and bool(call["output_mask"][1]))
    asked: dict[str, Layout | None] = {**wants, **({} if reads else {name: None})}
    fill, numbers = way.fill(source.dtype) if way.fill else 0, way.numbers(call, plane, source)
    shape = PerRank(results[0].local_shape)
    return StretchedCall(plane, inner.arguments, asked, results, source, kernel, fill, numbers, shape)


def _source(call: Call) -> str:
    return "input" if "input" in call.arguments else "self"


def _slots(call: Call) -> dict[str, int]:
    """Which of its tensors the arguments of a call are."""
    return {name: slot for name, slot in zip(call.tensor_names, call.slots, strict=True) if slot is not None}


def _roles(call: Call) -> list[str]:
    """What each result is along the plane; the gradient of a weight is Partial(sum)."""
    if "grad_output" not in call.arguments:
        return ["windows"] * len(call.results)
    asked = call.arguments.get("output_mask", (True,))
    return [role for role, is_asked in zip(("plane", "weight"), asked, strict=False) if is_asked]


def _placed(layout: Layout, plane: Plane, role: str) -> Layout:
    if role == "weight":
        return layout.replace(partials=[*layout.partials, *((axis, "sum") for axis in plane.axes)])
    factors = {"plane": plane.held, "windows": plane.shared}.get(role, {})
    return layout.replace(dims=[(factors[d],) if d in factors else dim for d, dim in enumerate(layout.dims)])


def each_dim(value: Any, count: int) -> list[int]:
    """An argument such as a stride, for each of so many dims: one number stands for all."""
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
    each = zip(*(each_dim(word, count) for word in words), made, strict=True)
    windows = tuple(Windows(stride, pad, dilation * (k - 1) + 1, n) for k, stride, pad, dilation, n in each)
    held: dict[int, Factor] = {}
    shared: dict[int, Factor] = {}
    for d, along in zip(dims, windows, strict=True):
        shardings = [_intervals_of(layout, d) for layout in (source, outer)]
        free = [c for c in shardings if c and not {axis for f in held.values() for axis in f.axes} & set(c.axes)]
        if free:
            axes = free[0].axes
            held[d] = free[0] if free[0] is shardings[0] else sharded(source.shape[d], axes, source.mesh)
            theirs = shardings[1]
            shared[d] = theirs if theirs and theirs.axes == axes else Factor(along.total, axes, share(held[d], along))
    return Plane(dims, windows, tuple(each_dim(kernel, count)), tuple(source.shape[dims.start :]), held, shared)


def _intervals_of(layout: Layout | None, dim: int) -> Factor | None:
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


def _seconds(choice: StretchedCall, call: Call) -> float:
    """What it takes to send rows, to move the tensors, and to compute."""
    mesh = choice.source.mesh
    routes = [route(mesh, mesh.sorted_axes(one.held.axes)) for one in choice.plane.halos]
    sent = sum(link.latency + n * link.per_byte for link, n in zip(routes, choice.bytes, strict=True) if n)
    pairs = [(call[name], want) for name, want in choice.wants.items() if want is not None]
    moves = sum(plan(have, want).cost for have, want in pairs if have is not want)
    outer = choice.wants.get("grad_output") or choice.results[0]
    return choice.crossings * sent + moves + _work(outer, call, choice.plane)


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


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(choice: StretchedCall, tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Bring in rows, run the operator on every rank's stretch, and give back what gradients belong to others."""
    mesh, source = choice.source.mesh, choice.source
    world, total = transport(mesh), choice.crossings * sum(choice.bytes)
    if total:
        check(tools.operator, total, lambda: f"it sends rows between the shards of {source}")
    given, values = schema_of(op).named(args, kwargs), dict(choice.words)
    for name, want in choice.wants.items():
        if want is not None:
            local = move(*local_on(tools.cls, given[name], mesh), want, tools.operator)
            values[name] = with_halos(local, choice.halos, want, choice.fill) if _ROLES.get(name) == "plane" else local
        else:
            values[name] = world.each(blank, mesh, values["grad_output"], choice.stretch)
    numbers = [world.number(one, mesh) if isinstance(one, Number) else one for one in choice.numbers]
    outs = world.each(choice.kernel, mesh, list(values.values()), numbers, choice.shape)
    several = list(outs) if isinstance(outs, tuple) else [outs]
    if choice.gives_back:
        several[0] = give_back(several[0], choice.halos, choice.results[0])
    layouts = iter(choice.results)
    wrapped = [None if out is None else tools.wrap(out, next(layouts)) for out in several]
    return tuple(wrapped) if isinstance(outs, tuple) else wrapped[0]


def blank(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor for an operator that wants to know a shape: it holds no data."""
    return like.new_empty(()).expand(shape)


def trimmed(out: Tensor, shape: Sequence[int]) -> Tensor:
    """What a rank keeps: one without windows has computed one, of rows outside."""
    for d, n in enumerate(shape):
        out = out if out.shape[d] == n else out.narrow(d, 0, n).contiguous()
    return out


def one_at_least(x: Tensor, plane: Plane) -> Tensor:
    """A tensor of windows with at least one along each sharded dim of the plane."""
    for d in plane.held:
        x = at_least_one(x, d)
    return x


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def windowed(names: str, text: str | None, local: LocalWindows, **words: Any) -> None:
    """Rows whose operators run on stretches where that costs less than what the sentence and the words say."""
    row = make_row(text, **words)
    rule(names, text, **{**words, "function": partial(_function, row, local)})
