"""DTensors without data: they say so, and what is made of them has none either."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Mesh, Shard


@pytest.fixture
def mesh() -> Mesh:
    return sw.init_mesh(tp=2)


def meta(mesh: Mesh, *shape: int) -> DTensor:
    return sw.distribute_tensor(torch.empty(shape, device="meta"), mesh, [Shard(0)])


WAYS: dict[str, Callable[[Mesh], Any]] = {
    "distributed": lambda mesh: meta(mesh, 4, 4),
    "from_local": lambda mesh: DTensor.from_local(torch.empty(2, 4, device="meta"), mesh, [Shard(0)]),
    "to": lambda mesh: sw.ones(4, 4, mesh=mesh, placements=[Shard(0)]).to("meta"),
    "like": lambda mesh: torch.empty_like(sw.ones(4, 4, mesh=mesh), device="meta"),
    "module": lambda mesh: sw.distribute_module(nn.Linear(4, 4, device="meta"), mesh).weight,
    "moved module": lambda mesh: sw.distribute_module(nn.Linear(4, 4), mesh).to("meta").weight,
    "copied": lambda mesh: copy.deepcopy(meta(mesh, 4, 4)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_data_says_so(way: str, mesh: Mesh) -> None:
    x = WAYS[way](mesh)
    assert isinstance(x, DTensor) and x.is_meta and not x.is_cpu and x.device.type == "meta" and x.to_local().is_meta
    for _ in range(2):  # the second time the calls are known
        found = [x + 1, x @ x, x.sum(), *x.split(2), x.t(), x[0], torch.cat([x, x]), x.view(2, 8), x.clone()]
        found += [
            *x.max(1),
            *x.max(0),
            x.softmax(0),
            x.sort(0).values,
            x.cumsum(0),
            torch.rand_like(x),
            torch.bernoulli(x),
            x.redistribute(mesh, [Shard(1)]),
        ]
        for y in found:
            assert isinstance(y, DTensor) and y.is_meta and y.to_local().is_meta, y
    assert not (sw.ones(4, 4, mesh=mesh, placements=x.placements) + 1).is_meta


def test_it_has_no_values_to_give(mesh: Mesh) -> None:
    x = meta(mesh, 4, 4)
    with pytest.raises(NotImplementedError, match="no data"):
        x.cpu()
    with pytest.raises(NotImplementedError, match="no data"):
        sw.ones(4, 4, mesh=mesh).copy_(x)
    with pytest.raises(sw.OperatorError, match=r"on meta takes a DTensor of its shape, dtype and device, got .* on cpu"):
        x.data = sw.ones(4, 4, mesh=mesh)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).is_meta


def test_a_module_is_trained_without_data_then_filled(mesh: Mesh) -> None:
    model = sw.distribute_module(nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 2, device="meta")), mesh)
    weight: Any = model[0].weight
    for optimizer in (torch.optim.SGD(model.parameters(), momentum=0.9), torch.optim.AdamW(model.parameters(), foreach=True)):
        model(torch.empty(3, 4, device="meta")).sum().backward()
        optimizer.step()
    assert weight.grad.is_meta and optimizer.state[weight]["exp_avg"].is_meta
    model.to_empty(device="cpu")
    assert not model[0].weight.is_meta and not model[0].weight.to_local().is_meta
    model.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict())
    assert model(torch.ones(3, 4)).full_tensor().isfinite().all()


def test_compiled(mesh: Mesh) -> None:
    function = torch.compile(lambda x: (x @ x).relu().sum(0), backend="aot_eager")
    x, y = meta(mesh, 4, 4), sw.ones(4, 4, mesh=mesh, placements=[Shard(0)])
    for _ in range(2):  # each is a program of its own
        assert function(x).is_meta and function(x).to_local().is_meta
        assert function(y).tolist() == [16.0] * 4
