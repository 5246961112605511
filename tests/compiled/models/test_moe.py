"""Grouped products and the example's mixture of experts, compiled whole on Gloo ranks: how many tokens move is data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from examples.moe import MoE
from shardwise import DTensor, Shard
from tests.helpers.process_pool import Pool

Pools = Callable[[int], Pool]


def compiled(function: Any, how: str) -> Any:
    torch._dynamo.reset()
    return sw.capture(function) if how == "captured" else torch.compile(function, fullgraph=True, backend=how)


def gradients(out: Any, *leaves: Any) -> list[torch.Tensor]:
    return [grad.full_tensor() for grad in torch.autograd.grad(out.float().square().sum(), leaves)]


def run_layer(how: str, dtype: torch.dtype) -> None:
    mesh = sw.init_mesh(ep=2)
    torch.manual_seed(0)
    layer = MoE(16, 32, 5, mesh=mesh).to(dtype)
    x = sw.distribute_tensor(torch.randn(7, 16).to(dtype), mesh, [Shard(0)]).requires_grad_()
    leaves, near, off = [x, *layer.parameters()], *((0.05, 0.3) if dtype == torch.bfloat16 else (1e-5, 1e-4))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y, want = compiled(layer, how)(x), layer(x)
    torch.testing.assert_close(y.full_tensor(), want.full_tensor(), atol=near, rtol=near)
    for one, other in zip(gradients(y, *leaves), gradients(want, *leaves), strict=True):
        torch.testing.assert_close(one, other, atol=off, rtol=2 * near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["aot_eager", "captured", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer(pool: Pools, how: str, dtype: torch.dtype) -> None:
    pool(2).run(run_layer, how, dtype)


def run_products(how: str, cut: int, dtype: torch.dtype) -> None:
    """Experts shard, or their columns: forward and backward as on one device."""
    mesh = sw.init_mesh(ep=2)
    make = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, 16, generator=make).to(dtype), torch.randn(4, 16, 32, generator=make).to(dtype)
    ends = torch.tensor([2, 2, 8, 9], dtype=torch.int32)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    want = F.grouped_mm(a, b, offs=ends)
    dx = sw.distribute_tensor(x, mesh).requires_grad_()
    dw = sw.distribute_tensor(w, mesh, [Shard(cut)]).requires_grad_()
    y = compiled(lambda x, w, ends: F.grouped_mm(x, w, offs=ends), how)(dx, dw, ends)
    assert isinstance(y, DTensor)
    near, off = (0.05, 1.0) if dtype == torch.bfloat16 else (5e-3, 1e-1) if dtype == torch.float16 else (1e-5, 1e-3)
    torch.testing.assert_close(y.full_tensor(), want, atol=near, rtol=near)
    for one, other in zip(gradients(y, dx, dw), torch.autograd.grad(want.float().square().sum(), (a, b)), strict=True):
        torch.testing.assert_close(one, other, atol=off, rtol=near)


#: Each way of sharding with each dtype once; all of them, both ways of tracing, with --slow.
PRODUCTS = [
    pytest.param(how, cut, dtype, marks=[] if how == ["aot_eager", "captured"][(cut + number) % 2] else pytest.mark.slow)
    for how in ("aot_eager", "captured")
    for cut in (0, 1, 2)
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))
]


@pytest.mark.parametrize(("how", "cut", "dtype"), PRODUCTS)
def test_products(pool: Pools, how: str, cut: int, dtype: torch.dtype) -> None:
    pool(2).run(run_products, how, cut, dtype)
