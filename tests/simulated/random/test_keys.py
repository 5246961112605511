"""Random numbers: the same on every mesh and layout, on every rank, and again after the seed is set again."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard
from shardwise.random.keys import MOST, State, box, get_rng_state, next_key, set_rng_state
from tests.helpers.one_device import distributed, equal

MESHES = [sw.init_mesh(a=1), sw.init_mesh(a=2), sw.init_mesh(a=4), sw.init_mesh(a=2, b=2)]
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
    "multinomial with replacement": lambda x: torch.multinomial(x.sigmoid(), 9, replacement=True),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "in halves": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "in doubles": lambda x: torch.randn_like(x, dtype=torch.float64),
    "complex": lambda x: torch.randn_like(x, dtype=torch.complex64),
    "transposed": lambda x: x.clone().t().normal_(),
    "flattened": lambda x: torch.randn_like(x.flatten()).view(5, 7),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x.clone()),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
    "kaiming_normal_": lambda x: torch.nn.init.kaiming_normal_(x.clone()),
    "xavier_uniform_": lambda x: torch.nn.init.xavier_uniform_(x.clone()),
    "orthogonal_": lambda x: torch.nn.init.orthogonal_(x.clone()),
    "sparse_": lambda x: torch.nn.init.sparse_(x.clone(), 0.4),
}


UNEVEN = {1: (7,), 2: (1, 6), 4: (3, 0, 4, 0)}


def start() -> Tensor:
    return torch.linspace(-2, 2, 35).view(5, 7)


def layouts(mesh: Mesh) -> list[Any]:
    several = [[p] * mesh.ndim for p in (Replicate(), Shard(0), Shard(1), Partial())]
    return [*several, [Shard(0), Shard(1)]] if mesh.ndim == 2 else [*several, [Shard(1, UNEVEN[mesh.size()])]]


def same(got: DTensor, want: Tensor, about: str) -> None:
    """Bit by bit, on every rank."""
    equal(got, want, about)
    whole = got.detach().redistribute(placements=got.layout.replicated()).to_local()
    assert all(torch.equal(shard, want) for shard in whole.shards), about


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_do_not_depend_on_the_layout(name: str) -> None:
    torch.manual_seed(5)
    want = DRAWS[name](distributed(start(), MESHES[0], [Replicate()])).full_tensor()
    assert len(torch.view_as_real(want).unique() if want.is_complex() else want.unique()) > 1
    for mesh in MESHES:
        for placements in layouts(mesh):
            torch.manual_seed(5)
            close = equal if Partial() in placements else same  # a partial tensor itself is only close to what it stands for
            close(DRAWS[name](distributed(start(), mesh, placements)), want, f"{name} of {placements} on {mesh}")


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
        cut: Any = {"mesh": mesh, "placements": [Shard(0)] * mesh.ndim}
        made = [sw.randn(5, 7, **cut), sw.rand(9, **cut), sw.randint(-3, 90, (4, 2), **cut), sw.randperm(33, **cut)]
        drawn.append([*made, sw.randn(5, dtype=torch.complex64, **cut), sw.rand((), mesh=mesh)])
    for several in drawn:
        for one, other in zip(several, drawn[0], strict=True):
            same(one, other.full_tensor(), "a factory")
    assert drawn[0][3].sort().values.tolist() == list(range(33)) and drawn[0][3].tolist() != list(range(33))


def test_shards_differ_and_replicas_agree() -> None:
    drawn = sw.rand(64, 8, mesh=MESHES[3], placements={"a": Shard(0)}).to_local().shards
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    assert not (drawn[0] == drawn[2]).any()


def test_no_rank_makes_more_than_its_shard() -> None:
    """What a rank makes of a tensor that no machine could hold."""
    layout = sw.layout((2**40, 2**20), MESHES[2], [Shard(0, (2**40 - 5, 0, 3, 2))])
    assert box(layout).at(2) == ((2**60 - 5 * 2**20,), (3 * 2**20,), (1,))
    tall = sw.layout((2**30, 6), MESHES[3], {"a": Shard(1), "b": Shard(1)})
    assert box(tall).at(3) == ((0, 5), (2**30, 1), (6, 1))


def test_orthogonal_stays_orthogonal_when_sharded() -> None:
    for mesh in MESHES:
        for placements in ([Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim):
            q = torch.nn.init.orthogonal_(torch.nn.Parameter(sw.zeros(10, 7, mesh=mesh, placements=placements))).full_tensor()
            torch.testing.assert_close(q.T @ q, torch.eye(7))


def test_multinomial_draws_by_weight() -> None:
    weights = torch.tensor([[1.0, 0, 3, 4, 0], [0, 5, 1, 1, 1]]).repeat(2, 1)
    p = distributed(weights, MESHES[1], [Shard(1)])
    many = torch.multinomial(p, 20_000, replacement=True).full_tensor()
    shares = torch.stack([torch.bincount(row, minlength=5) for row in many]) / 20_000
    torch.testing.assert_close(shares, weights / 8, atol=0.02, rtol=0)
    rows = distributed(weights[:1].repeat(4000, 1), MESHES[1], [Shard(0)])
    first = torch.bincount(torch.multinomial(rows, 3).full_tensor()[:, 0], minlength=5) / 4000
    torch.testing.assert_close(first, weights[0] / 8, atol=0.04, rtol=0)
    few = torch.multinomial(rows, 3).full_tensor()
    assert few.sort().values.eq(torch.tensor([0, 2, 3])).all()  # those of weight zero come last
    with pytest.raises(sw.OperatorError, match="without replacement each at most once"):
        torch.multinomial(p, 6)
    with pytest.raises(sw.OperatorError, match="finite and not negative, with at least one positive in each row"):
        torch.multinomial(p - 2, 1)


def test_recomputed_numbers_are_the_same() -> None:
    x = distributed(start(), MESHES[1], [Shard(0)]).requires_grad_()
    grads = []
    for again in (False, True):
        torch.manual_seed(3)
        y = checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False) if again else F.dropout(x.sin(), 0.5)
        grads.append(torch.autograd.grad(y.square().sum(), x)[0].full_tensor())
    assert torch.equal(*grads)


def losses(demo: Any, **axes: int) -> Tensor:
    """Of the demo's GPT, trained for four steps with dropout after the embedding and every block."""
    mesh = sw.init_mesh(**axes)
    torch.manual_seed(0)
    model = demo.GPT()
    for name, parameter in list(model.named_parameters()):
        placed = {axis: at for axis, at in demo.placements(name).items() if axis in axes}
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, placed)))
    model.head.weight = model.embed.weight
    for module in (model.embed, *model.blocks):
        module.register_forward_hook(lambda module, given, out: F.dropout(out, 0.1))
    step = demo.make_step(model, lambda batch: sw.distribute_tensor(batch, mesh, {"dp": Shard(0)}))
    return torch.tensor([step(batch) for batch in itertools.islice(demo.batches(), 4)])


def test_a_gpt_with_dropout_has_the_same_losses_on_every_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    demo = importlib.import_module("train_gpt")
    want = losses(demo, dp=1)
    torch.testing.assert_close(losses(demo, dp=4), want)
    torch.testing.assert_close(losses(demo, dp=2, tp=2), want)


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
