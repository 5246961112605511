"""Rematerialisation on Gloo ranks: the gradients of the model itself, no collective more, and the same error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise import RematError, Replicate, Shard, remat, save
from shardwise.remat import kept_values
from tests.helpers.gpt_block import POLICIES, gradients, model_and_input, same


def every_policy(axes: dict[str, int]) -> list[str]:
    """The policies under which gradients differ from those of the block itself."""
    block, x = model_and_input(sw.init_mesh(**axes))
    want = gradients(block, x, block)
    return [
        name
        for name, policy in POLICIES.items()
        if not same(gradients(block, x, lambda x: remat(block, x, save=policy)), want) or kept_values()  # noqa: B023
    ]


@pytest.mark.parametrize(("ranks", "axes"), [(2, {"tp": 2}), (2, {"dp": 2}), (4, {"dp": 2, "tp": 2})], ids=str)
def test_gradients_are_those_of_the_block_itself(ranks: int, axes: dict[str, int], pool: Any) -> None:
    assert pool(ranks).run(every_policy, axes) == [[]] * ranks


def traced(axes: dict[str, int], how: str, names: list[str]) -> list[str]:
    """The same for programs that are captured or compiled, which are compared with the program without blocks."""
    block, x = model_and_input(sw.init_mesh(**axes))

    def program(function: Any) -> Any:
        torch._dynamo.reset()
        return sw.capture(function) if how == "captured" else torch.compile(function, backend=how, fullgraph=True)

    want = gradients(block, x, program(lambda x: block(x)))
    return [
        name
        for name in names
        if not same(gradients(block, x, program(lambda x: remat(block, x, save=POLICIES[name]))), want)  # noqa: B023
    ]


@pytest.mark.parametrize("names", [["nothing", "default"], pytest.param(list(POLICIES), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("how", ["captured", "aot_eager"])
def test_gradients_of_traced_programs(how: str, names: list[str], pool: Any) -> None:
    assert pool(2).run(traced, {"tp": 2}, how, names, timeout=300) == [[]] * 2


def collectives(axes: dict[str, int]) -> list[tuple[int, int]]:
    """How many collectives forward and backward make: the block itself, and under policies that keep them."""
    block, x = model_and_input(sw.init_mesh(**axes))
    found = []
    for policy in (None, save.default, save.collectives | save.matmuls, save.nothing):
        with sw.trace_comm() as forward:
            out = (block(x) if policy is None else remat(block, x, save=policy)).square().sum()
        with sw.trace_comm() as backward:
            out.backward()
        found.append((len(forward.records), len(backward.records)))
    return found


def test_the_backward_makes_no_collective_more(pool: Any) -> None:
    for itself, *kept, nothing in pool(4).run(collectives, {"tp": 2, "dp": 2}):
        assert kept == [itself] * 2 and nothing[1] > itself[1]


def flips() -> list[str]:
    """What a branch that flips raises, in a block and around a compiled region in it."""
    mesh = sw.init_mesh(tp=2)
    torch.manual_seed(0)
    x, w = (sw.distribute_tensor(torch.randn(4, 4), mesh, [p]).requires_grad_() for p in (Replicate(), Shard(1)))
    region = torch.compile(lambda y, w: (y.sin() @ w).exp(), backend="aot_eager")
    found = []
    for inner in (lambda y, w: (y.sin() @ w).exp(), region):
        flag = sw.zeros(1, mesh=mesh)

        def function(x: Any) -> Any:
            y = x @ w
            return inner(y.sin() if bool(flag > 0) else y.cos(), w)  # noqa: B023

        out = remat(function, x)
        flag.add_(1)
        try:
            out.sum().backward()
        except RematError as error:
            found.append(str(error))
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_every_rank_raises_alike(pool: Any) -> None:
    first, second = pool(2).run(flips)
    assert first == second and len(first) == 2
    assert all("function is not the same the second time: the backward needs" in text for text in first)


def in_place_collective(policy: save.Policy) -> tuple[Tensor, Tensor, int]:
    """A plain tensor that torch's own collective writes to: the gradient, the value, and how often it was summed."""
    torch.manual_seed(dist.get_rank())
    x, calls = torch.randn(4, requires_grad=True), [0]

    def function(x: Tensor) -> Tensor:
        total = x.detach().exp()
        dist.all_reduce(total)
        calls[0] += 1
        return (x * total).sin()

    out = remat(function, x, save=policy)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return grad, torch.autograd.grad(function(x).sum(), x)[0], calls[0]


def test_collectives_of_torch(pool: Any) -> None:
    for policy in (save.nothing, save.collectives, save.everything):
        for got, want, _ in pool(2).run(in_place_collective, policy):
            assert torch.equal(got, want)
