"""Functions of DTensors that are compiled in many ways, and how they are run and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise._torch.compiler import HAS_KEYS

Function = Callable[[DTensor, DTensor], Tensor]


AXES = [
    pytest.param(2, {"tp": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"tp": 4}, marks=pytest.mark.slow),
    (4, {"dp": 2, "tp": 2}),
    pytest.param(8, {"a": 2, "b": 2, "c": 2}, marks=pytest.mark.slow),
]


@contextlib.contextmanager
def fake_job(rank: int, size: int) -> Iterator[None]:
    """A job of `size` ranks in which this process is `rank`, and nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def functions(mesh: sw.Mesh) -> dict[str, Function]:
    """By name: functions of x, f32[8, 16] sharded along dim 0 by the first axis, and w, f32[16, 32] sharded along dim 1 by the
    last."""
    first, last = mesh.axes[0], mesh.axes[-1]
    rows = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    nothing = [Replicate()] * mesh.ndim

    def updated(x: DTensor, w: DTensor) -> Tensor:
        y = (x @ w).clone()
        y.add_(1)
        y[2:4] = 0
        return y.mul_(2).sum()

    def through_local(x: DTensor, w: DTensor) -> Tensor:
        y = DTensor.from_local(torch.sin(x.to_local()), mesh, rows, run_check=False)
        return (y @ w).square().sum()

    def spread_out(x: DTensor, w: DTensor) -> Tensor:
        whole = x.full_tensor()
        return (sw.distribute_tensor(whole * 2, mesh, {first: Shard(1)}) @ w).square().mean()

    def made(x: DTensor, w: DTensor) -> Tensor:
        zeros = sw.zeros(8, 32, mesh=mesh, placements=rows)
        ones = sw.full((8, 32), 2.0, mesh=mesh, placements={last: Shard(1)})
        return (zeros + ones * (x @ w)).sum()

    def turned(x: DTensor, w: DTensor) -> Tensor:
        y = x.redistribute(placements={last: Shard(0)}).redistribute(placements={first: Shard(0)})
        return (y.redistribute(mesh, [Shard(1), *rows[1:]]) @ w).square().sum()

    def attended(x: DTensor, w: DTensor) -> Tensor:
        y = (x @ w).view(2, 4, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).square().sum()

    found: dict[str, Function] = {
        "products": lambda x, w: torch.relu(x @ w).square().mean(),
        "updated": updated,
        "through_local": through_local,
        "spread_out": spread_out,
        "made": made,
        "turned": turned,
        "attended": attended,
        "pending": lambda x, w: x.redistribute(placements=[Partial(), *rows[1:]]).sum() + (x @ w).exp().sum(),
        "softmax": lambda x, w: (torch.softmax(x @ w, -1) * w.sum(0)).sum(),
        "entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(8)),
        "normed": lambda x, w: F.layer_norm(x @ w, (32,)).square().sum(),
        "whole": lambda x, w: (x @ w).full_tensor().square().sum(),
        "asked": lambda x, w: (x @ w).sum() * len(x.placements) * x.mesh.size() * x.device_mesh.axis_sizes[first] / mesh.ndim,
        "nothing": lambda x, w: (x.redistribute(placements=nothing) @ w.redistribute(placements=nothing)).square().sum(),
        # what follows has uneven shards somewhere
        "joined": lambda x, w: torch.cat([x @ w, (x @ w).sin()], 1).square().sum(),
        "sliced": lambda x, w: (x @ w)[1:6].square().sum(),
        "chosen": lambda x, w: torch.softmax(x @ w, -1)[:, 0].sum(),
        "picked": lambda x, w: (x @ w)[3].square().sum(),
        "stacked": lambda x, w: torch.cat([x @ w, (x @ w).cos()], 0).square().sum(),
        "chunked": lambda x, w: sum((k + 1) * part.square().sum() for k, part in enumerate((x @ w).chunk(3))),
    }
    if HAS_KEYS:  # before, Dynamo knows no `x.layout` but torch's
        found["same"] = lambda x, w: ((x * 2).redistribute(placements=x.layout).t() @ (x @ w)).square().sum()
    return found


UNEVEN = ("joined", "sliced", "chosen", "picked", "stacked", "chunked")


def inputs(mesh: sw.Mesh, rows: int = 8) -> tuple[DTensor, DTensor]:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, 16, generator=draw), torch.randn(16, 32, generator=draw) / 4
    first, last = mesh.axes[0], mesh.axes[-1]
    return (
        sw.distribute_tensor(x, mesh, {first: Shard(0)}).requires_grad_(),
        sw.distribute_tensor(w, mesh, {last: Shard(1)}).requires_grad_(),
    )


def values(function: Function, mesh: sw.Mesh, rows: int = 8) -> list[Tensor]:
    """The result and the gradients, as plain tensors."""
    x, w = inputs(mesh, rows)
    y = function(x, w)
    y.backward()
    grads = [t.grad.full_tensor() for t in (x, w) if t.grad is not None]
    assert all(t.grad is None or t.grad.layout.placements == t.layout.placements for t in (x, w))
    return [y.detach().full_tensor() if isinstance(y, DTensor) else y.detach(), *grads]


def assert_same(got: list[Tensor], want: list[Tensor], about: str) -> None:
    assert len(got) == len(want), about
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, msg=lambda m, i=i: f"{about}, value {i}: {m}")
