"""Bad arguments of every public callable, on four Gloo ranks: every rank raises the same, and the job goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from tests.helpers.arguments import World, judge, must_be_refused, trials


def refusals(folder: Path) -> list[tuple[str, str, str]]:
    os.chdir(folder)
    world = World(folder)
    found = [judge(world, trial) for trial in trials() if must_be_refused(trial)]
    total = sw.distribute_tensor(torch.arange(8.0), world.row, [sw.Shard(0)]).sum()
    assert total.item() == 28.0, "the job goes on"
    return [(str(done.trial), done.verdict, done.text) for done in found]


def test_every_rank_refuses_bad_arguments_alike(pool: Any, tmp_path: Path) -> None:
    first, *others = pool(4).run(refusals, tmp_path)
    assert len(first) > 600
    wrong = [found for found in first if found[1]]
    assert not wrong, f"{len(wrong)} of {len(first)}:\n" + "\n".join(map(str, wrong[:50]))
    for rank, found in enumerate(others, 1):
        differ = [(mine, theirs) for mine, theirs in zip(first, found, strict=True) if mine != theirs]
        assert not differ, f"{len(differ)} on rank {rank}:\n" + "\n".join(map(str, differ[:20]))
