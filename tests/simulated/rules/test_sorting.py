"""What orders, scans, counts, masks and diagonals communicate, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from tests.helpers.one_device import MESHES, distributed

MESH = sw.init_mesh(a=2, b=2)
X = sw.distribute_tensor(torch.arange(192.0).view(8, 6, 4).sin(), MESH, {"a": Shard(0), "b": Shard(1)})
LINE = sw.distribute_tensor(torch.arange(64.0), MESH, {"a": Shard(0)})
NUMBERS = sw.distribute_tensor(torch.tensor([1, 0, 3, 1, 0]), MESH, {"a": Shard(0)})

#: A call, the collectives it runs, and the layout of its first result.
CASES: dict[str, tuple[Callable[[], Any], dict[str, int], str]] = {
    "a median of a whole dim": (lambda: X.median(2), {}, "f32[8@a, 6@b]"),
    "a median of a sharded dim moves the sharding": (lambda: X.median(0), {"all_to_all": 1}, "f32[6@b, 4@a]"),
    "a median of everything": (lambda: X.nanmedian(), {"all_gather": 1}, "f32[]"),
    "a median of a line": (lambda: LINE.median(0), {"all_gather": 1}, "f32[]"),
    "running extremes of a whole dim": (lambda: X.cummin(-1), {}, "f32[8@a, 6@b, 4]"),
    "running extremes of a sharded dim": (lambda: X.cummax(0), {"all_gather": 1}, "f32[8@a, 6@b, 4]"),
    "the best of a long dim": (lambda: LINE.topk(2), {"all_gather": 1}, "f32[2]"),
    "a search in a sharded sequence": (lambda: torch.searchsorted(LINE, 5.0), {}, "i64[ | sum@a]"),
    "counts": (lambda: NUMBERS.bincount(), {"all_reduce": 1}, "i64[4 | sum@a]"),
    "counts in given limits": (lambda: LINE.histc(4, 0, 64), {}, "f32[4 | sum@a]"),
    "a mask tells its counts": (lambda: LINE[LINE > 30], {"all_gather": 1}, "f32[33@a{1,32}]"),
    "elements that are not zero": (lambda: LINE.nonzero(), {"all_gather": 1}, "i64[63@a{31,32}, 1]"),
    "the diagonal of a grid": (lambda: X.diagonal(1), {}, "f32[4, 5@(a,b){2,2,0,1}]"),
    "a roll of a sharded dim": (lambda: LINE.roll(3), {"all_gather": 1, "all_to_all": 1}, "f32[64@a]"),
    "a transform of two sharded dims": (lambda: torch.fft.fft2(X, dim=(0, 1)), {"all_to_all": 2}, "c64[8@b, 6, 4@a]"),
    "matrices of a sharded batch": (lambda: torch.linalg.eigvalsh(X[:, :4].contiguous()), {"all_to_all": 1}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_collectives(name: str) -> None:
    call, counts, layout = CASES[name]
    with sw.trace_comm() as log:
        out = call()
    assert log.counts() == counts and not log.fallbacks
    first = out if isinstance(out, DTensor) else out[0]
    assert repr(first.layout) == layout or not layout


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a negative number": (lambda: (NUMBERS - 1).bincount(), RuntimeError, r"not negative, got -1 in i64\[5@a\]"),
    "too few elements": (
        lambda: LINE.masked_scatter(LINE > 60, torch.ones(2)),
        RuntimeError,
        "the mask selects 3 elements, but source has only 2",
    ),
    "a mask that is too short": (
        lambda: LINE[torch.ones(63, dtype=torch.bool)],
        IndexError,
        r"a mask of shape \[63\] does not fit dims \[64\] of \[64\]",
    ),
    "weights of another length": (
        lambda: torch.bincount(NUMBERS, torch.ones(4)),
        RuntimeError,
        "same length as input",
    ),
    "a mask in a compiled function": (
        lambda: sw.capture(lambda x: x[x > 3])(LINE),
        Exception,
        "aten.index in a compiled function: how many elements it selects depends on data; call it outside",
    ),
    "counts in a compiled function": (
        lambda: sw.capture(torch.bincount)(NUMBERS),
        Exception,
        "bincount in a compiled function: the length of its result depends on data; call it outside",
    ),
    "a singular matrix on one rank": (
        lambda: torch.linalg.inv(sw.distribute_tensor(torch.stack([torch.eye(2), torch.zeros(2, 2)]), MESH, {"a": Shard(0)})),
        torch.linalg.LinAlgError,
        "Batch element 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("name", ["det", "logdet", "inverse", "solve"])
def test_gradients_of_matrices_however_they_lie(name: str, by_rows: bool) -> None:
    """Gradients of determinants and solutions ask how a matrix lies, to know of what they were given the factors."""
    function = (lambda x: torch.linalg.solve(x, torch.ones_like(x))) if name == "solve" else getattr(torch, name)
    for shape in ((3, 3), (1, 3, 3), (5, 3, 3)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 4 * torch.eye(3)
        for placement in (Replicate(), Shard(0), Shard(len(shape) - 1)):
            dense, spread = matrix.clone(), distributed(matrix, MESHES["2"], [Replicate()])
            if not by_rows:
                dense, spread = dense.mT, spread.mT
            dense = dense.detach().requires_grad_()
            spread = spread.redistribute(placements=[placement]).detach().requires_grad_()
            (want,), (got,) = (torch.autograd.grad(function(x).sum(), x) for x in (dense, spread))
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m, s=shape, p=placement: f"{s}, {p}: {m}")
