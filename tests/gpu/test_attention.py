"""Attention and dropout as CUDA runs them: every backend on a simulated world on one device, against the dense operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise import DTensor, Mesh, Replicate, Shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
R = Replicate()
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
CUTS = [[R, R], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Shard(1), Shard(2)], [Shard(2), Shard(0)]]


def mesh() -> Mesh:
    return sw.init_mesh(a=2, b=2, device="cuda")


def randn(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)


def attend(tensors: list[Tensor], backend: SDPBackend, **words: Any) -> list[Tensor]:
    """The value and the gradients."""
    query, key, value, *mask = tensors
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(query, key, value, *mask, **words)
        out.sum().backward()
    return [out.detach(), *(t.grad for t in (query, key, value))]


def compare(tensors: list[Tensor], backend: SDPBackend, cuts: list[Any], **words: Any) -> None:
    def leaves(found: list[Tensor]) -> list[Tensor]:
        return [t.detach().requires_grad_(i < 3) for i, t in enumerate(found)]

    want = attend(leaves(tensors), backend, **words)
    on = mesh()
    spread = [sw.distribute_tensor(t, on, cuts if i < 3 else [R, R]) for i, t in enumerate(tensors)]
    for one, other in zip(attend(leaves(spread), backend, **words), want, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_attention(backend: SDPBackend, cuts: list[Any], causal: bool) -> None:
    compare([randn(3, 6, 64, 32), randn(3, 6, 64, 32), randn(3, 6, 64, 32) * 2], backend, cuts, is_causal=causal)


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", [(64, 48), (3, 1, 64, 48)], ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_masked_attention(backend: SDPBackend, shape: tuple[int, ...], cuts: list[Any]) -> None:
    tensors = [randn(3, 6, 64, 32), randn(3, 6, 48, 32), randn(3, 6, 48, 32) * 2]
    compare([*tensors, randn(*shape) > -1], backend, cuts)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("groups", [1, 3], ids=str)
def test_grouped_heads(backend: SDPBackend, cuts: list[Any], groups: int) -> None:
    tensors = [randn(3, 6, 64, 32), randn(3, groups, 64, 32), randn(3, groups, 64, 32) * 2]
    compare(tensors, backend, cuts, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_dropout_in_attention_is_the_same_on_every_rank_and_layout(backend: SDPBackend) -> None:
    found = []
    for cuts in CUTS[:3]:
        torch.manual_seed(0)
        spread = [sw.distribute_tensor(randn(3, 6, 64, 32), mesh(), cuts).requires_grad_() for _ in range(3)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*spread, dropout_p=0.3)
            out.sum().backward()
        shards = [out.detach(), *(x.grad for x in spread)]
        found.append([x.redistribute(placements=[R, R]) for x in shards])
    for results in zip(*found, strict=True):
        for x in results:
            for shard in x.to_local().shards:
                torch.testing.assert_close(shard, results[0].full_tensor(), atol=1e-2, rtol=1e-2)


def test_dropout_is_the_same_on_every_layout() -> None:
    found: list[DTensor] = []
    for cuts in ([R, R], [Shard(0), Shard(1)], [Shard(1), R]):
        torch.manual_seed(0)
        x = sw.distribute_tensor(torch.ones(40, 30, device="cuda"), mesh(), cuts).requires_grad_()
        out = F.dropout(x, 0.3)
        out.sum().backward()
        assert torch.equal(x.grad.full_tensor(), out.detach().full_tensor())
        found.append(out.detach())
    assert all(torch.equal(x.full_tensor(), found[0].full_tensor()) for x in found)
    assert abs((found[0].full_tensor() > 0).float().mean().item() - 0.7) < 0.05
