"""Samples for the rules of shardwise/rules/reduction.py; sizes are odd, and smaller than some meshes, so that shards are uneven
and empty."""

from __future__ import annotations

import math
from functools import partial

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten

INTS = torch.tensor([[3, -1, 7], [7, 7, -5], [0, 2, 2], [-5, 0, 4], [7, -5, 0]])
BOOLS = INTS > 1
#: Equal values in different shards, and a nan behind others.
TIES = INTS.float()
HOLED = TIES.clone()
HOLED[3, 1] = math.nan
LINE = torch.tensor([2.0, 5.0, -1.0])
ENDLESS = torch.tensor([[-math.inf, 2.0], [-math.inf, -math.inf], [-math.inf, math.inf]])
COMPLEX = torch.complex(TIES, TIES.flip(0))
HALF = torch.linspace(-3, 3, 15).view(5, 3).to(torch.bfloat16)
SOME = torch.tensor([0.5, -1.5, 2.0, 0.25, -0.75, 1.25]).repeat(3, 1)[:, :5].clone()

SAMPLES: dict[str, list[Sample]] = {
    "aten.sum": [
        sample(torch.sum, (5, 3)),
        sample(lambda x: x.sum(1), (5, 3)),
        sample(lambda x: x.sum((0, -1), keepdim=True), (2, 3, 3)),
        sample(lambda x: x.sum([]), (3, 2)),
        sample(lambda x: x.sum(0, dtype=torch.float64), (3, 1)),
        sample(torch.sum, INTS.int()),
        sample(lambda x: x.sum(0), BOOLS),
        sample(lambda x: x.sum(-1), ()),
        sample(lambda x: x.sum(0), (0, 3)),
    ],
    "aten.nansum": [sample(lambda x: x.nansum(0), HOLED, partial=False), sample(torch.nansum, (3, 4))],
    "aten.count_nonzero": [sample(torch.count_nonzero, INTS), sample(lambda x: torch.count_nonzero(x, 0), TIES)],
    "aten.mean": [
        sample(torch.mean, (5, 3)),
        sample(lambda x: x.mean(0), (5, 3)),
        sample(lambda x: x.mean((0, 2), keepdim=True), (3, 2, 1)),
        sample(lambda x: x.mean(0, dtype=torch.float64), INTS),
        sample(torch.mean, LINE),
        sample(lambda x: x.mean(-1), ()),
        sample(lambda x: x.mean(0), HALF, atol=0.05, rtol=0.02),
    ],
    "aten.prod": [
        sample(torch.prod, SOME),
        sample(lambda x: x.prod(0, keepdim=True), SOME),
        sample(lambda x: x.prod(1), INTS),
        sample(lambda x: x.prod(0), BOOLS),
    ],
    "aten.any.default": [sample(torch.any, BOOLS), sample(torch.any, SOME)],
    "aten.any.dim": [sample(lambda x: x.any(0), BOOLS), sample(lambda x: x.any(1, keepdim=True), INTS)],
    "aten.any.dims": [sample(lambda x: torch.any(x, dim=(0, 1)), BOOLS), sample(lambda x: torch.any(x, dim=()), INTS)],
    "aten.all.default": [sample(torch.all, ~BOOLS), sample(torch.all, SOME)],
    "aten.all.dim": [sample(lambda x: x.all(0), BOOLS), sample(lambda x: x.all(1, keepdim=True), INTS)],
    "aten.all.dims": [sample(lambda x: torch.all(x, dim=(0, 1)), BOOLS), sample(lambda x: torch.all(x, dim=()), INTS)],
    "aten.max.default": [sample(torch.max, TIES), sample(torch.max, LINE), sample(torch.max, INTS)],
    "aten.min.default": [sample(torch.min, TIES), sample(torch.min, LINE), sample(torch.min, BOOLS)],
    "aten.dist": [sample(torch.dist, (5, 3), (3,)), sample(lambda x, y: torch.dist(x, y, 1), (3, 1), (3, 2))],
    "aten.norm": [
        sample(lambda x: aten.norm.Scalar(x, 2), (5, 3)),
        sample(lambda x: aten.norm.ScalarOpt_dim(x, None, [0]), (5, 3)),
        sample(lambda x: aten.norm.ScalarOpt_dim_dtype(x, 1, [1], True, dtype=torch.float64), (3, 2)),
        sample(lambda x: aten.norm.ScalarOpt_dtype(x, 3, dtype=torch.float64), (3, 2)),
        sample(lambda x: x.norm(), (5, 3)),
    ],
    "aten.aminmax": [sample(torch.aminmax, TIES), sample(lambda x: torch.aminmax(x, dim=0, keepdim=True), INTS)],
    "aten.logsumexp": [
        sample(lambda x: x.logsumexp(0), (5, 3)),
        sample(lambda x: x.logsumexp((0, 2), keepdim=True), (3, 2, 1)),
        sample(lambda x: x.logsumexp(0), ENDLESS, partial=False),
        sample(lambda x: x.logsumexp(1), INTS),
        sample(lambda x: x.logsumexp(-1), ()),
    ],
    "aten.linalg_vector_norm": [
        *(
            sample(lambda x, p=p: torch.linalg.vector_norm(x, p, dim=0), SOME)
            for p in (2, 1, 3, 0.5, 0, -1, math.inf, -math.inf)
        ),
        sample(torch.linalg.vector_norm, (3, 2, 2)),
        sample(lambda x: torch.linalg.vector_norm(x, 2, (0, 1), True), COMPLEX),
        sample(lambda x: torch.linalg.vector_norm(x, dtype=torch.float64), LINE),
        sample(torch.linalg.vector_norm, HALF, atol=0.05, rtol=0.02),
    ],
}
for name in ("amax", "amin"):
    f = getattr(torch, name)
    SAMPLES[f"aten.{name}"] = [
        sample(partial(f, dim=0), TIES),
        sample(partial(f, dim=(1, 0), keepdim=True), INTS),
        sample(partial(f, dim=0), BOOLS),
        sample(f, HOLED, partial=False),
        sample(partial(f, dim=0, keepdim=True), LINE),
        sample(partial(f, dim=-1), ()),
    ]
for name in ("max", "min"):
    f = getattr(torch, name)
    SAMPLES[f"aten.{name}.dim"] = [
        sample(partial(f, dim=0), TIES, partial=False),
        sample(partial(f, dim=1, keepdim=True), (3, 5)),
        sample(partial(f, dim=0), INTS),
        sample(partial(f, dim=0), HOLED, partial=False),
        sample(partial(f, dim=0), BOOLS),
        sample(partial(f, dim=0), LINE),
        sample(partial(f, dim=0), ()),
    ]
for name in ("argmax", "argmin"):
    f = getattr(torch, name)
    SAMPLES[f"aten.{name}"] = [
        sample(partial(f, dim=0), TIES, partial=False),
        sample(f, TIES, partial=False),
        sample(f, HOLED, partial=False),
        sample(partial(f, dim=-1, keepdim=True), (2, 3, 2)),
        sample(partial(f, keepdim=True), (2, 1, 3)),
        sample(f, ()),
    ]
for name in ("var", "std", "var_mean", "std_mean"):
    f = getattr(torch, name)
    SAMPLES[f"aten.{name}.correction"] = [
        sample(f, (5, 3)),
        sample(partial(f, dim=0), (5, 3)),
        sample(partial(f, dim=(0, 2), correction=0, keepdim=True), (3, 2, 2)),
        sample(partial(f, dim=-1, correction=2), 100 + SOME, atol=2e-4),
    ]
SAMPLES["aten.var.correction"] += [
    sample(partial(torch.var, dim=0), COMPLEX, partial=False),
    sample(partial(torch.var, dim=0), HALF, atol=0.05, rtol=0.02),
]
