"""Random numbers and dropout: the numbers are those of the whole tensor, whatever its layout (see `shardwise.random.keys`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import tracing_context
from ..base.schema import schema_of
from ..errors import MeshError, OperatorError
from ..layouts.layout import Layout, whole
from ..propagation.table import rule
from ..random.bits import DIGITS, Draw, recipe
from ..random.keys import box, drop_shard, fill_shard
from ..tensor.draw import NORMAL, UNIFORM, draw, seeded
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten
_random = partial(rule, free="generator")


# ── as a tensor is sharded ────────────────────────────────────────────────────────────────────────────────────────────────


def _beside(x: Any, drawn: Any) -> Any:
    """Random numbers on the device of a tensor: none if it has no data."""
    return drawn.to(x.device) if x.is_meta else drawn


def _fill_in_place(tools: Toolbox, op: Any, x: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    layout = tools.layout(x)
    how = _by(op, layout.dtype, args, kwargs)
    if layout.partials or layout.dtype.is_complex or tracing_context() is not None:
        return x.copy_(draw(tools, layout, how, generator))
    recipe(how, layout.dtype)
    tools.each(fill_shard, layout.mesh, x, how, box(layout), tools.key(layout.mesh, generator))
    return x


def _fill_new(tools: Toolbox, op: Any, x: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    layout = tools.layout(x)
    return _beside(x, draw(tools, layout, _by(op, layout.dtype, args, kwargs), generator))


def _by(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """The distribution that an operator draws from, with its numbers in the order of its schema."""
    facts = schema_of(op)
    kind = facts.name.partition(".")[2].removesuffix("_").removesuffix("_functional")
    given = {**facts.defaults, **facts.named((None, *args), kwargs)}
    numbers: tuple[Any, ...] = tuple(given.get(name) for name in facts.names[1:] if name != "generator")
    return _integers(dtype, *numbers) if kind == "random" else Draw(kind, numbers)


def _integers(dtype: torch.dtype, *bounds: Any) -> Draw:
    """From the first of two bounds, or zero, to less than the last; to the largest of the dtype where there is none."""
    first, end = (0, *bounds)[-2:] if bounds else (0, None)
    largest = 2 ** DIGITS[dtype] if dtype in DIGITS else 1 if dtype == torch.bool else torch.iinfo(dtype).max
    return Draw("integer", (int(first), largest if end is None else int(end) - 1))


_random("uniform exponential cauchy log_normal geometric random normal_functional bernoulli.p", program=_fill_new)
_random("uniform_ exponential_ cauchy_ log_normal_ geometric_ random_ normal_ bernoulli_.float", program=_fill_in_place)


def _like(how: Draw, tools: Toolbox, op: Any, x: Any, **kwargs: Any) -> Any:
    layout = tools.layout(x)
    layout = layout.replace(dtype=kwargs.get("dtype") or layout.dtype, stride=None)
    return _beside(x, draw(tools, layout, how, kwargs.get("generator")))


_random("rand_like", program=partial(_like, UNIFORM))
_random("randn_like", program=partial(_like, NORMAL))
_random("randint_like", program=lambda tools, op, x, *ends, **how: _like(_integers(torch.int64, *ends), tools, op, x, **how))

# ── with parameters that are tensors ──────────────────────────────────────────────────────────────────────────────────


def _uniform_beside(tools: Toolbox, p: Any, layout: Layout, generator: Any) -> Any:
    """Numbers from 0 to 1 in a layout, fine enough to be compared with probabilities."""
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return _beside(p, draw(tools, layout.replace(dtype=dtype), UNIFORM, generator))


def _checked(tools: Toolbox, x: Any, holds: Callable[[Tensor], Tensor], text: str) -> Any:
    """A parameter with nothing partial, whose values hold what they must."""
    x = tools.move(x, tools.layout(x).reduced()) if tools.is_distributed(x) else x

    def look(x: Tensor) -> None:
        wrong = x[~holds(x)]
        if wrong.numel():
            raise OperatorError(f"{text}, got {wrong[0].item()}")

    tools.look(look, x)
    return x


def _probabilities(tools: Toolbox, p: Any) -> Any:
    if not p.dtype.is_floating_point:
        raise OperatorError(f"bernoulli takes probabilities as floats, got {p.dtype}; convert them first")
    return _checked(tools, p, lambda p: (p >= 0) & (p <= 1), "bernoulli takes probabilities from 0 to 1")


def _below(tools: Toolbox, op: Any, p: Any, *, generator: Any = None) -> Any:
    p = _probabilities(tools, p)
    return _uniform_beside(tools, p, tools.layout(p), generator).lt(p).to(p.dtype)


def _below_in_place(tools: Toolbox, op: Any, x: Any, p: Any, *, generator: Any = None) -> Any:
    p = _probabilities(tools, p)
    return x.copy_(_uniform_beside(tools, p, tools.layout(x), generator).lt(p))


def _normal(tools: Toolbox, op: Any, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """mean + std · normal, either of them a tensor."""
    deviations = "normal takes standard deviations that are real and not negative"
    if isinstance(std, Tensor):
        if std.is_complex():
            raise OperatorError(f"{deviations}, got {std.dtype}")
        std = _checked(tools, std, lambda std: std >= 0, deviations)
    else:
        recipe(Draw("normal", (0.0, std)), torch.float32)
    tensors = [x for x in (mean, std) if tools.is_distributed(x)]
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    layout = tools.layout(max(tensors, key=lambda x: tuple(x.shape) == tuple(shape)))
    if layout.shape != shape:
        layout = Layout.of(layout.mesh, [[whole(n)] for n in shape], (), layout.dtype)
    return draw(tools, layout, NORMAL, generator) * std + mean


_random("bernoulli", program=_below)
_random("bernoulli.Tensor", program=lambda tools, op, x, p, **words: _below_in_place(tools, op, aten.empty_like(x), p, **words))
_random("bernoulli_.Tensor", program=_below_in_place)
_random("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", program=_normal)

# ── dropout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dropout(tools: Toolbox, op: Any, x: Any, p: float, train: bool | None = True) -> tuple[Any, Any]:
    layout = tools.layout(x)
    flags = layout.replace(dtype=torch.bool, partials=())
    if train is False or p == 0:
        return x.clone(), aten.ones_like(x, dtype=torch.bool)
    keep, scale = Draw("bernoulli", (1 - p,)), 0.0 if p == 1 else 1 / (1 - p)
    if tracing_context() is not None:
        kept = draw(tools, flags, keep)
        return tools.wrap(tools.each(lambda x, kept: x * kept * scale, layout.mesh, x, kept), layout), kept
    out, kept = tools.each(drop_shard, layout.mesh, x, scale, keep, box(flags), tools.key(layout.mesh))
    return tools.wrap(out, layout), tools.wrap(kept, flags)


_random("native_dropout", program=_dropout)

# ── leaky by chance ───────────────────────────────────────────────────────────────────────────────────────────────────


def _rrelu(
    tools: Toolbox, op: Any, x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any, **kwargs: Any
) -> Any:
    """Negative elements times a random slope, which is written to `noise`; outside of training their mean slope."""
    given, in_place = schema_of(op).named((x, noise, lower, upper, *rest), kwargs), tools.operator.endswith("_")
    if not given.get("training"):
        return (aten.leaky_relu_ if in_place else aten.leaky_relu)(x, (lower + upper) / 2)
    drawn = draw(tools, tools.layout(x), Draw("uniform", (lower, upper)), given.get("generator"))
    noise.copy_(aten.where(x <= 0, drawn, 1.0))
    return x.mul_(noise) if in_place else x * noise


_random("rrelu_with_noise rrelu_with_noise_", program=_rrelu)

# ── one of several ────────────────────────────────────────────────────────────────────────────────────────────────────


def _multinomial(tools: Toolbox, op: Any, p: Any, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Indices of weights, row by row: rows stay where they are, each whole."""
    _check_weights(p, count, replacement)
    layout = tools.layout(p).reduced()
    layout = layout.without(layout.axes_of(layout.ndim - 1)).replace(stride=None)
    chosen = Layout.of(layout.mesh, [*layout.dims[:-1], [whole(count)]], (), torch.int64)
    if replacement:
        local = tools.each(_weighted, layout.mesh, tools.move(p, layout), draw(tools, chosen, Draw("bits"), generator))
    else:
        times = draw(tools, layout.replace(dtype=torch.float64), Draw("exponential", (1.0,)), generator)
        local = tools.each(_first_of, layout.mesh, tools.move(p, layout), times, count)
    return tools.wrap(local, chosen)


def _check_weights(p: Any, count: int, replacement: bool) -> None:
    several = p.ndim in (1, 2) and p.dtype.is_floating_point and count >= 1
    if not several or (count > p.shape[-1] and not replacement):
        raise OperatorError(
            f"multinomial: {count} indices {'with' if replacement else 'without'} replacement from weights of shape "
            f"{list(p.shape)} of {p.dtype}; it takes a vector or a matrix of floats, gives at least one, and without "
            "replacement each at most once"
        )
    if tracing_context() is None and not p.is_meta and not _are_weights(p):
        raise OperatorError(
            "multinomial takes weights that are finite and not negative, with at least one positive in each row"
        )


def _are_weights(p: Any) -> bool:
    try:
        return bool(((p >= 0) & (p < math.inf)).all() & (p.sum(-1) > 0).all())
    except MeshError:  # this rank is not in the mesh, and has nothing to look at
        return True


def _first_of(p: Tensor, times: Tensor, count: int) -> Tensor:
    """Those whose exponential time, divided by their weight, is over first: without replacement, in the order of drawing."""
    return aten.argsort.stable(p.to(torch.float64) / times, stable=True, dim=-1, descending=True)[..., :count].contiguous()


def _weighted(p: Tensor, z: Tensor) -> Tensor:
    """With replacement: where a random number falls among the running sums of the weights. These are whole numbers, whose sums
    no order of adding changes."""
    room = 62 - math.ceil(math.log2(p.shape[-1]))
    weights = p.to(torch.float64)
    sums = (weights / weights.amax(-1, keepdim=True) * 2**room).to(torch.int64).cumsum(-1)
    high, low, most, least = z >> 32 & _HALF, z & _HALF, sums[..., -1:] >> 32, sums[..., -1:] & _HALF
    number = high * most + (high * least >> 32 & _HALF) + (low * most >> 32)
    return torch.searchsorted(sums, number, right=True)


_HALF = 2**32 - 1
_random("multinomial", program=_multinomial)

# ── all at once ───────────────────────────────────────────────────────────────────────────────────────────────────────


_random("poisson binomial _standard_gamma _sample_dirichlet", program=seeded)
