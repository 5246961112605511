"""Bad input raises one of our errors: the operator, the layouts, both numbers and the remedy, before any communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import CommunicationError, DTensor, LayoutError, MeshError, OperatorError, Replicate, Shard
from shardwise.errors import PlanError
from tests.helpers.one_device import distributed

MESH = sw.init_mesh(dp=2, tp=2)
X = distributed(torch.ones(4, 6), MESH, [Shard(0), Replicate()])
Y = distributed(torch.ones(6, 4), MESH, [Shard(1), Replicate()])
OTHER = sw.ones(4, 6, mesh=sw.init_mesh(z=2))
LOCAL = sw.Bundle([torch.ones(2, 3), torch.ones(3, 3), torch.ones(2, 3), torch.ones(2, 3)])

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "meshes that differ": (
        lambda: X + OTHER,
        MeshError,
        r"aten\.add: its tensors are on different meshes: f32\[4@dp, 6\] on \(dp=2, tp=2\), f32\[4, 6\] on \(z=2\); put them",
    ),
    "redistribute to another mesh": (
        lambda: X.redistribute(sw.Mesh(("z",), (2,), range(2), "cpu", "processes"), [Shard(0)]),
        PlanError,
        r"redistribute from mesh \(dp=2, tp=2\) of 4 ranks \(simulated\) to mesh \(z=2\) of 2 ranks \(processes\): no commun",
    ),
    "a dim the tensor lacks": (
        lambda: X.redistribute(placements=[Shard(3), Replicate()]),
        LayoutError,
        r"Shard\(3\) on axis 'dp' .* has 2 dims \[4, 6\]; use a dim from -2 to 1",
    ),
    "too few placements": (lambda: X.redistribute(placements=[Shard(0)]), LayoutError, "takes 2 placements, got 1"),
    "an unknown axis": (
        lambda: sw.distribute_tensor(torch.ones(3), MESH, {"pp": Shard(0)}),
        MeshError,
        r"mesh \(dp=2, tp=2\) has no axis 'pp'; its axes are dp, tp",
    ),
    "an unknown axis of a mesh": (lambda: MESH["pp"], MeshError, "has no axis 'pp'"),
    "not a mesh": (
        lambda: sw.zeros(3, mesh="cpu"),
        MeshError,
        r"\(mesh=, device_mesh=\) is a shardwise.Mesh or a torch DeviceMesh, got 'cpu'",
    ),
    "shards that do not fit": (
        lambda: DTensor.from_local(LOCAL, MESH, [Shard(0), Shard(1)], run_check=True),
        LayoutError,
        r"from_local: rank 1 gave \[3, 3\], f32\[4@dp, 6@tp\] has \[2, 3\] there",
    ),
    "a shape that shards do not make up": (
        lambda: DTensor.from_local(X.to_local(), MESH, [Shard(0), Replicate()], shape=(5, 6), run_check=True),
        LayoutError,
        r"the shards make up f32\[4@dp, 6\], but shape=\[5, 6\] was given",
    ),
    "data of another shape": (
        lambda: setattr(X, "data", torch.ones(2)),
        OperatorError,
        r"\.data of f32\[4@dp, 6\] on cpu takes a DTensor of its shape, dtype and device, got a plain tensor \[2\]",
    ),
    "out= of another shape": (
        lambda: torch.add(X, X, out=sw.ones(3, mesh=MESH)),
        OperatorError,
        r"aten\.add would resize a tensor that it writes to from \[3\] to \[4, 6\]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    call, error, text = CASES[name]
    with sw.trace_comm() as log, pytest.raises(error, match=text):
        call()
    assert all(record.kind == "shapes" for record in log.records), "only from_local asks, before it complains"


def test_a_mesh_larger_than_the_world() -> None:
    with sw.simulate(4), pytest.raises(MeshError, match=r"mesh \(dp=2, tp=4\) has 8 ranks, the world has 4"):
        sw.init_mesh(dp=2, tp=4)


def test_communication_can_be_forbidden() -> None:
    text = (
        r"aten\.mm at test_errors\.py:\d+ communicates \d+ bytes: it takes f32\[4@dp, 6\], f32\[6, 4@dp\] and needs "
        r"f32.* → f32.*\. Redistribute its inputs to layouts that fit before the operator, or allow it"
    )
    with sw.trace_comm() as log, sw.communication("forbid"):
        with pytest.raises(CommunicationError, match=text):
            X @ Y
        assert (X @ Y.redistribute()).shape == (4, 4), "what the user asks for is not refused"
    assert log.counts() == {"all_gather": 1}


def test_communication_can_be_reported_or_bounded() -> None:
    with sw.communication("warn"), pytest.warns(UserWarning, match=r"aten\.mm at .* communicates"):
        X @ Y
    with sw.communication("forbid", over_bytes=10_000):
        X @ Y


def test_an_operator_without_a_rule_is_gathered_visibly() -> None:
    a = distributed(torch.eye(4), MESH, [Shard(0), Replicate()])
    with sw.trace_comm() as log:
        got = torch.geqrf(a)[0]
    assert got.placements == (Replicate(), Replicate()) and "aten.geqrf" in log.fallbacks
    with sw.communication("forbid"), pytest.raises(CommunicationError, match="it has no rule, so its inputs are gathered"):
        torch.geqrf(a)


def test_what_torch_raises_is_raised_with_the_layouts() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        X @ X
    assert raised.value.__notes__ == ["in aten.mm on f32[4@dp, 6], f32[4@dp, 6]"]
