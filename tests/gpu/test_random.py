"""Random numbers on a GPU: bit by bit those of the host, by kernels and by operators of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard
from shardwise.random.bits import Draw, Spans, fill
from shardwise.random.keys import fill_shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DRAWS = [
    ("uniform", (0.0, 1.0)),
    ("uniform", (-0.3, 0.3)),
    ("uniform", (1.0, 1.7)),
    ("normal", (0.0, 1.0)),
    ("normal", (1.0, 0.3)),
]
DRAWS += [("exponential", (1.7,)), ("bernoulli", (0.3,)), ("cauchy", (0.0, 2.0)), ("geometric", (0.2,)), ("integer", (-5, 999))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_a_gpu_draws_what_the_host_draws(draw: tuple[str, tuple[float, ...]], dtype: torch.dtype) -> None:
    for box in (
        Spans((5,), (100_003,), (1,)),
        Spans((3, 7), (40, 300), (10_000, 1)),
        Spans((1, 2, 3), (3, 7, 11), (2**40, 50, 2)),
    ):
        out = torch.empty(box.lengths, dtype=dtype)
        want = fill(out, Draw(*draw), box, (-(2**62), 3))
        for how in (fill_shard, fill):
            assert torch.equal(how(out.cuda(), Draw(*draw), box, (-(2**62), 3)).cpu(), want), how


@pytest.mark.parametrize("how", ["eager", "captured", "compiled"])
def test_programs_draw_the_same_on_a_gpu(how: str) -> None:
    drawn = []
    for device in ("cpu", "cuda"):
        with sw.simulate(4):
            mesh = sw.init_mesh(a=2, b=2, device=device)
            x = sw.ones(64, 8, mesh=mesh, placements=[Shard(0), Shard(1)])

            def noisy(x: sw.DTensor) -> list[sw.DTensor]:
                return [F.dropout(x), torch.randn_like(x), x.clone().uniform_(1, 3), torch.multinomial(x, 3)]

            call = {"eager": noisy, "captured": sw.capture(noisy)}.get(how) or torch.compile(noisy, fullgraph=True)
            torch.manual_seed(0)
            drawn.append([y.full_tensor().cpu() for y in (noisy if device == "cpu" else call)(x)])
    assert all(map(torch.equal, *drawn))
