"""Operators that work element by element, with broadcasting. Every dim may be sharded; the words say what passes partial.

A partial sum passes where the operator is additive. A partial max or min passes where it is increasing *everywhere* and
gives nan for nan: not `log`, which gives nan for the candidates below 0, and not `sign`, which gives 0 for nan.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperatorError
from ..kernels.int_pow import of_truths, pow_kernel, truths
from ..layouts.layout import Layout
from ..propagation.notation import Call, Proposal, additive
from ..propagation.table import rule

#: Why placements that would do are not offered, where several rows have the reason in common.
NAN = "max min: a candidate that is nan would be lost"
TURNED = "max min: another argument may turn the order round"
JOINTLY = "max min product: in several arguments at a time"
GRADIENT = "max min product: what is partial of a gradient is a sum"
DOMAIN = "min: it would pass, as one kind of two, only because there are no values below"

# ── nothing passes ────────────────────────────────────────────────────────────────────────────────────────────────────

rule(
    "acos asin atanh cos cosh digamma erfinv frac frexp gelu hardswish i0 isinf isnan isneginf isposinf "
    "lgamma logit mish mvlgamma polygamma silu sin sinc special_airy_ai special_bessel_j0 "
    "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_i0e special_i1e "
    "special_modified_bessel_i0 special_ndtri special_spherical_bessel_j0 tan",
    "... -> ...",
)
rule("logical_not", "... -> ...", unoffered="max min: only of truth values")
rule("nan_to_num", "... -> ...", unoffered="sum max min product: what is nan or infinite is replaced when it is known")
rule("sgn sign signbit", "... -> ...", unoffered=f"{NAN}; product: nan has no sign")
rule("celu elu leaky_relu threshold", "... -> ...", unoffered=TURNED)
rule(
    "rsqrt special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1",
    "... -> ...",
    unoffered=DOMAIN,
)
rule(
    "atan2 bitwise_and bitwise_or bitwise_xor div.Tensor_mode div.Scalar_mode eq floor_divide fmod gcd heaviside hypot "
    "lcm logical_and logical_or logical_xor ne remainder special_chebyshev_polynomial_t "
    "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w "
    "special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l "
    "special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
    "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w _prelu_kernel",
    "..., ... -> ...",
    unoffered=JOINTLY,
)
rule("copysign fmax fmin ge gt le lt", "..., ... -> ...", unoffered=f"{NAN}; sum: of few values only")
rule("igamma igammac special_zeta", "..., ... -> ...", unoffered=f"{DOMAIN}; max: likewise")
rule("nextafter", "..., ... -> ...", unoffered="sum max min product: neighbours of summands are none of the sum")
POWERS: dict[str, Any] = {"unoffered": f"sum product: powers of parts overflow, or have no value; {TURNED}", "free": "exponent"}
POWERS["function"] = lambda call: Proposal((), (), program=truths) if of_truths(call) else None
rule("pow shardwise::int_pow", "..., ... -> ...", kernel=pow_kernel, **POWERS)
rule("rsub.Scalar", "..., ... -> ...", unoffered=TURNED)
rule("special_xlog1py xlogy", "..., ... -> ...", unoffered=f"sum: 0 times the logarithm of 0 is 0; {NAN}")

# ── a partial max, min or product passes ──────────────────────────────────────────────────────────────────────────────

rule(
    "asinh atan ceil clamp.default clamp_max.default clamp_min.default erf expm1 floor hardshrink hardsigmoid hardtanh "
    "relu round sigmoid sinh softplus softshrink special_i1 special_log_ndtr special_modified_bessel_i1 tanh trunc",
    "... -> ...",
    passes="up",
)
rule("exp exp2", "... -> ...", passes="up", unoffered="sum: powers of summands overflow where that of the sum does not")
rule("angle bitwise_not erfc special_erfcx", "... -> ...", passes="down")
# They have no value below where they begin, and if any candidate lies there, so does the least.
rule("acosh log log10 log1p log2 sqrt", "... -> ...", passes="min")
rule("abs reciprocal", "... -> ...", passes="product")
rule("__rshift__ __irshift__ bitwise_right_shift", "..., ... -> ...", passes="up")
rule("add.Scalar sub.Scalar", "..., ... -> ...", passes="up float")
rule("logaddexp logaddexp2", "..., ... -> ...", passes=("up", "up"), unoffered=JOINTLY)
rule("maximum clamp_min.Tensor", "..., ... -> ...", passes=("up", "up"), together="max")
rule("minimum clamp_max.Tensor", "..., ... -> ...", passes=("up", "up"), together="min", unoffered=JOINTLY)
rule("clamp.Tensor", "..., ..., ... -> ...", passes=("up", "up", "up"), unoffered=JOINTLY)
rule("masked_fill.Scalar", "..., ... -> ...", passes="up", unoffered="sum product max min: only of some values and masks")

# ── a partial sum passes ──────────────────────────────────────────────────────────────────────────────────────────────

rule("neg", "... -> ...", linear=((0,),), passes="down float")
rule("conj_physical", "... -> ...", linear=((0,),), passes="product")
rule("deg2rad rad2deg", "... -> ...", linear=((0,),), passes="up")
rule(
    "__lshift__ __ilshift__ bitwise_left_shift", "..., ... -> ...", linear=((0,),), unoffered="max min: bits may be shifted out"
)
# In both arguments together.
rule("add.Tensor sub.Tensor", "..., ... -> ...", linear=((0, 1),), passes="up float", unoffered=TURNED)
rule("rsub.Tensor", "..., ... -> ...", linear=((0, 1),), passes=(None, "up float"), unoffered=TURNED)
rule("complex lerp", "..., ... -> ...", linear=((0, 1),), unoffered=TURNED)
# In each argument.
rule("mul", "..., ... -> ...", linear=((0,), (1,)), together="product", unoffered=TURNED)
rule("div.Tensor", "..., ... -> ...", linear=((0,),), together="product", divisor="other", unoffered=TURNED)
rule("div.Scalar", "..., ... -> ...", linear=((0,),), divisor="other", unoffered=TURNED)
rule("ldexp", "..., ... -> ...", linear=((0,),), passes="up")
rule("polar", "..., ... -> ...", linear=((0,),))
rule("addcmul", "..., ..., ... -> ...", linear=((0, 1), (0, 2)), passes="up float")
rule("addcdiv", "..., ..., ... -> ...", linear=((0, 1),), passes="up float")
rule("where.self", "..., ..., ... -> ...", linear=((1, 2),), passes=(None, "up", "up"), unoffered=JOINTLY)
rule("masked_fill.Tensor", "..., ..., ... -> ...", linear=((0, 2),), passes=("up", None, "up"), unoffered=JOINTLY)
# In the gradient, which comes first.
rule(
    "elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward "
    "leaky_relu_backward logit_backward mish_backward native_dropout_backward rrelu_with_noise_backward "
    "sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward "
    "_prelu_kernel_backward",
    "..., ... -> ...",
    linear=((0,),),
    unoffered=f"{GRADIENT}; shard: what is not read while not training",
)

# ── everything passes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _as(call: Call, layout: Layout) -> Proposal:
    """The layout that is wanted of the argument for the result, whatever it is."""
    return Proposal((layout,), (call.result(0, layout.dims, layout.partials),))


rule("alias detach lift_fresh", function=lambda call: _as(call, call.tensors[0]))  # views, so nothing may move
# One that is only marked as a conjugate or a negative would be read as it lies in memory: below dispatch nobody asks.
rule("_conj", "... -> ...", linear=((0,),), passes="product", kernel=lambda *_: torch.conj_physical, copies=True)
rule("_neg_view", "... -> ...", linear=((0,),), passes="down float", kernel=lambda *_: torch.neg, copies=True)
rule("alias_copy clone detach_copy lift lift_fresh_copy zero", "... -> ...", passes="all")


# ── copies and fills ──────────────────────────────────────────────────────────────────────────────────────────────────


def _to_copy(call: Call) -> Proposal:
    layout, one = call.tensors[0], call.results[0]
    device = call["device"]
    if device is not None and device.type not in (layout.device.type, "meta"):
        raise OperatorError(
            f"{layout} cannot move to device {device}: a DTensor lives on its mesh's device, {layout.device}; "
            "take its full_tensor() there, or distribute it on a mesh of that device"
        )
    if layout.dtype != one.dtype:
        narrows = one.dtype.itemsize < layout.dtype.itemsize  # summands that cancel must not be rounded first
        kept: tuple[str, ...] = ("sum", "avg", "product") if additive((layout.dtype, one.dtype)) and not narrows else ()
        if layout.dtype.is_floating_point and one.dtype.is_floating_point:
            kept += ("max", "min")  # rounding keeps the order
        layout = layout.replace(partials=[(axis, kind) for axis, kind in layout.partials if kind in kept])
    return _as(call, layout)


rule("_to_copy", function=_to_copy)


def _copy(call: Call) -> Proposal:
    """The first argument keeps its layout, and the second takes it; its partial summands are copied as they are."""
    goal, source, one = *call.tensors, call.results[0]
    if goal.dtype != source.dtype and goal.partials:
        return Proposal(call.tensors, (), program=lambda tools, op, goal, source, *rest: op(goal, source.to(goal.dtype), *rest))
    lacking = goal.ndim - source.ndim
    dims = [
        [*goal.dims[lacking + i]] if n == goal.shape[lacking + i] else [*source.without(source.states).dims[i]]
        for i, n in enumerate(source.shape)
    ]
    want = source.replace(dims=dims, partials=goal.partials)
    return Proposal((goal, want), (goal.replace(stride=one.stride),))


rule("copy", function=_copy)


def _fill(call: Call) -> Proposal:
    """The value is written on every rank; the old one is not read, so nothing is reduced."""
    layout, one = call.tensors[0], call.results[0]
    wants: list[Layout] = [layout, *(value.replicated() for value in call.tensors[1:])]
    if call.written is not None:
        wants[0] = layout.reduced()
    return Proposal(tuple(wants), (layout.reduced().replace(stride=one.stride),))


rule("fill", function=_fill)
