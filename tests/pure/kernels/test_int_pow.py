"""Integer powers are those of Python's own integers, modulo two to the width of the type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import OperatorError
from tests.helpers.int_pow import DTYPES, EXPONENTS, SIGNED, bases, module, some, truth, wrapped


@pytest.fixture(params=["blocks", "few"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small blocks of which the last is not full, or torch's own loop."""
    monkeypatch.setattr(module, "FEW", 0 if request.param == "blocks" else 10**9)
    monkeypatch.setattr(module, "BLOCK", 3000)
    yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_power_is_that_of_python(blocks: None, dtype: torch.dtype) -> None:
    x = wrapped(bases(), dtype)
    for e in EXPONENTS:
        assert torch.equal(sw.int_pow(x, e), truth(e, dtype)), e


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_of_a_tensor_are_those_of_python(blocks: None, dtype: torch.dtype) -> None:
    x, most = wrapped(bases(), dtype), torch.iinfo(dtype).max
    for highest in (70, 2**31, most):
        powers, want = some(min(highest, most))
        assert torch.equal(sw.int_pow(x, wrapped(powers, dtype)), want.to(module.SIGNED.get(dtype, dtype)).view(dtype)), highest
    assert torch.equal(sw.int_pow(x, wrapped([5] * len(x), dtype)), truth(5, dtype))


@pytest.mark.parametrize("dtype", SIGNED, ids=str)
def test_negative_powers_in_a_tensor_are_those_of_torch(blocks: None, dtype: torch.dtype) -> None:
    x = wrapped(bases(), dtype)
    for low, high in ((-5, 6), (-5, 0), (torch.iinfo(dtype).min, -1), (-1, 0)):
        e = torch.randint(low, high, x.shape).to(dtype)
        assert torch.equal(sw.int_pow(x, e), torch.pow(x, e)), (low, high)
    small = torch.tensor([-2, -1, 0, 1, 2], dtype=dtype)
    assert sw.int_pow(small, torch.tensor(-3, dtype=dtype)).tolist() == [0, -1, 0, 1, 0]
    assert sw.int_pow(small, torch.tensor(-2, dtype=dtype)).tolist() == [0, 1, 0, 1, 0]


PAIRS = [
    (torch.arange(20).view(4, 5).t(), torch.arange(20).view(5, 4)),
    (torch.arange(4).view(4, 1), torch.arange(5)),
    (torch.arange(5).view(5, 1).expand(5, 4), torch.arange(5).view(5, 1).expand(5, 4)),
    (torch.arange(40).view(4, 10)[:, ::2], torch.tensor(3)),
    (torch.tensor(3), torch.arange(6).view(2, 3)),
    (torch.arange(24).view(2, 3, 4).permute(2, 0, 1), torch.arange(3)),
    (torch.zeros(0, 3), torch.zeros(1, 3)),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize(("base", "exponent"), PAIRS)
def test_results_lie_in_memory_as_those_of_torch(blocks: None, base: Tensor, exponent: Tensor, dtype: torch.dtype) -> None:
    x, y = base.to(dtype), exponent.to(dtype)
    for got, want in ((sw.int_pow(x, y), torch.pow(x, y)), (sw.int_pow(x, 5), torch.pow(x, 5))):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_types_are_those_of_torch() -> None:
    kinds = (torch.bool, torch.uint8, *SIGNED)
    for a in kinds:
        for shape in ((3,), ()):
            x = torch.ones(shape, dtype=a)
            assert sw.int_pow(x, 3).dtype == torch.pow(x, 3).dtype
            assert sw.int_pow(3, x).dtype == torch.pow(3, x).dtype
            for b in kinds:
                for y in (torch.ones((3,), dtype=b), torch.ones((), dtype=b)):
                    if (a, b) != (torch.bool, torch.bool):
                        assert sw.int_pow(x, y).dtype == torch.pow(x, y).dtype
    assert torch.equal(
        sw.int_pow(torch.tensor([3], dtype=torch.int8), torch.tensor(300)), torch.tensor([113], dtype=torch.int8)
    )
    assert torch.equal(sw.int_pow(300, torch.tensor([2], dtype=torch.int8)), torch.tensor([-112], dtype=torch.int8))


def test_what_has_no_power_is_told() -> None:
    x = torch.arange(3)
    with pytest.raises(OperatorError, match=r"negative integer powers are not allowed: got the power -2; give it in a tensor"):
        sw.int_pow(x, -2)
    with pytest.raises(OperatorError, match=r"got torch.float32 to the power of an integer; torch.pow computes"):
        sw.int_pow(x.float(), 2)
    with pytest.raises(OperatorError, match=r"got torch.int64 to the power of torch.float32"):
        sw.int_pow(x, x.float())


def test_no_gradient_goes_through() -> None:
    w = torch.ones(3, requires_grad=True)
    y = sw.int_pow(torch.arange(3), 2)
    (w * y).sum().backward()
    assert not y.requires_grad and torch.equal(w.grad, torch.tensor([0.0, 1.0, 4.0]))


@pytest.mark.parametrize(
    ("dims", "shapes"), [((0, 0), ((3, 4), (3,))), ((1, 0), ((4, 3), (3, 2, 4))), ((None, 1), ((4,), (1, 3)))]
)
def test_batches(dims: tuple[int | None, int], shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = torch.randint(-9, 9, shapes[0], dtype=torch.int8), torch.randint(0, 9, shapes[1])
    got, want = (torch.vmap(f, in_dims=dims)(x, y) for f in (sw.int_pow, torch.pow))
    assert torch.equal(got, want) and got.dtype == want.dtype
    assert torch.equal(torch.vmap(lambda x: sw.int_pow(x, 3))(y), y**3)


def test_operators_keep_torchs_promises() -> None:
    for dtype in (torch.int64, torch.uint8):
        x, y = (torch.randint(0, 9, shape).to(dtype) for shape in ((4, 5), (5,)))
        torch.library.opcheck(torch.ops.shardwise.int_pow.default, (x.t(), 3))
        torch.library.opcheck(torch.ops.shardwise.int_pow.Tensor, (x, y))


class Multiplications(TorchDispatchMode):
    """Counts the operators of a block."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_powers_take_few_multiplications() -> None:
    x, counts = torch.arange(-5, 6), {}
    for e in range(2, 1000):
        with Multiplications() as counted:
            found = module.raised(x, e)
        assert torch.equal(found, x**e), e
        counts[e] = counted.count
    assert [counts[e] for e in (2, 3, 15, 31, 63)] == [1, 2, 5, 7, 8]
    assert all(count < 2 * e.bit_length() for e, count in counts.items())


def test_the_file_of_the_gpu_kernels_is_found() -> None:
    kernels = module.triton_kernels()
    assert kernels is None or kernels.AVAILABLE
