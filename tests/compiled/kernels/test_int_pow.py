"""Integer powers in compiled programs: with constant, symbolic and per-element powers, exact in every type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import shardwise as sw
from shardwise import Shard
from tests.helpers.int_pow import DTYPES, EXPONENTS, bases, truth, wrapped

CONSTANT = (0, 1, 2, 15, 63, 70, EXPONENTS[71], 2**31)
WHOLE = DTYPES[:5]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def assert_all(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtypes", [DTYPES[::3], pytest.param(DTYPES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_constant_power(dtypes: tuple[torch.dtype, ...]) -> None:
    def function(*several: Tensor) -> list[Tensor]:
        return [sw.int_pow(x, e) for x in several for e in CONSTANT]

    got = torch.compile(function, fullgraph=True)(*(wrapped(bases(), dtype) for dtype in dtypes))
    assert_all(got, [truth(e, dtype) for dtype in dtypes for e in CONSTANT])


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_a_symbolic_power(backend: str) -> None:
    """One program serves every power, whether it is a number or comes from a shape."""
    counter = CompileCounterWithBackend(backend)

    def function(several: list[Tensor], e: int, y: Tensor) -> list[Tensor]:
        return [power for x in several for power in (sw.int_pow(x, e), sw.int_pow(x, y.shape[0] + 3))]

    call = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    several = [wrapped(bases(), dtype) for dtype in DTYPES]
    for e in (*range(2, 71), *EXPONENTS[71:]):
        got = call(several, e, torch.empty(e % 60 + 2))
        assert_all(got, [t for dtype in DTYPES for t in (truth(e, dtype), truth(e % 60 + 5, dtype))])
    assert counter.frame_count == 1


def test_powers_of_a_tensor() -> None:
    several = [wrapped(bases(), dtype) for dtype in WHOLE]
    powers = [torch.randint(-3, 71, x.shape).to(x.dtype) for x in several]
    got = torch.compile(lambda *xs: [sw.int_pow(x, e) for x, e in zip(xs[:5], xs[5:], strict=True)])(*several, *powers)
    assert_all(got, [torch.pow(x, e) for x, e in zip(several, powers, strict=True)])


def test_a_constant_power_is_left_to_the_compiler() -> None:
    """It is no call of an operator of ours, which no compiler could fuse with what is around it."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(lambda x: sw.int_pow(x + 1, 15) * 2, backend=backend, fullgraph=True)(torch.arange(9))
    assert len(seen) == 3 and not any("int_pow" in str(target) for target in seen)


# ── on DTensors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def spread(x: Tensor, sizes: dict[str, int]) -> Any:
    return sw.distribute_tensor(x, sw.init_mesh(**sizes), [Shard(0)] + [Shard(1)] * (len(sizes) - 1))


def everything(several: list[Any], n: int, y: Tensor) -> list[Any]:
    """Every way to write a power, with a symbol as a number, a truth value, a fraction, and from a shape."""
    ways: list[Callable[[Any], Any]] = [
        lambda x: x**n,
        lambda x: n**x,
        lambda x: x ** y.shape[0],
        lambda x: x.clone().pow_(n) if x.dtype is not torch.bool else x,
        lambda x: torch.pow(x, n + 1),
        lambda x: torch.float_power(x, n),
        lambda x: sw.int_pow(x, n),
        lambda x: x**3,
        lambda x: x ** x.abs() if x.dtype is not torch.bool else x,
        lambda x: x ** (n / 2),
        lambda x: x ** (n > 7),
    ]
    return [way(x) for x in several for way in ways]


@pytest.mark.parametrize("sizes", [{"a": 2}, pytest.param({"a": 2, "b": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("how", ["captured", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_powers_of_dtensors(how: str, sizes: dict[str, int]) -> None:
    plain = [torch.arange(-7, 8).view(5, 3).to(dtype) for dtype in (torch.bool, *WHOLE)]
    several = [spread(x, sizes) for x in plain]
    if how == "captured":
        call: Any = sw.capture(everything)
    else:
        call = torch.compile(everything, fullgraph=True, dynamic=True, backend=how)
    for n in (9, 12, 6):
        y = torch.empty(n + 4)
        got, want = call(several, n, y), everything(plain, n, y)
        assert [g.dtype for g in got] == [w.dtype for w in want]
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.full_tensor(), w, rtol=1e-5 if w.is_floating_point() else 0, atol=0, equal_nan=True)


def test_a_captured_program_has_the_operator() -> None:
    program = sw.capture(lambda x, y: x ** y.shape[0])
    x = spread(torch.arange(12).view(4, 3), {"a": 2})
    assert torch.equal(program(x, torch.empty(5)).full_tensor(), torch.arange(12).view(4, 3) ** 5)
    targets = [str(node.target) for _, graph in program.captured for node in graph.graph.nodes]
    assert "shardwise.int_pow.default" in targets and not any("aten.pow" in target for target in targets)
