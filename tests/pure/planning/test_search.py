"""The search for a plan is exact: an exhaustive search over the same graph finds nothing cheaper."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any

import pytest

import shardwise as sw
from shardwise.layouts.layout import Layout
from shardwise.planning.cost import ORDINARY
from shardwise.planning.search import _FAMILIES, Node, Space, search
from tests.helpers.plans import ALL, mesh_of, pairs


def cheapest(have: Layout, want: Layout, cap: float, without: tuple[str, ...]) -> float:
    """Dijkstra's search over the same graph with nothing left out: what the quick search must agree with."""
    space = Space(have, want, cap, without, False)
    space.straight = False
    best: dict[Node, float] = {space.start: 0.0}
    queue: list[tuple[float, int, Node]] = [(0.0, 0, space.start)]
    count = 0
    while queue:
        spent, _, node = heappop(queue)
        if node == space.goal:
            return spent
        for family in _FAMILIES:
            for edge in family(space, node, math.inf):
                total = spent + edge.seconds
                if total < best.get(edge.node, math.inf):
                    best[edge.node] = total
                    count += 1
                    heappush(queue, (total, count, edge.node))
    return math.inf


@pytest.mark.parametrize("without", [(), ("exchange",), ("exchange", "permute")], ids=str)
@pytest.mark.parametrize("slow", [(), ("a",)], ids=["alike", "slow"])
@pytest.mark.parametrize(("sizes", "shape"), [((2, 4), (16, 16)), ((2, 2, 2), (1024, 4096)), ((2, 3), (5, 4))], ids=str)
def test_the_search_is_exact(sizes: tuple[int, ...], shape: tuple[int, int], slow: tuple[str, ...], without: Any) -> None:
    mesh = mesh_of(*sizes, slow=slow)
    for have, want in pairs(mesh, shape, ALL, 12):
        cap = max(have.nbytes, want.nbytes)
        steps = search(have, want, cap, without)
        least = cheapest(have, want, cap, without)
        assert (steps is None) == (least == math.inf)
        if steps is not None:
            given_away = 0.0 if slow or without else 0.2 * ORDINARY.latency  # see `Space.straight`
            assert sw.plan(have, want, None, without).cost <= (least + given_away) * (1 + 1e-9), f"{have} → {want}"
