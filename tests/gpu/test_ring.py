"""Ring attention by the kernels of CUDA, in a simulated world on one device, against dense attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Shard
from tests.helpers.ring_attention import dense, ring, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"is_causal": True, "enable_gqa": True}], ids=str)
@pytest.mark.parametrize("length", [64, 50, 3])
def test_value_and_gradients(length: int, words: dict[str, Any], dtype: torch.dtype) -> None:
    given = tensors(length, heads=(4, 2 if "enable_gqa" in words else 4))
    want = dense(given, **words)
    got = ring([x.to("cuda", dtype) for x in given], sw.init_mesh(sp=4, device="cuda"), [Shard(2)], **words)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_any_length(dtype: torch.dtype) -> None:
    given = tensors(16)
    given[2] = given[2][..., :5]
    mesh = sw.init_mesh(sp=2, device="cuda")
    for one, other in zip(ring([x.to("cuda", dtype) for x in given], mesh, [Shard(2)]), dense(given), strict=True):
        torch.testing.assert_close(one.double().cpu(), other, atol=CLOSE[dtype], rtol=CLOSE[dtype])
