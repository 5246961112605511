"""Integer powers on a GPU: those of Python's integers, by kernels and in compiled programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Shard
from tests.helpers.int_pow import DTYPES, EXPONENTS, SIGNED, bases, some, truth, wrapped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WHOLE = DTYPES[:5]
CONSTANT = (0, 1, 2, 3, 15, 31, 63, 70, EXPONENTS[71], 2**31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_power_is_that_of_python(dtype: torch.dtype) -> None:
    x = wrapped(bases(), dtype).cuda()
    for e in EXPONENTS:
        assert torch.equal(sw.int_pow(x, e).cpu(), truth(e, dtype)), e
    assert sw.int_pow(x[:0], 3).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_of_a_tensor_are_those_of_python(dtype: torch.dtype) -> None:
    x, most = wrapped(bases(), dtype), torch.iinfo(dtype).max
    for highest in (70, 2**31, most):
        powers, want = some(min(highest, most))
        got = sw.int_pow(x.cuda(), wrapped(powers, dtype).cuda()).cpu()
        assert torch.equal(got, want.to(signed(dtype)).view(dtype)), highest
    assert torch.equal(sw.int_pow(x.cuda(), wrapped([5], dtype).cuda()).cpu(), truth(5, dtype))


def signed(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in SIGNED else getattr(torch, f"int{8 * dtype.itemsize}")


@pytest.mark.parametrize("dtype", SIGNED, ids=str)
def test_negative_powers_are_those_of_the_host(dtype: torch.dtype) -> None:
    x = wrapped(bases(), dtype)
    e = torch.randint(-5, 6, x.shape).to(dtype)
    for base, exponent in ((x, e), (x[:401].view(1, -1), e[:7].view(-1, 1)), (x[:20].view(4, 5).t(), e[:4]), (x[3], e)):
        got, want = sw.int_pow(base.cuda(), exponent.cuda()), torch.pow(base, exponent)
        assert torch.equal(got.cpu(), want) and got.stride() == want.stride()


def test_compiled_with_a_constant_power() -> None:
    def function(*several: torch.Tensor) -> list[torch.Tensor]:
        return [sw.int_pow(x, e) for x in several for e in CONSTANT]

    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True)(*(wrapped(bases(), dtype).cuda() for dtype in WHOLE))
    want = [truth(e, dtype) for dtype in WHOLE for e in CONSTANT]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_compiled_with_symbolic_powers() -> None:
    def function(several: list[torch.Tensor], e: int, y: torch.Tensor) -> list[torch.Tensor]:
        return [power for x in several for power in (sw.int_pow(x, e), sw.int_pow(x, y.shape[0] + 3))]

    torch._dynamo.reset()
    call = torch.compile(function, fullgraph=True, dynamic=True)
    several = [wrapped(bases(), dtype).cuda() for dtype in DTYPES]
    for e in (*range(2, 71, 7), *EXPONENTS[71:]):
        got = call(several, e, torch.empty(e % 60 + 2, device="cuda"))
        want = [t for dtype in DTYPES for t in (truth(e, dtype), truth(e % 60 + 5, dtype))]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)), e


@pytest.mark.parametrize("how", ["eager", "captured", "compiled"])
def test_powers_of_dtensors(how: str) -> None:
    def function(x: Any, n: int) -> list[Any]:
        return [x**n, n**x, x.clone().pow_(n), x ** x.abs(), x**3, sw.int_pow(x, n)]

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    call: Any = {"eager": function, "captured": sw.capture(function), "compiled": compiled}[how]
    x = torch.arange(-7, 8, device="cuda").view(5, 3)
    with sw.simulate(2):
        spread = sw.distribute_tensor(x, sw.init_mesh(a=2, device="cuda"), [Shard(0)])
        for n in (41, 63):
            got = [y.full_tensor().cpu() for y in call(spread, n)]
            assert all(map(torch.equal, got, function(x.cpu(), n)))
