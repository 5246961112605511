"""Random numbers: those of the whole tensor, whatever its layout; see `shardwise.random`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from .._torch import tracing_context
from ..errors import OperatorError
from ..layout import Layout, whole
from ..random import Fill, next_seed, normal, sample, uniform
from .table import rule

aten = torch.ops.aten
_random = partial(rule, free="generator")


# ── as a tensor is cut ────────────────────────────────────────────────────────────────────────────────────────────────


def _draw(tools: Any, layout: Layout, fill: Fill, generator: Generator | None = None) -> Any:
    """Random numbers of the shape and dtype of a layout, cut like it, with nothing pending."""
    layout = layout.reduced()
    return tools.distribute(sample(layout.shape, layout.dtype, layout.device, fill, generator), layout)


def _fill_in_place(tools: Any, op: Any, x: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    return x.copy_(_draw(tools, tools.layout(x), _by(op, args, kwargs), generator))


def _fill_new(tools: Any, op: Any, x: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    return _draw(tools, tools.layout(x), _by(op, args, kwargs), generator)


def _by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fill:
    """The operator with its numbers, in the order of its schema."""
    names = [argument.name for argument in op._schema.arguments[1 + len(args) :]]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()}
    rest: list[Any] = [kwargs.get(name, defaults.get(name)) for name in names if name != "generator"]
    return Fill(f"{op._schema.name.partition('::')[2]}.{op._overloadname}", (*args, *rest))


for _name in ("uniform", "exponential", "cauchy", "log_normal", "geometric", "random", "normal_functional"):
    _random(_name, program=_fill_new)
for _name in ("uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "normal_", "bernoulli_.float"):
    _random(_name, program=_fill_in_place)
_random("bernoulli.p", program=_fill_new)


def _like(fill: Fill, tools: Any, op: Any, x: Any, **kwargs: Any) -> Any:
    layout = tools.layout(x)
    layout = layout.replace(dtype=kwargs.get("dtype") or layout.dtype, stride=None)
    return _draw(tools, layout, fill, kwargs.get("generator"))


def _randint_like(tools: Any, op: Any, x: Any, *bounds: Any, **kwargs: Any) -> Any:
    low, high = (0, *map(int, bounds))[-2:]
    return _like(Fill("random_.from", (low, high)), tools, op, x, **kwargs)


_random("rand_like", program=partial(_like, uniform))
_random("randn_like", program=partial(_like, normal))
_random("randint_like", program=_randint_like)

# ── with parameters that are tensors ──────────────────────────────────────────────────────────────────────────────────


def _below(tools: Any, op: Any, p: Any, *, generator: Any = None) -> Any:
    return _draw(tools, tools.layout(p), uniform, generator).lt(p).to(p.dtype)


def _below_in_place(tools: Any, op: Any, x: Any, p: Any, *, generator: Any = None) -> Any:
    layout = tools.layout(x)
    drawn = _draw(tools, layout.replace(dtype=p.dtype if p.is_floating_point() else torch.float32), uniform, generator)
    return x.copy_(drawn.lt(p))


def _below_new(tools: Any, op: Any, x: Any, p: Any, *, generator: Any = None) -> Any:
    return _below_in_place(tools, op, aten.empty_like(x), p, generator=generator)


def _normal(tools: Any, op: Any, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """mean + std · normal, either of them a tensor."""
    tensors = [x for x in (mean, std) if tools.is_distributed(x)]
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    layout = tools.layout(max(tensors, key=lambda x: tuple(x.shape) == tuple(shape)))
    if layout.shape != shape:
        layout = Layout.of(layout.mesh, [[whole(n)] for n in shape], (), layout.dtype)
    return _draw(tools, layout, normal, generator) * std + mean


_random("bernoulli", program=_below)
_random("bernoulli.Tensor", program=_below_new)
_random("bernoulli_.Tensor", program=_below_in_place)
_random("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", program=_normal)

# ── dropout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dropout(tools: Any, op: Any, x: Any, p: float, train: bool | None = True) -> tuple[Any, Any]:
    layout = tools.layout(x)
    flags = layout.replace(dtype=torch.bool, partials=())
    if train is False or p == 0:
        return x.clone(), aten.ones_like(x, dtype=torch.bool)
    kept = _draw(tools, flags, Fill("bernoulli_.float", (1 - p,)))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return tools.wrap(tools.each(_scaled, layout.mesh, x, kept, scale), layout), kept


def _scaled(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    return x * kept * scale


_random("native_dropout", program=_dropout)
rule("native_dropout_backward", "..., ... -> ...", linear=((0,),))

# ── leaky by chance ───────────────────────────────────────────────────────────────────────────────────────────────────


def _rrelu(
    tools: Any, op: Any, x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any, **kwargs: Any
) -> Any:
    """Negative elements times a random slope, which is written to `noise`; outside of training their mean slope."""
    given: list[Any] = [*rest, *[False, None][len(rest) :]]
    training, generator = given[:2]
    in_place = op._schema.name.endswith("_")
    if not kwargs.get("training", training):
        return (aten.leaky_relu_ if in_place else aten.leaky_relu)(x, (lower + upper) / 2)
    drawn = _draw(tools, tools.layout(x), Fill("uniform_.default", (lower, upper)), generator)
    noise.copy_(aten.where(x <= 0, drawn, 1.0))
    return x.mul_(noise) if in_place else x * noise


_random("rrelu_with_noise", program=_rrelu)
_random("rrelu_with_noise_", program=_rrelu)

# ── all at once ───────────────────────────────────────────────────────────────────────────────────────────────────────


def seeded(tools: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on whole tensors, on every rank, from one seed."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mesh = tools.mesh(*given.values())
    if tracing_context() is not None:
        raise OperatorError(
            f"{tools.operator} in a compiled function: it draws from one seed, which would be the same in every call; call it "
            "outside of compiled functions"
        )
    seed = next_seed(given.pop("generator", None))

    def spread(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [spread(item) for item in value]
        return tools.local(tools.replicated(value, mesh, tools.operator)) if isinstance(value, Tensor) else value

    kernel = partial(_with_seed, op, tuple(given), "generator" in names, seed)
    outs = tools.each(kernel, mesh, *map(spread, given.values()))
    wrapped = [_replicated(tools, out, mesh) for out in (outs if isinstance(outs, tuple) else (outs,))]
    return tuple(wrapped) if isinstance(outs, tuple) else wrapped[0]


def _with_seed(op: Any, names: Sequence[str], takes_generator: bool, seed: int, *values: Any) -> Any:
    given = dict(zip(names, values, strict=True))
    device = next(value.device for value in values if isinstance(value, Tensor))
    if takes_generator:
        return op(**given, generator=Generator(device).manual_seed(seed))
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.manual_seed(seed)
        return op(**given)


def _replicated(tools: Any, local: Any, mesh: Any) -> Any:
    if not isinstance(local, Tensor):
        return local
    return tools.wrap(local, Layout.of(mesh, [[whole(n)] for n in local.shape], (), local.dtype, local.stride()))


_random("multinomial poisson binomial _standard_gamma _sample_dirichlet", program=seeded)
