"""Compiled regions inside blocks that are run twice: each has its own values, whatever the others do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import RematError, Shard, remat, save
from shardwise.remat import kept_values
from shardwise.remat import record_replay as runs
from tests.helpers.gpt_block import gradients, model_and_input, plain, same

#: Dynamo looks at the gradients of a region's inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
POLICIES = [save.nothing, save.everything, save.matmuls, save.regions("*/compiled*"), save.default]
MESHES: list[dict[str, int]] = [{}, {"tp": 2}]


@pytest.fixture(params=[False, True], ids=["", "wrapped"])
def wrapped(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether torch shows a compiled region to dispatch modes as one operator."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=request.param):
        yield request.param


def given(axes: dict[str, int]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    x, w, v = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8)
    if axes:
        mesh = sw.init_mesh(**axes)
        x, w, v = (sw.distribute_tensor(t, mesh, {"tp": Shard(dim)}) for t, dim in ((x, 0), (w, 1), (v, 0)))
    return x.requires_grad_(), w.requires_grad_(), v.requires_grad_()


def grads(function: Any, *leaves: Any) -> list[Tensor]:
    return [plain(g) for g in torch.autograd.grad(function().sum(), leaves)]


class Regions:
    """Three compiled regions in one function: one gives floats, one whole numbers, and one floats of both. What the one in the
    middle gives is remembered if so asked, so that a second run skips it."""

    def __init__(self, x: Any, w: Any, v: Any, middle: str = "int32") -> None:
        self.leaves = (x, w, v)
        self.first = torch.compile(lambda x, w: (x @ w).sin())
        chosen = {"int32": lambda y: (y.detach() > 0).to(torch.int32), "float32": lambda y: y.exp().sin().cos()}
        self.middle = torch.compile(chosen[middle])
        self.last = torch.compile(lambda y, m, v: ((y * m) @ v).exp())
        self.memo: list[Any] = []
        self.remembers = False

    def __call__(self, x: Any) -> Any:
        y = self.first(x, self.leaves[1])
        if not (self.remembers and self.memo):
            self.memo[:] = [self.middle(y)]
        return self.last(y, self.memo[0], self.leaves[2]).cos()


@pytest.mark.parametrize(
    ("axes", "middle"),
    [
        ({}, "int32"),
        ({"tp": 2}, "float32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [({}, "float32"), ({"tp": 2}, "int32")]),
    ],
    ids=str,
)
def test_a_region_that_the_second_run_skips(wrapped: bool, axes: dict[str, int], middle: str) -> None:
    regions = Regions(*given(axes), middle)
    x = regions.leaves[0]
    want = grads(lambda: regions(x), *regions.leaves)
    for remembers in (False, True):
        regions.remembers = remembers
        for policy in POLICIES:
            regions.memo.clear()
            got = grads(lambda: remat(regions, x, save=policy), *regions.leaves)  # noqa: B023
            assert same(got, want), (remembers, policy)
    assert kept_values() == 0


def test_it_would_fail_with_one_queue_for_all_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what regions gave were taken in the order in which they gave it, the last would get the numbers of the skipped one."""
    queue: deque[Any] = deque()
    keep, back = runs.FirstRun.whole, runs.SecondRun.whole

    def record(self: Any, call: Any, facts: Any, run: Any) -> Any:
        out = keep(self, call, facts, run)
        queue.append(call)
        return out

    def replay(self: Any, call: Any, facts: Any, run: Any) -> Any:
        return back(self, queue.popleft() if facts is runs.REGION else call, facts, run)

    regions = Regions(*given({}))
    x = regions.leaves[0]
    want = grads(lambda: regions(x), *regions.leaves)
    monkeypatch.setattr(runs.FirstRun, "whole", record)
    monkeypatch.setattr(runs.SecondRun, "whole", replay)
    everywhere = save.regions("*/compiled*")
    assert same(grads(lambda: remat(regions, x, save=everywhere), *regions.leaves), want)
    regions.remembers = True
    regions.memo.clear()
    queue.clear()
    with pytest.raises((RuntimeError, IndexError)):
        assert same(grads(lambda: remat(regions, x, save=everywhere), *regions.leaves), want)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_one_region_many_times(wrapped: bool, axes: dict[str, int]) -> None:
    """Repeated, nested in other blocks, and the last of them not needed the second time."""
    x, w, _ = given(axes)
    region = torch.compile(lambda x, w: ((x @ w).sin() @ w).cos() * 0.5)

    def function(x: Any) -> Any:
        for _ in range(3):
            x = region(x, w).exp()
        return remat(lambda x: region(x, w) * region(x, w), x, save=save.matmuls)

    want = grads(lambda: function(x), x, w)
    for policy in POLICIES:
        assert same(grads(lambda: remat(function, x, save=policy), x, w), want), policy  # noqa: B023


def test_random_numbers_in_a_region(wrapped: bool) -> None:
    block, x = model_and_input()
    compiled = torch.compile(block)
    want = gradients(block, x, compiled)
    for policy in POLICIES:
        got = gradients(block, x, lambda x: remat(lambda x: F.dropout(compiled(x), 0.0), x, save=policy))  # noqa: B023
        assert same(got, want), policy


def test_random_numbers_behind_a_region(wrapped: bool) -> None:
    """A region that draws, and is kept, or is skipped by the second run: what is drawn after it is the same."""
    w, x, memo = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True), []
    region, side = torch.compile(lambda x: F.dropout(x @ w, 0.5).sin()), torch.compile(lambda x: F.dropout(x, 0.5))

    def function(x: Tensor) -> Tensor:
        if not memo:
            memo.append(side(torch.ones(8)))
        return F.dropout(F.dropout(region(x), 0.5).cos() @ w * memo[0], 0.5).exp()

    def run(how: Any) -> list[Tensor]:
        memo.clear()
        torch.manual_seed(3)
        return list(torch.autograd.grad(how(x).sum(), [x, w]))

    want = run(function)
    for policy in (*POLICIES, save.random, save.operators("higher_order.inductor_compiled_code")):
        assert same(run(lambda x: remat(function, x, save=policy)), want), policy  # noqa: B023


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_another_branch_around_a_region(wrapped: bool, axes: dict[str, int]) -> None:
    x, w, _ = given(axes)
    region = torch.compile(lambda x, w: (x @ w).sin() @ w)
    for policy in POLICIES:
        turn = iter([True, False])

        def function(x: Any) -> Any:
            y = x.sin() if next(turn) else x.cos()  # noqa: B023
            return region(y, w).exp()

        out = remat(function, x, save=policy)
        with pytest.raises(RematError, match="is not the same the second time: the backward needs"):
            out.sum().backward()


def test_writing_to_an_argument_in_a_region_is_refused() -> None:
    @torch.compile
    def region(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RematError, match="writes to argument 0 of the block"):
        remat(lambda x: region(x), x * 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "captured"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_regions_that_run_operator_by_operator(axes: dict[str, int], backend: str) -> None:
    x, w, v = given(axes)

    def inner(x: Any, w: Any) -> Any:
        return ((x @ w).sin() @ w).cos()

    region = sw.capture(inner) if backend == "captured" else torch.compile(inner, backend=backend, dynamic=False)

    def function(x: Any) -> Any:
        return region(region(x, w), v).exp()

    want = grads(lambda: function(x), x, w, v)
    for policy in POLICIES:
        assert same(grads(lambda: remat(function, x, save=policy), x, w, v), want), policy  # noqa: B023


def test_the_second_run_takes_the_program_of_the_first() -> None:
    """A size that varies gets a program for all sizes, which would do for the first size, too."""
    torch._dynamo.reset()
    w = torch.randn(8, 8, requires_grad=True)
    region = torch.compile(lambda x: (x @ w).sin().exp() * x.shape[0])
    xs = [torch.randn(n, 8, requires_grad=True) for n in (4, 5, 6, 4)]
    outs = [remat(lambda x: region(x.sin()).cos(), x, save=save.nothing) for x in xs]
    wants = [torch.autograd.grad((((x.sin() @ w).sin().exp()) * len(x)).cos().sum(), x)[0] for x in xs]
    for x, out, want in zip(xs, outs, wants, strict=True):
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)


@pytest.mark.parametrize("how", ["aot_eager", "captured"])
@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}], ids=str)
def test_modules_by_name_in_traced_programs(axes: dict[str, int], how: str) -> None:
    torch._dynamo.reset()
    (one, x), (other, _) = (model_and_input(sw.init_mesh(**axes) if axes else None) for _ in range(2))
    model = torch.nn.Sequential(one, other)

    def program() -> Any:
        return sw.capture(model) if how == "captured" else torch.compile(model, backend=how, fullgraph=True)

    want = gradients(model, x, program())
    sw.remat_module(model, "*", save=save.matmuls | save.collectives)
    assert same(gradients(model, x, program()), want)
