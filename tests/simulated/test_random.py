"""Random numbers: the same on every mesh and layout, on every rank, and again after the seed is set again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard
from shardwise.random import MOST, State, get_rng_state, next_key, set_rng_state
from tests.laws import distributed, equal

MESHES = [sw.init_mesh(a=1), sw.init_mesh(a=2), sw.init_mesh(a=3), sw.init_mesh(a=2, b=2)]
DRAWS: dict[str, Callable[[DTensor], DTensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 2, 100),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "exponential_": lambda x: x.clone().exponential_(),
    "random_": lambda x: x.clone().random_(0, 9),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of both": lambda x: torch.normal(x, x.square()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x.clone()),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
}


def start() -> Tensor:
    return torch.linspace(-2, 2, 35).view(5, 7)


def layouts(mesh: Mesh) -> list[Any]:
    return [[p] * mesh.ndim for p in (Replicate(), Shard(0), Shard(1), Partial())]


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_do_not_depend_on_the_layout(name: str) -> None:
    torch.manual_seed(5)
    want = DRAWS[name](distributed(start(), MESHES[0], [Replicate()])).full_tensor()
    assert len(want.unique()) > 1
    for mesh in MESHES:
        for placements in layouts(mesh):
            torch.manual_seed(5)
            equal(DRAWS[name](distributed(start(), mesh, placements)), want, f"{name} of {placements} on {mesh}")


@pytest.mark.parametrize("name", ["rand_like", "uniform_", "dropout", "normal"])
def test_each_call_draws_other_numbers(name: str) -> None:
    x = distributed(start(), MESHES[1], [Shard(0)])
    assert not torch.equal(DRAWS[name](x).full_tensor(), DRAWS[name](x).full_tensor())


def test_a_given_generator_is_used_and_moved() -> None:
    x = distributed(start(), MESHES[1], [Shard(0)])
    before = get_rng_state()
    generator = torch.Generator().manual_seed(1)
    first, second = (x.clone().uniform_(generator=generator).full_tensor() for _ in range(2))
    again = x.clone().uniform_(generator=generator.manual_seed(1)).full_tensor()
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert get_rng_state() == before


def test_factories_draw_from_the_same_numbers() -> None:
    drawn = []
    for mesh in MESHES:
        torch.manual_seed(2)
        drawn.append(sw.randn(5, 7, mesh=mesh, placements=[Shard(0)] * mesh.ndim).full_tensor())
    assert all(torch.equal(drawn[0], other) for other in drawn)


def test_random_numbers_into_an_argument_are_refused() -> None:
    x = distributed(start(), MESHES[1], [Shard(0)])
    with pytest.raises(sw.errors.OperatorError, match=r"aten\.rand draws random numbers into an argument"):
        torch.rand(5, 7, out=x)


# ── the count ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_seed_starts_the_count_even_if_it_is_the_same() -> None:
    torch.manual_seed(0)
    first = [next_key() for _ in range(3)]
    assert len(set(first)) == 3
    torch.manual_seed(0)
    torch.rand(10)
    assert [next_key() for _ in range(3)] == first
    torch.manual_seed(1)
    assert next_key() not in first


def plain_draws() -> list[Tensor]:
    """Plain torch random calls of all kinds."""
    out = [torch.randint(5, (3,)), torch.randperm(10), torch.randn(3, dtype=torch.complex64)]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        out += [torch.randn(n, dtype=dtype) for n in (1, 5, 100)] + [torch.rand(3, dtype=dtype)]
        x = torch.empty(3, dtype=dtype)
        fills = (x.normal_, x.exponential_, x.log_normal_, x.cauchy_, x.uniform_, x.bernoulli_)
        out += [fill().clone() for fill in fills] + [x.geometric_(0.5).clone(), torch.normal(torch.ones(3), 2.0)]
    ones = torch.ones(5)
    out += [torch.multinomial(ones, 3), torch.poisson(ones * 20), torch.binomial(ones * 20, ones / 2)]
    return [*out, torch._standard_gamma(ones), torch._sample_dirichlet(ones), F.dropout(ones), F.rrelu(-ones, training=True)]


def test_plain_calls_leave_the_count_alone_and_are_left_alone() -> None:
    torch.manual_seed(4)
    want = plain_draws()
    torch.manual_seed(4)
    next_key()
    got = plain_draws()
    assert get_rng_state() == State(4, 1)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    torch.manual_seed(4)
    torch.randn(1)  # torch keeps the second of a pair for the next call
    want = torch.randn(1)
    torch.manual_seed(4)
    torch.randn(1)
    next_key()
    assert torch.equal(torch.randn(1), want)


def test_what_restores_torch_restores_the_count() -> None:
    torch.manual_seed(6)
    next_key()
    saved = torch.get_rng_state()
    want = next_key()
    with torch.random.fork_rng():
        next_key()
        torch.manual_seed(7)
        next_key()
    assert get_rng_state() == State(6, 2)
    torch.set_rng_state(saved)
    assert next_key() == want


def test_state_can_be_set() -> None:
    torch.manual_seed(8)
    next_key()
    state, want = get_rng_state(), next_key()
    torch.manual_seed(9)
    set_rng_state(state)
    assert next_key() == want and torch.initial_seed() == 8


def test_too_many_calls_are_refused() -> None:
    torch.manual_seed(0)
    set_rng_state(State(0, MOST))
    with pytest.raises(sw.errors.OperatorError, match=f"more than {MOST} random calls"):
        next_key()
    torch.manual_seed(0)
