"""On a GPU: blocks that are computed again give the gradients of the model itself, also with random numbers, also compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import Shard, remat, save
from shardwise.remat import kept_values
from tests.helpers.gpt_block import POLICIES, Block, gradients, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "ignore:TensorFloat32 tensor cores", "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spread", [False, True], ids=["plain", "distributed"])
def test_gradients_are_those_of_the_block_itself(policy: str, spread: bool) -> None:
    torch.manual_seed(0)
    block, x = Block().cuda(), torch.randn(4, 8, 16, device="cuda")
    if spread:
        x = sw.distribute_tensor(x, sw.init_mesh(dp=2, device="cuda"), [Shard(0)])
    x = x.requires_grad_()

    def run(how: Any) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=not spread):
            return gradients(block, x, how)

    want = run(block)
    assert same(run(lambda x: remat(block, x, save=POLICIES[policy])), want)
    assert kept_values() == 0


@pytest.mark.parametrize("policy", [save.nothing, save.random, save.everything], ids=repr)
def test_random_numbers_are_drawn_again(policy: save.Policy) -> None:
    x, draws = torch.randn(64, 64, device="cuda", requires_grad=True), torch.Generator("cuda").manual_seed(3)

    def function(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5) * torch.rand_like(x)
        return F.dropout(y.exp(), 0.3) * torch.empty_like(y).bernoulli_(0.5, generator=draws)

    def run(how: Any) -> list[Tensor]:
        torch.manual_seed(5)
        draws.manual_seed(3)
        out = how(x)
        return [out, *torch.autograd.grad(out.sum(), x), torch.rand(4, device="cuda")]

    assert same(run(lambda x: remat(function, x, save=policy)), run(function))


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "wrapped"])
def test_compiled_regions(wrapped: bool) -> None:
    torch._dynamo.reset()
    memo: list[Tensor] = []
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=wrapped):
        x, w = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2))
        first, last = torch.compile(lambda x: (x @ w).sin()), torch.compile(lambda y, m: (y * m) @ w)
        middle = torch.compile(lambda y: (y.detach() > 0).to(torch.int32))

        def function(x: Tensor, remembers: bool) -> Tensor:
            y = first(x)
            if not (remembers and memo):
                memo[:] = [middle(y)]
            return last(y, memo[0]).cos()

        want = torch.autograd.grad(function(x, False).sum(), [x, w])
        for policy in (save.nothing, save.everything, save.matmuls, save.regions("*/compiled*")):
            for remembers in (False, True):
                memo.clear()
                got = torch.autograd.grad(remat(function, x, remembers, save=policy).sum(), [x, w])
                assert same(list(got), list(want)), (policy, remembers)


def test_memory_is_what_the_policy_says() -> None:
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def function(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin().exp().tanh()
        return x

    def held(how: Any) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = how(x)
        kept = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return kept // (4 * 1024 * 1024)

    assert held(function) == 16
    assert held(lambda x: remat(function, x, save=save.nothing)) == 1
    assert held(lambda x: remat(function, x, save=save.operators("aten.exp"))) == 9
