"""The `mesh` fixture: simulated ranks on one device, or one NCCL rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Mesh


@pytest.fixture(params=["simulated", "nccl"])
def mesh(request: Any) -> Iterator[Mesh]:
    if request.param == "simulated":
        with sw.simulate(4):
            yield sw.init_mesh(dp=2, tp=2, device="cuda")
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    yield sw.init_mesh(dp=1, tp=1)
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
