"""Samples for the rules of shardwise/rules/foreach.py: lists whose tensors have layouts of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten
POSITIVE = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) + 0.5
FOUND, HALF = torch.zeros(()), torch.tensor(0.5)
UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt tan tanh trunc"
)


def unary(name: str) -> list[Sample]:
    op, in_place = getattr(aten, f"_foreach_{name}"), getattr(aten, f"_foreach_{name}_")
    small = POSITIVE / 2 if name in ("acos", "asin") else POSITIVE
    return [
        sample(lambda x, y: op([x, y]), small, small[0], atol=1e-4),
        sample(lambda x, y: in_place([x, y]), small, small[0], mutates=(0, 1), atol=1e-4),
    ]


def binary(name: str, *more: Any) -> list[Sample]:
    op, in_place = getattr(aten, f"_foreach_{name}"), getattr(aten, f"_foreach_{name}_")
    return [
        sample(lambda x, y, z, w: op([x, y], [z, w], *more), POSITIVE, (4,), POSITIVE, (4,)),
        sample(lambda x, z: in_place([x, x[1]], [z, z[1]], *more), POSITIVE, POSITIVE, mutates=(0,)),
    ]


def scalars(name: str) -> list[Sample]:
    op, in_place = getattr(aten, f"_foreach_{name}"), getattr(aten, f"_foreach_{name}_")
    return [
        sample(lambda x, y: op.Scalar([x, y], 2.0), POSITIVE, (4,)),
        sample(lambda x, y: op.ScalarList([x, y], [2.0, 3.0]), POSITIVE, (4,)),
        sample(lambda x, y: in_place.ScalarList([x, y], [2.0, 3.0]), POSITIVE, (4,), mutates=(0, 1)),
    ]


def addc(name: str) -> list[Sample]:
    op, in_place = getattr(aten, f"_foreach_{name}"), getattr(aten, f"_foreach_{name}_")
    return [
        sample(lambda x, y, z: op.Scalar([x], [y], [z], 0.5), (5, 3), (5, 3), POSITIVE),
        sample(lambda x, y, z: in_place.ScalarList([x], [y], [z], [0.5]), (5, 3), (5, 3), POSITIVE, mutates=(0,)),
    ]


def addc_tensor(name: str) -> list[Sample]:
    op = getattr(aten, f"_foreach_{name}").Tensor
    return [sample(lambda x, y, z: op([x, x], [y, y], [z, z], torch.tensor([0.5, 2.0])), (5, 3), (5, 3), POSITIVE)]


def fused(name: str, lists: int, **words: Any) -> list[Sample]:
    """A fused optimizer on two parameters: `lists` lists of tensors like the parameters, then the step counts."""
    op = getattr(aten, name)

    def call(x: Any, y: Any, *state: Any) -> None:
        columns = [[x, y], *([s, s[0].clone()] for s in state)]
        steps = [torch.ones(()), torch.ones(())]
        if name == "_fused_sgd_":
            op(*columns, **words)
        elif name == "_fused_adagrad_":
            op(*columns, steps, **words)
        else:
            op(*columns, [], steps, **words)

    return [sample(call, (5, 3), (3,), *([POSITIVE] * lists), mutates=(0, 1, *range(3, 2 + lists)), partial=False)]


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.1,
    "momentum": 0.9,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": False,
}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}

SAMPLES: dict[str, list[Sample]] = {
    **{f"aten._foreach_{name}": unary(name) for name in UNARY.split()},
    **{f"aten._foreach_{name}": binary(name) for name in ("maximum", "minimum", "clamp_max", "clamp_min")},
    **{f"aten._foreach_{name}": binary(name) + scalars(name) for name in ("add", "sub", "mul", "div", "pow")},
    **{f"aten._foreach_{name}": addc(name) for name in ("addcmul", "addcdiv")},
    "aten._foreach_lerp": [
        sample(lambda x, y: aten._foreach_lerp.Scalar([x], [y], 0.3), (5, 3), (5, 3)),
        sample(lambda x, y, w: aten._foreach_lerp_.List([x], [y], [w]), (5, 3), (5, 3), POSITIVE, mutates=(0,)),
    ],
    "aten._foreach_copy": [
        sample(lambda x, y: aten._foreach_copy_([x], [y]), (5, 3), (5, 3), mutates=(0,)),
        sample(lambda x, y: aten._foreach_copy([x], [y]), (5, 3), (3,)),
    ],
    "aten._foreach_zero": [sample(lambda x, y: aten._foreach_zero_([x, y]), (5, 3), (4,), mutates=(0, 1))],
    "aten._foreach_norm": [
        sample(lambda x, y: aten._foreach_norm([x, y]), (5, 3), (4,)),
        sample(lambda x, y: aten._foreach_norm([x, y], 1), (5, 3), (4,)),
        sample(lambda x, y: aten._foreach_norm([x, y], float("inf")), (5, 3), (4,)),
    ],
    **{f"aten._foreach_{name}.Tensor": addc_tensor(name) for name in ("addcmul", "addcdiv")},
    "aten._amp_foreach_non_finite_check_and_unscale_": [
        sample(
            lambda x, y: aten._amp_foreach_non_finite_check_and_unscale_([x, y], FOUND.clone(), HALF),
            (5, 3),
            (4,),
            mutates=(0, 1),
        ),
    ],
    "aten._fused_adam_": fused("_fused_adam_", 3, **ADAM),
    "aten._fused_adamw_": fused("_fused_adamw_", 3, **ADAM),
    "aten._fused_sgd_": fused("_fused_sgd_", 2, **SGD),
    "aten._fused_adagrad_": fused("_fused_adagrad_", 2, **ADAGRAD),
}
