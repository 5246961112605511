"""Debug mode on Gloo ranks: ranks that go different ways raise the same error, soon, instead of waiting forever."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import MismatchError, Replicate, Shard
from shardwise.comm import PerRank, door
from shardwise.comm.debug import announce_batch

#: All ranks must have raised by then.
SECONDS = 5.0


def told(program: Callable[[], Any], **words: Any) -> tuple[str, str, float]:
    """What a rank raises under debug mode: its kind, its text, and after how many seconds."""
    start, kind, text = time.monotonic(), "", ""
    try:
        with sw.debug_mode(**words):
            program()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.monotonic() - start


def rank_is(*ranks: int) -> bool:
    return dist.get_rank() in ranks


def gather(rows: int, axes: tuple[str, ...], mesh: Any) -> torch.Tensor:
    return door(mesh, f"gather{rows}").all_gather(torch.ones(rows, 2), mesh, axes)


# ── programs in which ranks go different ways ──


def skip(mesh: Any) -> None:
    if not rank_is(1):
        gather(3, ("dp", "tp"), mesh)
    door(mesh, "sum").all_reduce(torch.ones(4), "sum", mesh, ("dp", "tp"))


def skip_the_last(mesh: Any) -> None:
    gather(2, ("tp",), mesh)
    if not rank_is(2):
        gather(3, ("dp", "tp"), mesh)


def skip_and_go_on_elsewhere(mesh: Any) -> None:
    if not rank_is(0):
        gather(3, ("dp", "tp"), mesh)
    gather(4, ("tp",), mesh)
    gather(5, ("dp",), mesh)


def other_shapes(mesh: Any) -> None:
    gather(3 if rank_is(3) else 2, ("dp", "tp"), mesh)


def other_shapes_in_one_group(mesh: Any) -> None:
    gather(3 if rank_is(3) else 2, ("tp",), mesh)
    gather(4, ("tp",), mesh)


def other_counts(mesh: Any) -> None:
    send = (1, 1, 1, 2) if rank_is(2) else (1, 1, 1, 1)
    door(mesh, "swap").all_to_all(torch.ones(sum(send)), send, (1, 1, 1, 1), mesh, ("dp", "tp"))


def swapped(mesh: Any) -> None:
    steps = [
        lambda: gather(2, ("dp", "tp"), mesh),
        lambda: door(mesh, "sum").all_reduce(torch.ones(4), "sum", mesh, ("dp", "tp")),
    ]
    for step in reversed(steps) if rank_is(1) else steps:
        step()


def swapped_alike(mesh: Any) -> None:
    """Two moves of the same shape: nothing would hang, and each rank would go on with another's tensor."""
    a, b = (sw.ones(4, 4, mesh=mesh, placements={"tp": Shard(0)}) for _ in range(2))
    if rank_is(1):
        b.full_tensor()
        a.full_tensor()
    else:
        a.full_tensor()
        b.full_tensor()


def swapped_groups(mesh: Any) -> None:
    """The groups differ, so that each rank waits for another in a ring."""
    both = (lambda: gather(2, ("dp", "tp"), mesh)), (lambda: gather(2, ("tp",), mesh))
    for step in reversed(both) if rank_is(1) else both:
        step()


def raising(mesh: Any) -> None:
    gather(2, ("tp",), mesh)
    if rank_is(2):
        raise ValueError("no more data")
    gather(2, ("dp", "tp"), mesh)


CASES = {
    skip: [
        "MismatchError",
        r"ranks 0, 2, 3: all_gather of f32\[3, 2\] for gather3",
        r"rank 1: all_reduce\(sum\) of f32\[4\] for sum",
    ],
    skip_the_last: [
        "MismatchError",
        r"waits for rank 2:\n  rank \d: all_gather of f32\[3, 2\]",
        r"rank 2 left sw.debug_mode\(\) at",
    ],
    skip_and_go_on_elsewhere: ["MismatchError", "wait for each other", r"rank 0: all_gather of f32\[4, 2\]", r"f32\[3, 2\]"],
    other_shapes: [
        "MismatchError",
        r"ranks 0, 1, 2: all_gather of f32\[2, 2\]",
        r"rank 3: all_gather of f32\[3, 2\]",
        "shape or dtype",
    ],
    other_shapes_in_one_group: ["MismatchError", r"  rank 2: .*f32\[2, 2\].*\n  rank 3: .*f32\[3, 2\]"],
    other_counts: ["MismatchError", r"rank 2 is about to send f32\[2\] to rank 3, which expects f32\[1\]"],
    swapped: ["MismatchError", r"ranks 0, 2, 3: all_gather", r"rank 1: all_reduce\(sum\)"],
    swapped_alike: ["MismatchError", "They differ in the line. If these lines are meant to meet", "lines=False"],
    swapped_groups: ["MismatchError", "wait for each other", "rank 1: all_gather"],
    raising: [
        "ValueError MismatchError",
        "rank 2 raised ValueError: no more data; its last communication in the block: all_gather",
    ],
}


def run_case(program: Callable[[Any], None]) -> tuple[str, str, float]:
    mesh = sw.init_mesh(dp=2, tp=2)
    return told(lambda: program(mesh))


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_all_ranks_raise_the_same_error_soon(pool: Any, program: Callable[[Any], None]) -> None:
    replies = pool(4).run(run_case, program)
    print(replies)
    kinds, *patterns = CASES[program]
    assert {kind for kind, _, _ in replies} == set(kinds.split())
    assert len({text for kind, text, _ in replies if kind == "MismatchError"}) == 1, "one text on all ranks"
    text = next(text for kind, text, _ in replies if kind == "MismatchError")
    for pattern in patterns:
        assert pytest.importorskip("re").search(pattern, text), text
    assert len(set(pytest.importorskip("re").findall(r"test_debug.py:\d+", text))) >= 1
    assert max(seconds for _, _, seconds in replies) < SECONDS
