"""Operators that read data where a DTensor has none of its own, and calls without elements or dims: as on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardwise as sw
from shardwise import DTensor, OperatorError, Partial, Replicate, Shard
from shardwise.verify.sweeps import Sweep, check_operator

MESH = sw.init_mesh(tp=2)


def spread(x: Tensor, placement: Any) -> DTensor:
    return sw.distribute_tensor(x, MESH, [placement])


def placements(x: Tensor) -> list[Any]:
    return [Replicate(), *(Shard(dim) for dim in range(x.ndim)), *([Partial()] if x.is_floating_point() else [])]


def same_everywhere(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Equal to one device on every combination of placements."""
    want = function(*tensors)
    for chosen in itertools.product(*map(placements, tensors)):
        got = function(*map(spread, tensors, chosen))
        assert torch.equal(got.full_tensor(), want), chosen


# ── indices without dims ──

LINE, GRID, AT = torch.arange(8.0), torch.ones(5, 3), torch.tensor(2)
INDEXED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "index_add": (lambda x, i, v: x.index_add(0, i, v), (LINE, AT, torch.tensor([5.0]))),
    "index_add of a row": (lambda x, i, v: x.index_add(0, i, v), (GRID, AT, torch.ones(1, 3))),
    "index_add of a column": (lambda x, i, v: x.index_add(1, i, v), (GRID, AT, torch.ones(5, 1))),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), (LINE, AT, torch.tensor(5.0))),
    "index_fill": (lambda x, i: x.index_fill(0, i, 5.0), (GRID, AT)),
    "index_select": (lambda x, i: x.index_select(0, i), (GRID, AT)),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (GRID, AT, torch.tensor([5.0]))),
    "index_put_": (lambda x, i, v: x.clone().index_put_((i, i), v), (GRID, AT, torch.tensor(5.0))),
    "x[:, i]": (lambda x, i: x[:, i], (GRID, AT)),
    "take": (lambda x, i: x.take(i), (GRID, AT)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_without_dims(name: str) -> None:
    function, tensors = INDEXED[name]
    same_everywhere(function, *tensors)


def test_adding_one_value_at_sharded_indices_adds_the_rest_once() -> None:
    """Neither what is added to nor the value has the dim of the indices."""
    for value in (torch.tensor(5.0), torch.tensor([5.0])):
        same_everywhere(lambda x, i, v: x.index_put((i,), v, accumulate=True), GRID, torch.tensor([2, 4]), value)


def test_a_bias_of_another_dtype_is_added_once() -> None:
    """A partial bias of integers cannot be added to partial products, since integers are converted first."""
    x, w, b = torch.ones(1, 2, 4), torch.ones(2, 3, 1), torch.tensor([1, 2, 3])
    for chosen in itertools.product((Replicate(), Shard(1), Partial()), (Replicate(), Shard(0)), (Replicate(), Partial())):
        got = F.conv_transpose1d(*map(spread, (x, w, b), chosen))
        assert torch.equal(got.full_tensor(), F.conv_transpose1d(x, w, b)), chosen


# ── values that are read before a DTensor is asked ──


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_a_tensor_of_several_results(placement: Any) -> None:
    x = spread(torch.arange(4.0), placement)
    assert torch.tensor([x.sum(), 1.0, x.max()]).tolist() == [6.0, 1.0, 3.0]
    assert torch.tensor([x.long().sum()]).tolist() == [6] and torch.tensor([x.sum() > 5]).tolist() == [True]
    assert torch.tensor([x.sum()], dtype=torch.complex64).tolist() == [6 + 0j]


def test_split_by_a_tensor() -> None:
    for x, index in itertools.product((Replicate(), Shard(0)), (Replicate(), Shard(0), Partial())):
        parts = torch.tensor_split(spread(torch.arange(8.0), x), spread(torch.tensor([2, 5]), index))
        assert [part.tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]
    assert [part.tolist() for part in torch.tensor_split(torch.arange(3), spread(torch.tensor(3), Replicate()))] == [
        [0],
        [1],
        [2],
    ]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=repr)
def test_one_hot(placement: Any) -> None:
    x = torch.tensor([3, 0, 5])
    for classes in (-1, 6, 8):
        assert torch.equal(F.one_hot(spread(x, placement), classes).full_tensor(), F.one_hot(x, classes))
    with pytest.raises(OperatorError, match=r"one_hot of class 5: classes are not negative and less than num_classes=5"):
        F.one_hot(spread(x, placement), 5)
    with pytest.raises(OperatorError, match=r"one_hot of class -1: classes are not negative"):
        F.one_hot(spread(x - 1, placement))
    with pytest.raises(OperatorError, match="without elements"):
        F.one_hot(spread(x[:0], placement))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=repr)
def test_packed_sequences(kind: Any, placement: Any) -> None:
    torch.manual_seed(0)
    layer, x, lengths = kind(3, 4), torch.randn(4, 5, 3), torch.tensor([5, 3, 2, 1])

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        packed, _ = layer(pack_padded_sequence(x, lengths, batch_first=True))
        out, counts = pad_packed_sequence(packed, batch_first=True)
        assert counts.tolist() == [5, 3, 2, 1]
        out.square().sum().backward()
        assert x.grad is not None
        return out, x.grad

    want = run(x.clone().requires_grad_())
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(spread(parameter.detach(), Replicate())))
    for got, wanted in zip(run(spread(x, placement).requires_grad_()), want, strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before 2.13 torch refuses subclasses there before Shardwise is asked")
def test_torch_cond_names_the_remedy() -> None:
    x = spread(torch.arange(4.0), Shard(0))
    with pytest.raises(
        Exception, match=r"torch\.cond and its like on .*branch in Python .* or compute both and use torch\.where"
    ):
        torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


# ── without elements ──


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.soft_margin_loss])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_gradient_of_a_loss_of_nothing(loss: Any, placement: Any) -> None:
    x = spread(torch.ones(0, 3), placement).requires_grad_()
    loss(x, torch.ones(0, 3)).backward()
    assert x.grad is not None and x.grad.shape == (0, 3)


@pytest.mark.parametrize("ranks", [(2,), (4,)], ids=str)
def test_distances_on_empty_shards(ranks: tuple[int, ...]) -> None:
    assert check_operator("cdist", Sweep(ranks)).outcome == "right"
