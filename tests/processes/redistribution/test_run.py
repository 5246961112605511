"""Redistribution on Gloo: every rank draws the same pairs of layouts and ends with exactly what the target says, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.layouts.layout import Layout
from shardwise.redistribution.run import move
from tests.helpers.layout_moves import BITS, KINDS, agree, check_piece, exact, layouts, pairs, reduced, spread

#: shape, axes, kinds, dtype
Tensors = list[tuple[tuple[int, ...], dict[str, int], tuple[str, ...], torch.dtype]]
CASES: dict[int, Tensors] = {
    4: [
        ((5, 4), {"a": 2, "b": 2}, KINDS, torch.float32),
        ((8, 3), {"a": 4}, KINDS, torch.float64),
        ((4, 2, 3), {"a": 2, "b": 2}, ("sum", "max"), torch.float32),
        ((6, 4), {"a": 2, "b": 2}, BITS, torch.int64),
    ],
    8: [
        ((5, 4), {"a": 2, "b": 2, "c": 2}, KINDS, torch.float32),
        ((8, 6), {"a": 4, "b": 2}, KINDS, torch.float32),
        ((4, 2, 3), {"a": 2, "b": 2, "c": 2}, ("sum",), torch.float32),
        ((9, 8), {"a": 2, "b": 4}, (*BITS, "sum"), torch.int32),
    ],
}
PAIRS = 200


def drawn(ranks: int, world: str) -> list[tuple[Layout, Layout]]:
    """The pairs of layouts that are tried on so many ranks."""
    found = []
    for shape, axes, kinds, dtype in CASES[ranks]:
        mesh = sw.Mesh(axes, axes.values(), range(ranks), "cpu", world)
        found += pairs(layouts(shape, mesh, kinds, dtype=dtype), PAIRS // len(CASES[ranks]))
    return found


def moved(ranks: int) -> list[torch.Tensor]:
    """What this rank ends with for every pair; its form is checked here."""
    place, found = dist.get_rank(), []
    for have, want in drawn(ranks, "processes"):
        local = spread(have).shards[place]
        result = move(local, have, want)
        if result is not local:
            check_piece(result, want, place, f"{have} → {want}")
        found.append(result)
    return found


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_sample_of_pairs(ranks: int, pool: Any) -> None:
    by_rank = pool(ranks).run(moved, ranks)
    every = drawn(ranks, "simulated")
    assert len(every) == PAIRS == len(by_rank[0])
    for (have, want), shards in zip(every, zip(*by_rank, strict=True), strict=True):
        for place, (shard, goal) in enumerate(zip(reduced(shards, want), exact(want.reduced()), strict=True)):
            assert torch.equal(shard, goal), f"{have} → {want} at place {place}: {shard}, not {goal}"


def random_pairs(mesh: sw.Mesh) -> list[tuple[Layout, Layout]]:
    """From layouts with something partial over several axes to layouts with nothing partial."""
    every = layouts((5, 4), mesh, ("sum", "avg", "product"), odd=False)
    return pairs([one for one in every if len(one.partials) > 1], 60, [one for one in every if not one.partials])


def reduced_at_random(axes: dict[str, int]) -> list[torch.Tensor]:
    """What this rank ends with if summands are random; ranks along replicated axes hold the same ones."""
    mesh, found = sw.init_mesh(**axes), []
    point = dict(zip(mesh.axes, mesh.coordinates[dist.get_rank()], strict=True))
    for number, (have, want) in enumerate(random_pairs(mesh)):
        seed = [number, *(point[axis] for axis in mesh.axes if axis in have.states)]
        generator = torch.Generator().manual_seed(int("".join(map(str, seed))))
        found.append(move(torch.randn(have.local_shape(dist.get_rank()), generator=generator), have, want))
    return found


@pytest.mark.parametrize(("ranks", "axes"), [(4, {"a": 2, "b": 2}), (8, {"a": 2, "b": 2, "c": 2})], ids=str)
def test_replicas_agree_to_the_last_bit(ranks: int, axes: dict[str, int], pool: Any) -> None:
    by_rank = pool(ranks).run(reduced_at_random, axes)
    with sw.simulate(ranks):
        every = random_pairs(sw.init_mesh(**axes))
    for (have, want), shards in zip(every, zip(*by_rank, strict=True), strict=True):
        agree(shards, want, f"{have} → {want}")
