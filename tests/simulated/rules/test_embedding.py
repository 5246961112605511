"""Large tables stay where they are: experts of grouped products, rows and columns of embeddings. What is refused says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import DTensor, OperatorError, Partial, Replicate, Shard
from tests.helpers.one_device import MESHES, equal

MESH, PAIR = MESHES["2"], MESHES["2x2"]
aten: Any = torch.ops.aten


def spread(x: torch.Tensor, placements: Any, mesh: Any = MESH) -> DTensor:
    return sw.distribute_tensor(x, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(
    ("mesh", "tokens", "experts", "result"),
    [
        (MESH, [Replicate()], [Shard(0)], [Partial()]),
        (MESH, [Shard(0)], [Replicate()], [Shard(0)]),
        (MESH, [Replicate()], [Shard(2)], [Shard(1)]),
        (MESH, [Shard(1)], [Shard(1)], [Partial()]),
        (PAIR, [Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Partial()]),
    ],
)
def test_experts_stay_where_they_are(mesh: Any, tokens: Any, experts: Any, result: Any) -> None:
    x, w, ends = torch.randn(12, 8), torch.randn(4, 8, 8), torch.tensor([3, 4, 4, 12], dtype=torch.int32)
    a, b = spread(x, tokens, mesh).requires_grad_(), spread(w, experts, mesh).requires_grad_()
    with sw.communication("forbid"):
        out = aten._grouped_mm(a, b, ends)
    assert out.placements == tuple(result)
    dense = [t.detach().clone().requires_grad_() for t in (x, w)]
    want = aten._grouped_mm(*dense, ends)
    equal(out, want, "grouped product")
    out.sin().sum().backward()
    want.sin().sum().backward()
    for got, leaf in zip((a, b), dense, strict=True):
        assert got.grad is not None and got.grad.placements == got.placements
        equal(got.grad, leaf.grad, "its gradient")


@pytest.mark.parametrize(("placement", "result"), [(Shard(0), Partial()), (Shard(1), Shard(1))])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_table_of_bags_stays_where_it_is(mode: str, placement: Any, result: Any) -> None:
    table, words = torch.randn(10, 4), torch.tensor([[1, 2, 9], [0, 0, 4], [5, 7, 5]])
    x = spread(table, [placement]).requires_grad_()
    with sw.communication("forbid"):
        out = F.embedding_bag(words, x, mode=mode, padding_idx=4)
    assert isinstance(out, DTensor) and out.placements == (result,)
    dense = table.clone().requires_grad_()
    want = F.embedding_bag(words, dense, mode=mode, padding_idx=4)
    equal(out, want, mode)
    out.sin().sum().backward()
    want.sin().sum().backward()
    equal(x.grad, dense.grad, f"gradient of {mode}")


def test_an_index_out_of_the_table_is_refused_wherever_it_is_sharded() -> None:
    for placement in (Shard(0), Shard(1)):
        with pytest.raises((RuntimeError, IndexError)):
            F.embedding_bag(torch.tensor([[1, 10]]), spread(torch.ones(10, 4), [placement]))


def test_sparse_gradients_and_nested_tensors_are_refused() -> None:
    table = spread(torch.ones(10, 4), [Shard(0)]).requires_grad_()
    for looked_up in (
        F.embedding(torch.tensor([1]), table, sparse=True),
        F.embedding_bag(torch.tensor([[1]]), table, sparse=True),
    ):
        with pytest.raises(OperatorError, match=r"makes a sparse tensor of DTensors.*embedding\(…, sparse=False\)"):
            looked_up.sum().backward()
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(OperatorError, match=r"makes a nested tensor of f32\[2@a, 3, 8\].*enable_nested_tensor=False"):
        aten._nested_tensor_from_mask(spread(torch.ones(2, 3, 8), [Shard(0)]), mask)


def test_an_encoder_without_nested_tensors_takes_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 6, 8), torch.tensor([[False] * 4 + [True] * 2] * 2)
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        got = model(spread(x, [Shard(0)]), src_key_padding_mask=padding)
    equal(got, want, "encoder")
