"""The lower bound of a move is counted from index sets, and has the textbook values for reductions."""

from __future__ import annotations

import itertools

import pytest

import shardwise as sw
from shardwise.layouts.layout import Factor, Layout, whole
from shardwise.planning.bounds import lower_bound, missing
from tests.helpers.plans import S0, SHARDED, P, R, mesh_of, pairs


def held(layout: Layout, place: int) -> set[tuple[int, ...]]:
    spans = ([i for low, high in layout.runs(dim, place) for i in range(low, high)] for dim in range(layout.ndim))
    return set(itertools.product(*spans))


@pytest.mark.parametrize(("sizes", "shape"), [((2, 2), (5, 3)), ((2, 3), (4, 6)), ((2, 2, 2), (8, 6))], ids=str)
def test_what_is_missing_is_counted_from_sets(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    mesh = mesh_of(*sizes)
    every = list(pairs(mesh, shape, SHARDED, 40))
    if shape[1] % 2 == 0:
        strided = Layout.of(mesh, [[whole(shape[0])], [whole(shape[1] // 2), Factor(2, ("a",), (1, 1))]])
        every += [(strided, strided.replicated()), (strided.replicated(), strided)]
    for have, want in every:
        most = max(len(held(want, p) - held(have, p)) for p in range(mesh.size()))
        assert missing(have, want) == 4 * most == lower_bound(have, want)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_reductions_have_the_textbook_bounds(ranks: int) -> None:
    mesh = mesh_of(ranks)
    partials, whole_, cut = (sw.layout((64,), mesh, [p]) for p in (P, R, S0))
    assert lower_bound(partials, whole_) == 2 * (ranks - 1) * 256 // ranks
    assert lower_bound(partials, cut) == (ranks - 1) * 256 // ranks
    assert lower_bound(cut, whole_) == (ranks - 1) * 256 // ranks
    assert lower_bound(whole_, partials) == lower_bound(cut, partials) == 0
