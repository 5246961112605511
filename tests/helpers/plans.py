"""Meshes without a world, and layouts on them, for tests of plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

from shardwise import Mesh, Partial, Replicate, Shard
from shardwise.layouts.from_placements import make_layout
from shardwise.layouts.layout import Layout

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
NAMES = "abcd"


def mesh_of(*sizes: int, **words: Any) -> Mesh:
    return Mesh(tuple(NAMES[: len(sizes)]), sizes, range(math.prod(sizes)), "cpu", "simulated", **words)


def layouts(mesh: Mesh, shape: tuple[int, ...], options: list[Any]) -> list[Layout]:
    """Every placement of every axis, in every order of axes."""
    found = {}
    for order in itertools.permutations(mesh.axes):
        for placements in itertools.product(options, repeat=mesh.ndim):
            found[make_layout(shape, mesh, dict(zip(order, placements, strict=True)))] = None
    return list(found)


def pairs(mesh: Mesh, shape: tuple[int, ...], options: list[Any], count: int, seed: int = 0) -> Iterator[tuple[Layout, Layout]]:
    every = layouts(mesh, shape, options)
    chance = random.Random(seed)
    for _ in range(count):
        yield chance.choice(every), chance.choice(every)


SHARDED = [Replicate(), Shard(0), Shard(1)]
ALL = [*SHARDED, Partial("sum"), Partial("avg")]
