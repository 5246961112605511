"""Samples for the rules of shardwise/rules/pointwise.py; sizes are odd so that shards are uneven."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

#: Between 0 and 1 every function of the table is smooth, so that rounding in a partial sum is not blown up.
UNIT = torch.linspace(0.1, 0.9, 15).view(5, 3)
SIGNED = torch.linspace(-1.7, 1.9, 12).view(3, 4)
ABOVE = 1 + UNIT
WIDE = torch.linspace(-4.3, 3.9, 14).view(2, 7)
INTS = torch.arange(-7, 8).view(5, 3)
COUNTS = torch.arange(1, 16).view(5, 3)
BOOLS = INTS % 2 == 0
COMPLEX = torch.complex(SIGNED, SIGNED.flip(0))
ROW = torch.linspace(0.2, 0.8, 3)
COLUMN = torch.linspace(0.3, 1.1, 5).view(5, 1)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload) if overload else getattr(aten, packet)


def _each(names: str, *tensors: Tensor, **words: Any) -> dict[str, list[Sample]]:
    return {f"aten.{name}": [sample(_op(name), *tensors, **words)] for name in names.split()}


def _in_place(name: str, first: Tensor, *rest: Any, numbers: tuple[Any, ...] = ()) -> Sample:
    return sample(lambda *tensors: getattr(aten, name)(*tensors, *numbers), first, *rest, mutates=(0,))


SAMPLES: dict[str, list[Sample]] = {
    **_each("abs angle asin atanh cos cosh digamma erfinv frac frexp i0 lgamma log log10 log1p log2 logit mish", UNIT),
    **_each("nan_to_num reciprocal rsqrt sinc special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0", UNIT),
    **_each("special_bessel_y1 special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr", UNIT),
    **_each("special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_ndtri", UNIT),
    **_each("special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1", UNIT),
    **_each("special_spherical_bessel_j0 sqrt acos", UNIT),
    **_each("acosh", ABOVE),
    **_each("celu elu gelu hardsigmoid hardswish leaky_relu silu sin softplus tan erfc deg2rad rad2deg", WIDE),
    **_each("asinh atan ceil erf exp exp2 expm1 floor hardtanh relu round sigmoid sinh tanh trunc neg", WIDE),
    **_each("hardshrink softshrink sgn sign signbit isinf isnan isneginf isposinf logical_not clone zero", SIGNED),
    **_each("alias detach lift_fresh alias_copy detach_copy lift_fresh_copy lift _neg_view", SIGNED),
    **_each("_conj conj_physical", COMPLEX),
    **_each("bitwise_not", INTS),
    **_each("__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift", COUNTS, COUNTS[0]),
    **_each("bitwise_and bitwise_or bitwise_xor gcd lcm", INTS, COUNTS[:, :1]),
    **_each("clamp_max.Tensor clamp_min.Tensor copysign eq fmax fmin fmod ge gt le lt ne maximum", UNIT, ROW),
    **_each("minimum nextafter remainder special_xlog1py xlogy floor_divide", UNIT, ROW + 0.03),
    **_each("atan2 hypot igamma igammac logaddexp logaddexp2 polar pow special_zeta", ABOVE, COLUMN),
    **_each("heaviside logical_and logical_or logical_xor ldexp", SIGNED, ROW.new_tensor([0.0, 0.5, 0.0, 1.0])),
    **_each("special_chebyshev_polynomial_t special_chebyshev_polynomial_u", UNIT, COUNTS),
    **_each("special_hermite_polynomial_h special_hermite_polynomial_he", UNIT, COUNTS[:1]),
    **_each("special_chebyshev_polynomial_v special_chebyshev_polynomial_w", UNIT, COUNTS[:, :1]),
    **_each("special_laguerre_polynomial_l special_legendre_polynomial_p", UNIT, COUNTS[:1]),
    **_each("add.Tensor sub.Tensor rsub.Tensor mul div.Tensor", UNIT, COLUMN),
    **_each("complex", UNIT, UNIT.flip(0)),
    **_each("addcmul addcdiv", SIGNED[:, :3], COLUMN[:3], ROW),
    **_each("_prelu_kernel", SIGNED, ROW.new_tensor([0.1, 0.2, 0.3, 0.4])),
    **_each("_prelu_kernel_backward", WIDE, WIDE.flip(1), WIDE.flip(0)),
    **_each("gelu_backward hardsigmoid_backward hardswish_backward mish_backward sigmoid_backward", SIGNED, SIGNED.flip(1)),
    **_each("silu_backward tanh_backward logit_backward", UNIT, UNIT.flip(0)),
}
for kind in "tuvw":
    name = f"special_shifted_chebyshev_polynomial_{kind}"
    SAMPLES[f"aten.{name}"] = [sample(_op(name), UNIT, COUNTS[:1], atol=1e-3, rtol=1e-3)]
SAMPLES |= {
    "aten.mvlgamma": [sample(lambda x: aten.mvlgamma(x, 2), ABOVE)],
    "aten.polygamma": [sample(lambda x: aten.polygamma(1, x), ABOVE)],
    "aten.threshold": [sample(lambda x: aten.threshold(x, 0.2, 7.0), SIGNED)],
    "aten.add.Scalar": [sample(lambda x: aten.add.Scalar(x, 3.0), SIGNED)],
    "aten.sub.Scalar": [sample(lambda x: aten.sub.Scalar(x, 3.0), SIGNED)],
    "aten.rsub.Scalar": [sample(lambda x: aten.rsub.Scalar(x, 3.0, 2.0), SIGNED)],
    "aten.div.Scalar": [sample(lambda x: aten.div.Scalar(x, 3.0), SIGNED)],
    "aten.div.Tensor_mode": [
        sample(lambda x, y: torch.div(x, y, rounding_mode="floor"), SIGNED, COLUMN[:3]),
        sample(lambda x, y: torch.div(x, y, rounding_mode="trunc"), INTS, COUNTS),
    ],
    "aten.div.Scalar_mode": [sample(lambda x: aten.div.Scalar_mode(x, 0.3, rounding_mode="floor"), SIGNED)],
    "aten.clamp.default": [sample(lambda x: x.clamp(-0.5, 1), SIGNED), sample(lambda x: x.clamp(max=3), INTS)],
    "aten.clamp_max.default": [sample(lambda x: x.clamp_max(0.5), SIGNED)],
    "aten.clamp_min.default": [
        sample(lambda x: x.clamp_min(0.5), SIGNED),
        _in_place("clamp_min_", UNIT, numbers=(0.4,)),
    ],
    "aten.clamp.Tensor": [
        sample(lambda x, low, high: aten.clamp.Tensor(x, low, high), UNIT, ROW, COLUMN),
        sample(lambda x, high: aten.clamp.Tensor(x, None, high), UNIT, COLUMN),
    ],
    "aten.masked_fill.Scalar": [
        sample(lambda x, m: x.masked_fill(m, -3.0), UNIT, BOOLS),
        _in_place("masked_fill_", UNIT, BOOLS[:1], numbers=(2.0,)),
    ],
    "aten.masked_fill.Tensor": [sample(lambda x, m, v: x.masked_fill(m, v), UNIT, BOOLS, torch.tensor(2.5))],
    "aten.where.self": [
        sample(torch.where, BOOLS, UNIT, ROW),
        sample(lambda m, x: torch.where(m, x, -1.5), BOOLS, COLUMN),
    ],
    "aten.lerp": [
        sample(lambda x, y: torch.lerp(x, y, 0.3), UNIT, ROW),
        sample(torch.lerp, UNIT, UNIT.flip(0), COLUMN),
        _in_place("lerp_", UNIT, UNIT.flip(1), numbers=(0.7,)),
    ],
    "aten.elu_backward": [
        sample(lambda g, x: aten.elu_backward(g, 1.1, 1.0, 1.0, False, x), SIGNED, SIGNED.flip(0)),
    ],
    "aten.hardshrink_backward": [sample(lambda g, x: aten.hardshrink_backward(g, x, 0.5), SIGNED, SIGNED.flip(0))],
    "aten.softshrink_backward": [sample(lambda g, x: aten.softshrink_backward(g, x, 0.5), SIGNED, SIGNED.flip(0))],
    "aten.hardtanh_backward": [sample(lambda g, x: aten.hardtanh_backward(g, x, -1, 1), SIGNED, SIGNED.flip(0))],
    "aten.leaky_relu_backward": [
        sample(lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False), SIGNED, SIGNED.flip(0)),
    ],
    "aten.native_dropout_backward": [sample(lambda g, m: aten.native_dropout_backward(g, m, 2.0), UNIT, BOOLS)],
    "aten.rrelu_with_noise_backward": [
        sample(
            lambda g, x, noise: aten.rrelu_with_noise_backward(g, x, noise, 0.1, 0.3, True, False),
            SIGNED,
            SIGNED.flip(0),
            SIGNED.abs(),
        )
    ],
    "aten.softplus_backward": [sample(lambda g, x: aten.softplus_backward(g, x, 1.5, 2.0), SIGNED, SIGNED.flip(0))],
    "aten.threshold_backward": [sample(lambda g, x: aten.threshold_backward(g, x, 0.1), SIGNED, SIGNED.flip(0))],
    "aten.__ilshift__": [_in_place("__ilshift__", COUNTS, COUNTS[0])],
    "aten.__irshift__": [_in_place("__irshift__", COUNTS, COUNTS[0])],
    "aten._to_copy": [
        sample(lambda x: x.to(torch.float64), UNIT),
        sample(lambda x: x.to(torch.int32), WIDE),
        sample(lambda x: x.to(torch.bool), INTS),
        sample(lambda x: x.to(torch.complex64), UNIT),
        sample(lambda x: aten._to_copy(x, memory_format=torch.preserve_format), UNIT.t()),
    ],
    "aten.copy": [
        _in_place("copy_", UNIT, ROW),
        _in_place("copy_", INTS, UNIT),
        _in_place("copy_", UNIT, COUNTS[:, :1]),
        sample(aten.copy, UNIT, UNIT.flip(0)),
    ],
    "aten.fill": [
        sample(lambda x: aten.fill(x, 2.5), UNIT),
        sample(aten.fill, UNIT, torch.tensor(1.5)),
        _in_place("fill_", UNIT, numbers=(4.0,)),
        _in_place("fill_", INTS, torch.tensor(3)),
    ],
}
# More dtypes, numbers and in-place forms of the most used ones.
SAMPLES["aten.add.Tensor"] += [
    sample(lambda x, y: torch.add(x, y, alpha=3), INTS, COUNTS),
    sample(lambda x: x + 1.5, UNIT),
    sample(lambda x, y: x + y, BOOLS, UNIT),
    _in_place("add_", UNIT, ROW),
    _in_place("add_", UNIT, numbers=(2.0,)),
    sample(torch.add, (1, 4), (3, 1)),
    sample(torch.add, (), (3,)),
    sample(torch.add, (0, 3), (3,)),
]
SAMPLES["aten.sub.Tensor"] += [sample(lambda x: 1.5 - x, UNIT), _in_place("sub_", UNIT, COLUMN)]
SAMPLES["aten.mul"] += [
    sample(torch.mul, INTS, COUNTS),
    sample(lambda x: x * 2.5, UNIT),
    sample(lambda x: x * 2.5, INTS),
    sample(torch.mul, BOOLS, UNIT),
    _in_place("mul_", UNIT, ROW),
    _in_place("mul_", UNIT, numbers=(2.0,)),
]
SAMPLES["aten.div.Tensor"] += [
    sample(lambda x: x / 4.0, UNIT),
    sample(lambda x: 4.0 / x, UNIT),
    sample(torch.div, INTS, COUNTS),
    _in_place("div_", UNIT, ROW),
]
SAMPLES["aten.pow"] += [
    sample(lambda x: x**2, SIGNED),
    sample(lambda x: 2.0**x, SIGNED),
    sample(lambda x: x**3, INTS),
    sample(lambda x: (-3) ** x, INTS),
    sample(torch.pow, INTS, COUNTS[0] - 2),
    sample(torch.pow, INTS.to(torch.int8), torch.tensor(300)),
    sample(lambda x: x**True, BOOLS),
    _in_place("pow_", UNIT, numbers=(2,)),
    _in_place("pow_", INTS.to(torch.int16), COUNTS[:, :1] * 100),
]
SAMPLES["shardwise.int_pow"] = [
    sample(lambda x: torch.ops.shardwise.int_pow(x, 41), INTS),
    sample(torch.ops.shardwise.int_pow.Tensor, INTS, COUNTS[:, :1] - 3),
]
SAMPLES["aten.round"] += [sample(lambda x: torch.round(x, decimals=1), SIGNED)]
SAMPLES["aten.eq"] += [sample(torch.eq, INTS, COUNTS), sample(lambda x: x == 3, COUNTS)]
SAMPLES["aten.gt"] += [sample(lambda x: x > 0, INTS)]
SAMPLES["aten.bitwise_and"] += [sample(torch.bitwise_and, BOOLS, BOOLS[0])]
SAMPLES["aten.bitwise_not"] += [sample(torch.bitwise_not, BOOLS)]
SAMPLES["aten.logical_not"] += [sample(torch.logical_not, INTS)]
SAMPLES["aten.abs"] += [sample(torch.abs, COMPLEX), sample(torch.abs, INTS), _in_place("abs_", SIGNED)]
SAMPLES["aten.sgn"] += [sample(torch.sgn, COMPLEX)]
SAMPLES["aten.clone"] += [
    sample(torch.clone, INTS),
    sample(lambda x: x.t().contiguous(), UNIT),
    sample(lambda x: torch.clone(x, memory_format=torch.contiguous_format), BOOLS),
]
SAMPLES["aten.remainder"] += [sample(lambda x: x % 3, INTS), sample(lambda x: x % 0.37, UNIT)]
SAMPLES["aten.addcmul"] += [_in_place("addcmul_", UNIT, ROW, COLUMN)]
SAMPLES["aten.addcdiv"] += [_in_place("addcdiv_", UNIT, ROW, COLUMN)]
SAMPLES["aten.copysign"] += [sample(lambda x: torch.copysign(x, -1.0), SIGNED)]
SAMPLES["aten.xlogy"] += [sample(lambda x: torch.xlogy(2.0, x), UNIT)]
for name in ("exp", "sqrt", "neg", "relu", "sigmoid", "tanh", "floor", "rsqrt", "zero", "hardtanh", "silu"):
    SAMPLES[f"aten.{name}"] += [_in_place(f"{name}_", UNIT)]
