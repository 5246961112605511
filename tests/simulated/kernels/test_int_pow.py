"""Integer powers of DTensors: the types and the values of one device, whatever takes part."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import Replicate, Shard

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
NUMBERS = (0, 1, 3, 63, True, False, -1, -2, 2.5)
WAYS: dict[str, Callable[..., Any]] = {
    "pow": lambda x, y: x**y,
    "float_power": torch.float_power,
    "pow_": lambda x, y: x.clone().pow_(y),
}


def found(way: Callable[..., Any], *given: Any) -> Any:
    """A result with its type, or that there is none."""
    try:
        result = way(*given)
    except (RuntimeError, NotImplementedError):
        return "refused"
    whole = result.full_tensor() if isinstance(result, sw.DTensor) else result
    return whole.dtype, whole.nan_to_num(0.125).tolist()


def spread(x: Tensor) -> Any:
    mesh = sw.init_mesh(a=2)
    return sw.distribute_tensor(x, mesh, [Shard(0) if x.ndim == 2 else Replicate()])


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.arange(15)[: torch.Size(shape).numel()] % 7 - 2).to(dtype).view(shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_values_of_two_tensors(dtype: torch.dtype, way: str) -> None:
    shapes = [((5, 3), (5, 3)), ((5, 3), (3,)), ((5, 3), ()), ((), ())] + ([((), (5, 3))] if way != "pow_" else [])
    for other, (one, two) in product(DTYPES, shapes):
        x, y = numbers(one, dtype), numbers(two, other)
        want = found(WAYS[way], x, y)
        assert found(WAYS[way], spread(x), spread(y)) == want, (other, one, two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_values_with_numbers(dtype: torch.dtype) -> None:
    for number, shape, (name, way) in product(NUMBERS, ((5, 3), ()), WAYS.items()):
        if dtype is torch.bool and type(number) is bool and name == "pow_":
            continue  # torch is of two minds: it computes what its operator on tensors without data refuses
        x = numbers(shape, dtype)
        want = found(way, x, number)
        assert found(way, spread(x), number) == want, (number, shape, name)
        if name != "pow_":
            want = found(way, number, x)
            assert found(way, number, spread(x)) == want, (number, shape, name)


def test_a_power_is_exact_though_it_does_not_fit_the_type() -> None:
    x = numbers((5, 3), torch.int8)
    want = [[(pow(b, 300, 256) + 128) % 256 - 128 for b in row] for row in x.tolist()]
    assert (spread(x) ** 300).full_tensor().tolist() == want


def test_int_pow_takes_dtensors() -> None:
    for sizes, placements in (({"a": 2}, [Shard(0)]), ({"a": 2, "b": 2}, [Shard(1), Shard(0)])):
        mesh, x = sw.init_mesh(**sizes), torch.arange(-7, 8).view(5, 3)
        spread = sw.distribute_tensor(x, mesh, placements)
        for e in (41, torch.arange(3), sw.distribute_tensor(x.abs(), mesh, placements)):
            got = sw.int_pow(spread, e)
            assert got.placements == tuple(placements)
            assert torch.equal(got.full_tensor(), x ** (e.full_tensor() if isinstance(e, sw.DTensor) else e))
        assert torch.equal(sw.int_pow(3, spread).full_tensor(), 3**x)
    with pytest.raises(RuntimeError, match="Integers to negative integer powers are not allowed"):
        spread**-1
