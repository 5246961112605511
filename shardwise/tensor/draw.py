"""Random DTensors: the numbers of the whole tensor, of which each rank makes its own shard; see `shardwise.random.keys`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from .._torch.compiler import NotTraced, tracing_context
from .._torch.tensors import tree_map_only
from ..base.schema import schema_of
from ..comm import transport
from ..comm.interception import watched
from ..layouts.layout import Layout, Number, PerRank, whole
from ..random.bits import Draw, recipe
from ..random.keys import box, draw_shard, sides, traced_key, traced_shard
from .toolbox import Toolbox

aten = torch.ops.aten
UNIFORM, NORMAL = Draw("uniform", (0.0, 1.0)), Draw("normal", (0.0, 1.0))


def draw(tools: Toolbox, layout: Layout, how: Draw, generator: Generator | None = None) -> Any:
    """Random numbers of the shape and dtype of a layout, sharded like it, with nothing partial."""
    layout = layout.reduced()
    if layout.dtype.is_complex:
        return _complex(tools, layout, how, generator)
    recipe(how, layout.dtype)  # refuses numbers that are none of the distribution's, before any are drawn
    facts = (layout.mesh, how, layout, PerRank(layout.local_shape))
    if tracing_context() is not None:
        key = traced_key(layout.mesh, generator)
        return tools.wrap(tools.each(traced_shard, *facts, _traced_spans(tools, layout), key, layout.device), layout)
    drawn = tools.key(layout.mesh, generator)
    run = partial(tools.each, draw_shard, *facts, box(layout), drawn, layout.device)
    return tools.wrap(watched("shardwise.draw", (how, layout, drawn), None, run), layout)


def _complex(tools: Toolbox, layout: Layout, how: Draw, generator: Generator | None) -> Any:
    """Real and imaginary part by turns; normal ones have the variance of one number together."""
    if how.kind == "normal":
        how = Draw("normal", (how.numbers[0], how.numbers[1] / math.sqrt(2)))
    real = Layout.of(layout.mesh, [*layout.dims, [whole(2)]], (), layout.dtype.to_real())
    return aten.view_as_complex(draw(tools, real, how, generator))


def _traced_spans(tools: Toolbox, layout: Layout) -> tuple[Any, ...]:
    """The same as `keys.box`, with numbers of the rank as values of the program."""
    starts, lengths, several = [], [], sides(layout)
    for side in several:
        even, length = min(side.factor.sizes) == max(side.factor.sizes), side.length(layout, 0)  # also where sizes are symbols
        first = partial(layout.shard, side.factor) if even else partial(side.start, layout)
        start = transport(layout.mesh).number(Number(first), layout.mesh)
        starts.append(start * length if even else start)
        lengths.append(length if even else PerRank(partial(side.length, layout)))
    return tuple(starts), tuple(lengths), tuple(side.stride for side in several)


def seeded(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on whole tensors, on every rank, from one seed."""
    given = schema_of(op).named(args, kwargs)
    mesh = tools.mesh(*given.values())
    if tracing_context() is not None:
        raise NotTraced(
            f"{tools.operator} in a compiled function: it draws from one seed, which would be the same in every call; call it "
            "outside of compiled functions"
        )
    seed = tools.key(mesh, given.pop("generator", None))[0]

    def gathered(x: Tensor) -> Tensor:
        return tools.local(tools.replicated(x, mesh, tools.operator))

    kernel = partial(_with_seed, op, tuple(given), "generator" in schema_of(op).names, seed)
    return tools.whole(tools.each(kernel, mesh, *tree_map_only(Tensor, gathered, list(given.values()))), mesh)


def _with_seed(op: Any, names: Sequence[str], takes_generator: bool, seed: int, *values: Any) -> Any:
    given = dict(zip(names, values, strict=True))
    device = next(value.device for value in values if isinstance(value, Tensor))
    if takes_generator:
        return op(**given, generator=Generator(device).manual_seed(seed))
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.manual_seed(seed)
        return op(**given)
