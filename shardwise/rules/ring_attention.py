"""`ring_attention`: attention of sequences that are sharded along a mesh axis, by passing keys and values round.

On a ring of n ranks each holds a block of queries and one of keys and values. It attends to the block at hand while that block
is on its way to the next rank, n times, and joins what it finds. In the backward keys and values go round the other way, and
their gradients with them: those of a block start where it is passed first, and come home last.

The ring is an operator on DTensors, so that `remat` sees one call, and a traced program the messages and kernels that it is
made of. Where one is traced that all ranks run, every rank attends to every block, and leaves out afterwards what lies behind
its queries: the last rank attends to all of them anyway, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.argument_checks import a_tensor, flag, number, optional
from ..comm import PerRank, transport
from ..comm.interception import watched
from ..comm.messages import Batch, Shape
from ..errors import OperatorError
from ..kernels.attention import Way, accumulated, attend, attend_backward, joined
from ..layouts.layout import Dim, Factor, Layout, sharded, whole
from ..p2p.batch import exchange, wait
from ..propagation.table import rule
from ..redistribution.run import move
from ..tensor.toolbox import Toolbox
from ..tensor.wrapping import local_on
from .halo import shard_route

# ── what a user calls ─────────────────────────────────────────────────────────────────────────────────────────────────


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of DTensors whose sequences (dim -2) are sharded, which stay so: keys and values go
    round.

    Each of n ranks receives (n - 1) / n of the keys and values (of its batch and heads) in the forward, as much again in the
    backward, and there (n - 1) / n of their gradients, in float32 (float64 for float64). Batch and heads may be sharded along
    other axes; shards may be uneven, or empty. There is no dropout, no mask and no second derivative.

    >>> import shardwise as sw
    >>> x = sw.randn(2, 4, 13, 8, mesh=sw.init_mesh(sp=4), placements=[sw.Shard(2)])
    >>> with sw.trace_comm() as log:
    ...     y = ring_attention(x, x, x, is_causal=True)
    >>> y, log.counts()
    (DTensor(f32[2, 4, 13@sp, 8], mesh=(sp=4)), {'p2p': 3})
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        a_tensor(x, f"ring_attention: {name}")
    flag(is_causal, "ring_attention: is_causal")
    flag(enable_gqa, "ring_attention: enable_gqa")
    optional(number, scale, "ring_attention: scale")
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype is not torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    _check(query, key, value, is_causal, enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.shardwise.ring_attention(query, key, value, is_causal, scale)[0]


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, grouped: bool) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim >= 2 or not query.dtype == key.dtype == value.dtype:
        raise OperatorError(
            f"ring_attention takes tensors of one dtype and of one number of dims, at least 2, got {shapes} of "
            f"{query.dtype}, {key.dtype}, {value.dtype}"
        )
    if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1] or query.shape[:-3] != key.shape[:-3]:
        raise OperatorError(
            f"ring_attention: each key has a value, and the length of a query, in the same batch; got {shapes}. Expand what "
            "is to be broadcast"
        )
    heads, groups = (x.shape[-3] if x.ndim > 2 else 1 for x in (query, key))
    if heads != groups and (not grouped or not groups or heads % groups):
        raise OperatorError(
            f"ring_attention: {heads} heads of queries and {groups} of keys; with enable_gqa=True a head of keys serves a "
            "group of query heads, all groups of one size"
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise OperatorError(
            f"ring_attention(is_causal=True) of {query.shape[-2]} queries and {key.shape[-2]} keys: both are sharded alike, so "
            "of one length; use F.scaled_dot_product_attention"
        )


# ── who holds what ────────────────────────────────────────────────────────────────────────────────────────────────────


class Ring(NamedTuple):
    """The ranks that pass blocks to one another: the layouts that they hold, how they attend, and whether blocks go to the next
    rank (1) or to the one before (-1)."""

    query: Layout
    key: Layout
    value: Layout
    way: Way
    turn: int = 1

    @property
    def blocks(self) -> Factor:
        """How the keys are sharded."""
        return self.key.dims[-2][0]

    @property
    def size(self) -> int:
        """The number of ranks that pass blocks to one another."""
        return len(self.blocks.sizes)

    @property
    def result(self) -> Layout:
        """The layout of the weighted values."""
        return Layout.of(self.query.mesh, (*self.query.dims[:-1], self.value.dims[-1]), (), self.query.dtype)

    @property
    def logarithms(self) -> Layout:
        """The layout of the logarithms."""
        return Layout.of(self.query.mesh, self.query.dims[:-1], (), accumulated(self.query.dtype))

    def here(self, place: int, step: int = 0) -> int:
        """Which block is at a place at a step."""
        return (self.key.shard(self.blocks, place) - self.turn * step) % self.size

    def passed(self, pair: Sequence[Tensor], step: int) -> list[Tensor]:
        """What another rank held, and this one holds at a step; it may be still on its way."""
        goal, source = (shard_route(self.key, self.blocks, turn, wrap=True) for turn in (self.turn, -self.turn))
        shapes = tuple(_moved(layout, self, step) for layout in (self.key, self.value))
        dtypes = tuple(x.dtype for x in pair)
        return exchange(pair, Batch(self.key.mesh.root, (goal, goal), (source, source), shapes, dtypes, lent=True))

    def sees(self, step: int, traced: bool) -> Any:
        """Whether the queries of a rank attend to the block at a step: its own fact, or a number where a program is traced."""
        if not self.way.is_causal or not step:
            return True
        mesh, seen = self.key.mesh, PerRank(lambda place: self.here(place, step) < self.here(place))
        return transport(mesh).number(PerRank(lambda place: int(seen.at(place))), mesh) if traced else seen

    def at(self, step: int) -> Way:
        """How to attend at a step: blocks behind one's own are seen whole, or not at all."""
        return self.way._replace(is_causal=self.way.is_causal and not step)


def _moved(layout: Layout, ring: Ring, step: int) -> Shape:
    """The shape of the block that has come to each place at a step."""
    if layout.even:
        return layout.local_shape(0)

    def shape(place: int) -> tuple[int, ...]:
        *batch, _, width = layout.local_shape(place)
        return *batch, ring.blocks.sizes[ring.here(place, step)], width

    return PerRank(shape)


def _ring(given: Sequence[Layout], way: Way) -> Ring:
    """The ring of sequences that are sharded like the queries; keys and values follow in what they are not sharded alike."""
    query, key, value = given
    mesh, axes = query.mesh, query.axes_of(-2)
    batch, groups = list(query.dims[:-2]), list(query.dims[:-2])
    if query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        heads = sharded(key.shape[-3], query.axes_of(-3), mesh)
        each = query.shape[-3] // key.shape[-3]
        batch[-1] = (Factor(heads.size * each, heads.axes, tuple(n * each for n in heads.sizes)),)
        groups[-1] = (heads,)
    rows: Dim = query.dims[-2] if len(query.dims[-2]) == 1 else (sharded(query.shape[-2], axes, mesh),)
    blocks: Dim = rows
    if not way.is_causal:
        own = len(key.dims[-2]) == 1 and key.axes_of(-2) == axes
        blocks = key.dims[-2] if own else (sharded(key.shape[-2], axes, mesh),)

    def placed(layout: Layout, dims: list[Dim], sequence: Dim) -> Layout:
        return layout.replace(dims=[*dims, sequence, (whole(layout.shape[-1]),)], partials=())

    return Ring(placed(query, batch, rows), placed(key, groups, blocks), placed(value, groups, blocks), way)


# ── once round ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _forward(tools: Toolbox, op: Any, *given: Any) -> tuple[Tensor, Tensor]:
    ring, locals_ = _placed(tools, given[:3], Way(*given[3:]))
    both = watched("ring_attention", ring, tuple(locals_), lambda: _find(ring, *locals_))
    return tools.wrap(both[0], ring.result), tools.wrap(both[1], ring.logarithms)


def _placed(tools: Toolbox, given: Sequence[Tensor], way: Way) -> tuple[Ring, list[Tensor]]:
    """The ring of queries, keys and values, and what ranks hold of them."""
    mesh = tools.mesh(*given)
    held = [local_on(tools.cls, x, mesh) for x in given]
    ring = _ring([layout for _, layout in held], way)
    return ring, [move(x, have, want, "ring_attention") for (x, have), want in zip(held, ring[:3], strict=True)]


def _find(ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    mesh, dtype = ring.key.mesh, query.dtype
    world = transport(mesh)
    traced = world.traced(query)
    out, lse = world.each(_nothing_found, mesh, query, value)
    held: Sequence[Tensor] = (key, value)
    for step in range(ring.size):
        coming = ring.passed(held, step + 1) if step + 1 < ring.size else ()
        out, lse = world.each(_find_more, mesh, query, *held, out, lse, ring.at(step), ring.sees(step, traced))
        held = [wait(x) for x in coming]
    return world.each(_as, mesh, out, dtype), lse


def _nothing_found(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulated(query.dtype)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    return out, query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)


def _find_more(  # noqa: PLR0913  what is known, what is new, and how
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, way: Way, seen: bool | Tensor
) -> tuple[Tensor, Tensor]:
    if seen is False or not query.numel() or not key.numel():
        return out, lse
    more, more_lse = attend(query, key, value, way)
    if isinstance(seen, Tensor):
        more_lse = torch.where(seen > 0, more_lse, -torch.inf)
    return joined(out, lse, more, more_lse)


# ── once more round, with gradients ───────────────────────────────────────────────────────────────────────────────────


def _backward(tools: Toolbox, op: Any, grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    ring, locals_ = _placed(tools, given[:3], Way(*given[5:]))
    out, lse = given[3:5]
    for x, want in ((grad, ring.result), (out, ring.result), (lse, ring.logarithms)):
        local, have = local_on(tools.cls, x, want.mesh)
        locals_.append(move(local, have, want.replace(stride=have.stride), "ring_attention"))
    # The other way round: a compiler would take the same messages for those of the forward, and keep all blocks instead.
    gradients = _gradients(ring._replace(turn=-1), *locals_)
    return tuple(tools.wrap(x, layout.replace(stride=None)) for x, layout in zip(gradients, ring[:3], strict=True))


def _gradients(  # noqa: PLR0913  as the operator
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, out: Tensor, lse: Tensor
) -> list[Tensor]:
    mesh, dtype = ring.key.mesh, query.dtype
    world = transport(mesh)
    traced = world.traced(query)
    gradients: list[Tensor] = []
    held: Sequence[Tensor] = (key, value)
    following: Sequence[Tensor] = ()  # the gradients of the block at hand that come from the ranks before
    for step in range(ring.size):
        coming = ring.passed(held, step + 1) if step + 1 < ring.size else ()
        how = (ring.at(step), ring.sees(step, traced))
        more = list(world.each(_changes, mesh, query, *held, (grad, out, lse), *how))
        if step:
            gradients[0].add_(more.pop(0))
            more = [wait(before).add_(x) for before, x in zip(following, more, strict=True)] if following else more
            following = ring.passed(more, step + 1)
        else:
            gradients = more
        held = [wait(x) for x in coming]
    for x, others in zip(gradients[1:], following, strict=False):
        x.add_(wait(others))
    return [world.each(_as, mesh, x, dtype) for x in gradients]


def _changes(
    query: Tensor, key: Tensor, value: Tensor, known: tuple[Tensor, Tensor, Tensor], way: Way, seen: bool | Tensor
) -> tuple[Tensor, ...]:
    """What the keys at hand add to the gradients."""
    given = (query, key, value)
    if seen is False or not query.numel() or not key.numel():
        return tuple(x.new_zeros(x.shape, dtype=accumulated(x.dtype)) for x in given)
    grad, out, lse = known
    gradients = attend_backward(grad, given, out, lse, way)
    # What was not seen may have any score, and so any gradient, also one that is no number.
    return tuple(torch.where(seen > 0, x, 0.0) for x in gradients) if isinstance(seen, Tensor) else gradients


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


# ── as operators ──────────────────────────────────────────────────────────────────────────────────────────────────────

_GIVEN, _HOW = "Tensor query, Tensor key, Tensor value", "bool is_causal, float scale"
torch.library.define("shardwise::ring_attention", f"({_GIVEN}, {_HOW}) -> (Tensor, Tensor)")
torch.library.define(
    "shardwise::ring_attention_backward",
    f"(Tensor grad, {_GIVEN}, Tensor out, Tensor lse, {_HOW}) -> (Tensor, Tensor, Tensor)",
)
rule("shardwise::ring_attention", program=_forward)
rule("shardwise::ring_attention_backward", program=_backward)


def _alone(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """Where one rank holds everything."""
    out, lse = _find_more(query, key, value, *_nothing_found(query, value), Way(*how), True)
    return _as(out, query.dtype), lse


def _alone_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    query, key, value, out, lse, *how = given
    return tuple(_as(x, query.dtype) for x in _changes(query, key, value, (grad, out, lse), Way(*how), True))


def _shapes(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    out, lse = _nothing_found(query, value)
    return out.to(query.dtype), lse


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*given, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 5
    return *torch.ops.shardwise.ring_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.scale), None, None


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise OperatorError("ring_attention has no second derivatives; use F.scaled_dot_product_attention under SDPBackend.MATH")


torch.library.impl("shardwise::ring_attention", "CompositeExplicitAutograd", _alone)
torch.library.impl("shardwise::ring_attention_backward", "CompositeExplicitAutograd", _alone_backward)
torch.library.register_fake("shardwise::ring_attention", _shapes)
torch.library.register_fake("shardwise::ring_attention_backward", lambda *given: tuple(map(torch.empty_like, given[1:4])))
torch.library.register_autograd("shardwise::ring_attention", _differentiated, setup_context=_remember)
torch.library.register_autograd("shardwise::ring_attention_backward", _refuse)
