"""Flattened meshes and measured links on Gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import transport
from shardwise.planning.cost import Link, links


def gather_ranks(axes: tuple[str, ...], words: dict[str, Any]) -> list[int]:
    """The ranks of this rank's group on the flattened mesh, in its order."""
    flat = sw.init_mesh(dp=2, pp=2, tp=2, **words).flatten(*axes)
    return transport(flat).all_gather(torch.tensor([dist.get_rank()]), flat, flat.axes).tolist()


@pytest.mark.parametrize("words", [{}, {"slow": "dp", "groups": "explicit"}], ids=str)
def test_a_collective_on_a_flattened_mesh(pool: Any, words: dict[str, Any]) -> None:
    near, far = [0, 1, 4, 5], [2, 3, 6, 7]
    assert pool(8).run(gather_ranks, ("dp", "tp"), words) == [near, near, far, far] * 2
    assert pool(8).run(gather_ranks, (), words) == [list(range(8))] * 8


def test_a_collective_on_axes_flattened_in_another_order(pool: Any) -> None:
    near, far = [0, 4, 1, 5], [2, 6, 3, 7]
    assert pool(8).run(gather_ranks, ("tp", "dp"), {}) == [near, near, far, far] * 2


def tensors_on_flattened(axes: tuple[str, ...], words: dict[str, Any]) -> None:
    flat, x = sw.init_mesh(dp=2, pp=2, tp=2, **words).flatten(*axes), torch.arange(20.0).view(10, 2)
    d = sw.distribute_tensor(x, flat, [Shard(0)])
    assert torch.equal(d.full_tensor(), x)
    assert torch.equal((d.T @ d).redistribute(flat, [Replicate()]).to_local(), x.T @ x)
    on_root = sw.distribute_tensor(x, flat.root, {flat.axes[0]: Shard(1)})
    assert torch.equal(on_root.full_tensor(), x)


@pytest.mark.parametrize("axes", [("dp", "pp"), ("pp", "tp"), ("dp", "tp"), ("tp", "dp")], ids=str)
@pytest.mark.parametrize("words", [{}, {"groups": "explicit"}], ids=str)
def test_tensors_on_a_flattened_mesh(pool: Any, axes: tuple[str, ...], words: dict[str, Any]) -> None:
    pool(8).run(tensors_on_flattened, axes, words)


def meshes_that_differ_in_facts() -> None:
    """They share groups: the aliases are the same, and so are the ranks."""
    x = torch.arange(16.0).view(4, 4)
    for words in ({}, {"slow": ("dp",)}, {"groups": "explicit"}, {}):
        mesh = sw.init_mesh(dp=2, tp=2, **words)
        mesh.flatten()
        partials = sw.distribute_tensor(x, mesh, [Shard(0), Shard(1)]).redistribute(placements=[Partial(), Partial()])
        assert torch.equal(partials.full_tensor(), x)


def test_meshes_that_differ_in_facts_share_groups(pool: Any) -> None:
    pool(4).run(meshes_that_differ_in_facts)


# ── calibrate ──


def measure(sizes: dict[str, int], words: dict[str, Any]) -> tuple[dict[str, Link], dict[str, Link], int]:
    mesh = sw.init_mesh(**sizes, **words)
    sw.plan(sw.layout((8, 8), mesh, {mesh.axes[0]: Shard(0)}), sw.layout((8, 8), mesh, {}))
    found = sw.calibrate(mesh)
    return found, dict(links(mesh)), sw.cache_info()["plans"].size


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"dp": 2, "tp": 2}, {}), ({"dp": 2, "one": 1, "tp": 4}, {"groups": "explicit"}), ({"all": 8}, {"slow": "all"})],
    ids=str,
)
def test_links_are_measured_alike_on_every_rank(pool: Any, sizes: dict[str, int], words: dict[str, Any]) -> None:
    ranks = 4 if sizes == {"dp": 2, "tp": 2} else 8
    replies = pool(ranks).run(measure, sizes, words)
    found, kept, plans = replies[0]
    assert all(reply == replies[0] for reply in replies), "bitwise the same"
    assert found == kept and not plans, "the planner reckons with them"
    assert found.keys() == sizes.keys()
    for axis, link in found.items():
        if sizes[axis] > 1:  # a loopback of processes on shared cores
            assert 1e-6 < link.latency < 1 and 1e-11 < link.per_byte < 1e-5


def measure_part() -> tuple[dict[str, Link], dict[str, Link]]:
    mesh = sw.init_mesh(outer=2, inner=2)
    before = dict(links(mesh))
    found = sw.calibrate(mesh["inner"])
    return found, {axis: link for axis, link in links(mesh).items() if link == before[axis]}


def test_only_the_axes_of_a_sub_mesh_are_measured(pool: Any) -> None:
    for found, unchanged in pool(4).run(measure_part):
        assert list(found) == ["inner"] and list(unchanged) == ["outer"]
