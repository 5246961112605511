"""Values that torch refuses are refused: indices, probabilities, sizes, dtypes, empty reductions, on every placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.verify import pool
from shardwise.verify.samples import operators
from shardwise.verify.spread import simulated_mesh
from tests.helpers.invalid_values import Finding, check

MESH = sw.init_mesh(tp=2)
X = torch.arange(18.0).view(6, 3)


def spread(x: torch.Tensor, placement: Any) -> DTensor:
    return sw.distribute_tensor(x, MESH, [placement])


# ── writing by integers ──


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("index", [6, -7, (0, 3), (..., -4), (slice(None), 3), torch.tensor(6)], ids=repr)
def test_an_integer_out_of_range_writes_nothing(index: Any, placement: Any) -> None:
    x = spread(X, placement)
    with pytest.raises(IndexError, match=r"index -?[0-9]+ is out of bounds for dimension [01] with size [36]"):
        x[index] = 5.0
    assert torch.equal(x.full_tensor(), X)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=repr)
@pytest.mark.parametrize("index", [0, -1, (1, 2), (..., 1), (0, slice(1, 3)), torch.tensor(1), (torch.tensor(1), -2)], ids=repr)
def test_integers_write_what_they_write_on_one_device(index: Any, placement: Any) -> None:
    want, got = torch.zeros(3, 4, 5), spread(torch.zeros(3, 4, 5), placement)
    value = torch.arange(float(want[index].numel())).view(want[index].shape)
    want[index], got[index] = value, value
    assert torch.equal(got.full_tensor(), want)
    try:
        got[index] += 1
        want[index] += 1
    except sw.OperatorError as refused:
        assert "a view that data had to move for" in str(refused)
    assert torch.equal(got.full_tensor(), want), "either it was added, or it was refused before anything changed"


# ── the index that was given ──

BAD = torch.tensor([0, 6])
READS: dict[str, Callable[[Any], Any]] = {
    "x[i]": lambda x: x[BAD],
    "x[i, :] of a negative": lambda x: x[torch.tensor([-7]), :],
    "index_put": lambda x: x.index_put((BAD,), torch.tensor(1.0)),
    "index_select": lambda x: x.index_select(0, BAD),
    "gather": lambda x: x.gather(0, BAD.view(1, 2)),
    "scatter": lambda x: x.scatter(0, BAD.view(1, 2), 1.0),
    "scatter_add": lambda x: x.scatter_add(0, BAD.view(1, 2), torch.ones(1, 2)),
    "index_add": lambda x: x.index_add(0, BAD, torch.ones(2, 3)),
    "index_copy": lambda x: x.index_copy(0, BAD, torch.ones(2, 3)),
    "index_fill": lambda x: x.index_fill(0, BAD, 1.0),
    "embedding": lambda x: F.embedding(BAD, x),
    "embedding_bag": lambda x: F.embedding_bag(BAD, x, torch.tensor([0])),
    "cross_entropy": lambda x: F.cross_entropy(x.t()[:2], BAD),
    "nll_loss": lambda x: F.nll_loss(x.t()[:2], BAD, reduction="none"),
    "take": lambda x: x.take(torch.tensor([18])),
    "put": lambda x: x.put(torch.tensor([18]), torch.ones(1)),
}


@pytest.mark.parametrize("read", READS)
def test_the_message_names_the_index_and_the_size_of_the_whole(read: str) -> None:
    with pytest.raises((IndexError, RuntimeError)) as plain:
        READS[read](X)
    with pytest.raises(plain.type, match=r"index (6|18|-7) is out of bounds for dimension [01] with size (6|18)$"):
        READS[read](spread(X, Shard(0)))


# ── random numbers ──

DRAWS: dict[str, Callable[[Any], Any]] = {
    "bernoulli_": lambda x: x.bernoulli_(2.0),
    "bernoulli of a tensor": lambda x: torch.bernoulli(x),
    "bernoulli_ of a tensor": lambda x: x.bernoulli_(x - 1),
    "bernoulli of integers": lambda x: torch.bernoulli(x.long()),
    "normal_": lambda x: x.normal_(0.0, -1.0),
    "normal": lambda x: torch.normal(x, -1.0),
    "normal of tensors": lambda x: torch.normal(x, -x),
    "normal of a number and a tensor": lambda x: torch.normal(1.0, -x),
    "log_normal_": lambda x: x.log_normal_(0.0, 0.0),
    "geometric_": lambda x: x.geometric_(1.0),
    "exponential_": lambda x: x.exponential_(0.0),
    "cauchy_": lambda x: x.cauchy_(0.0, 0.0),
    "uniform_": lambda x: x.uniform_(1.0, 0.0),
    "uniform_ too wide": lambda x: x.uniform_(-3e38, 3e38),
    "random_": lambda x: x.byte().random_(300),
    "random_ of nothing": lambda x: x.random_(0),
    "randint_like": lambda x: torch.randint_like(x.byte(), 300),
    "rand_like of integers": lambda x: torch.rand_like(x.long()),
    "multinomial of integers": lambda x: torch.multinomial(x.long(), 1),
    "multinomial of a negative": lambda x: torch.multinomial(-x, 1),
    "dropout": lambda x: torch.dropout(x, 2.0, True),
    "poisson": lambda x: torch.poisson(-x),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_are_none_of_a_distribution(name: str, placement: Any) -> None:
    with pytest.raises(RuntimeError):
        DRAWS[name](X.clone())
    with pytest.raises(RuntimeError):
        DRAWS[name](spread(X, placement))


def test_integers_that_a_dtype_does_not_hold() -> None:
    with pytest.raises(
        sw.OperatorError, match=r"integers from 0 to less than 300 of torch\.uint8, which holds those from 0 to 255"
    ):
        sw.randint(0, 300, (4,), mesh=MESH, dtype=torch.uint8)
    with pytest.raises(sw.OperatorError, match=r"randperm of 300 integers of torch\.uint8: n is from 0 to 256"):
        sw.randperm(300, mesh=MESH, dtype=torch.uint8)
    assert sw.randperm(256, mesh=MESH, dtype=torch.uint8).sort().values.tolist() == list(range(256))
    assert sw.randint(255, 256, (4,), mesh=MESH, dtype=torch.uint8).tolist() == [255] * 4


# ── every operator of torch's database ──

#: One of each family: what is sampled by default.
SAMPLED = [
    "index_add",
    "index_copy",
    "index_put",
    "gather",
    "scatter",
    "take",
    "put",
    "nn.functional.embedding",
    "nn.functional.one_hot",
    "max.reduction_no_dim",
    "argmax",
    "bernoulli",
    "normal",
    "multinomial",
    "masked_select",
    "select_scatter",
    "softmax",
    "topk",
    "kthvalue",
    "bucketize",
    "cross",
    "linalg.inv",
    "cholesky",
    "nn.functional.cross_entropy",
    "nn.functional.conv1d",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.interpolate.nearest",
    "tensor_split",
    "repeat_interleave",
    "bincount",
    "diagonal_scatter",
]


def findings(name: str) -> list[Finding]:
    """What differs from one device for one operator, on two and on three ranks."""
    return [finding for ranks in (2, 3) for finding in check(name, simulated_mesh((ranks,)), 1, 3) if finding.kind != "right"]


@pytest.mark.parametrize("name", SAMPLED)
def test_invalid_calls_of_an_operator(name: str) -> None:
    differing = [finding for finding in check(name, simulated_mesh((3,)), 1, 1) if finding.kind != "right"]
    assert differing == []


@pytest.mark.slow
def test_invalid_calls_of_every_operator() -> None:
    """In forked processes: torch itself may crash on an invalid call."""
    results = list(pool.run_tasks(findings, list(operators()), 2))
    assert [(done.task, done.failure) for done in results if done.failure] == []
    assert [finding for done in results for finding in done.result] == []
