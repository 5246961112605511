"""Debug mode on Gloo ranks: ranks that go different ways raise the same error, soon, instead of waiting forever."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import re
import socket
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import transport
from shardwise.comm.watch.debug import announce_batch, current_session

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
    return transport(mesh, f"gather{rows}").all_gather(torch.ones(rows, 2), mesh, axes)


# ── programs in which ranks go different ways ──


def skip(mesh: Any) -> None:
    if not rank_is(1):
        gather(3, ("dp", "tp"), mesh)
    transport(mesh, "sum").all_reduce(torch.ones(4), "sum", mesh, ("dp", "tp"))


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
    transport(mesh, "swap").all_to_all(torch.ones(sum(send)), send, (1, 1, 1, 1), mesh, ("dp", "tp"))


def swapped(mesh: Any) -> None:
    steps = [
        lambda: gather(2, ("dp", "tp"), mesh),
        lambda: transport(mesh, "sum").all_reduce(torch.ones(4), "sum", mesh, ("dp", "tp")),
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


def run_case(program: Callable[[Any], None], lines: bool = True) -> tuple[str, str, float]:
    mesh = sw.init_mesh(dp=2, tp=2)
    return told(lambda: program(mesh), lines=lines)


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_all_ranks_raise_the_same_error_soon(pool: Any, program: Callable[[Any], None]) -> None:
    replies = pool(4).run(run_case, program)
    kinds, *patterns = CASES[program]
    assert {kind for kind, _, _ in replies} == set(kinds.split())
    texts = {text for kind, text, _ in replies if kind == "MismatchError"}
    assert len(texts) == 1, "one text on all ranks"
    for pattern in patterns:
        assert re.search(pattern, min(texts)), texts
    assert len(set(re.findall(r"test_debug.py:\d+", min(texts)))) >= 2, "both lines"
    assert max(seconds for _, _, seconds in replies) < SECONDS


# ── programs in which they do not ──


def run_sound() -> tuple[list[Any], list[Any], int]:
    """What a program gives, with and without debug mode: uneven shards, partial sums, gradients, other meshes."""
    return program(), under_debug(program), under_debug(len_of_log)


def program() -> list[Any]:
    mesh, other = sw.init_mesh(dp=2, tp=2), sw.init_mesh(x=3, ranks=[3, 1, 0])
    x = sw.distribute_tensor(torch.arange(35.0).view(7, 5), mesh, {"dp": Shard(0), "tp": Shard(1)}).requires_grad_()
    y = sw.DTensor.from_local(torch.ones(dist.get_rank(), 2), mesh, [Shard(0), Shard(0)], run_check=True)
    loss = (x.T @ x).relu().sum()
    loss.backward()
    moved = x.detach().redistribute(placements=[Shard(1), Shard(0)]).redistribute(other, [Shard(1)])
    back = moved.redistribute(mesh, [Replicate(), Shard(0)])
    return [loss.item(), x.grad.full_tensor().tolist(), y.shape, back.full_tensor().tolist()]


def under_debug(function: Callable[[], Any]) -> Any:
    with sw.debug_mode(timeout=20), sw.debug_mode():
        return function()


def len_of_log() -> int:
    with sw.trace_comm() as log:
        program()
    return len(log.records)


def test_a_sound_program_is_left_alone(pool: Any) -> None:
    for plain, checked, records in pool(4).run(run_sound):
        assert plain == checked and records > 5
    assert [kind for kind, *_ in pool(4).run(run_case, swapped_alike, False)] == [""] * 4, "allowed if asked for"


# ── batches of messages ──


def batch(seed: int, wrong: bool) -> tuple[list[tuple[int, int, tuple[int, ...]]], int]:
    """Messages (from, to, shape), the same on every rank, and which of them one side has wrong, if any."""
    random.seed(seed)
    found = [(*random.choices(range(4), k=2), (random.randrange(3), 2)) for _ in range(random.randrange(1, 6))]
    return found, random.randrange(len(found)) if wrong else -1


def announce_random(seed: int, wrong: bool) -> None:
    messages, bad = batch(seed, wrong)
    send, receive, me = defaultdict(list), defaultdict(list), dist.get_rank()
    for index, (source, goal, shape) in enumerate(messages):
        if source == me:
            send[goal].append((shape, torch.float32))
        if goal == me and not (index == bad and seed % 2):
            receive[source].append(((*shape, 1) if index == bad else shape, torch.float32))
    if send or receive:
        announce_batch(current_session(), "p2p", send, receive)


def run_batches() -> tuple[list[str], list[list[tuple[str, str, float]]]]:
    right = told(lambda: [announce_random(seed, False) for seed in range(60)])
    return right, [told(lambda seed=seed: announce_random(seed, True), timeout=20) for seed in range(30)]


def test_random_batches(pool: Any) -> None:
    """A message that its goal does not expect, or expects in another shape: all ranks say so, also those without a part."""
    replies = pool(4).run(run_batches)
    for right, wrong in replies:
        assert right[0] == ""
        assert {kind for kind, _, _ in wrong} == {"MismatchError"}
        assert max(seconds for *_, seconds in wrong) < SECONDS
    texts = [[text for _, text, _ in wrong] for _, wrong in replies]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def chain(mesh: Any) -> None:
    """Rank 0 begins to receive from rank 1 before that finds that it does not agree with rank 2."""
    me, tag, x = dist.get_rank(), 4711, torch.ones(2)
    message, other = [((2,), torch.float32)], [((3,), torch.float32)]
    if me == 0:
        announce_batch(current_session(), "p2p", {}, {1: message})
        current_session().finish(dist.group.WORLD.recv([x], 1, tag).wait)
    elif me == 1:
        announce_batch(current_session(), "p2p", {0: message, 2: message}, {})
    elif me == 2:
        time.sleep(0.5)
        announce_batch(current_session(), "p2p", {}, {1: other})


def test_a_rank_that_has_begun_to_wait_is_told(pool: Any) -> None:
    replies = pool(4).run(run_case, chain)
    assert {kind for kind, _, _ in replies} == {"MismatchError"} and len({text for _, text, _ in replies}) == 1
    assert "rank 1 is about to send f32[2] to rank 2, which expects f32[3]" in replies[0][1]


# ── ranks that die ──


def die(rank: int, port: int, folder: str) -> None:
    """Rank 1 dies. Rank 0, which holds the store, ends at once when it has raised."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, 4, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    mesh = sw.init_mesh(dp=2, tp=2)

    def program() -> None:
        gather(2, ("tp",), mesh)
        if rank == 1:
            os._exit(1)
        gather(3, ("tp",), mesh)

    Path(folder, str(rank)).write_text(json.dumps(told(program, timeout=4)))
    os._exit(0)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    ranks = [context.Process(target=die, args=(rank, port, str(tmp_path)), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    replies = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 2, 3)]
    assert {kind for kind, *_ in replies} == {"MismatchError"} and len({text for _, text, _ in replies}) == 1
    found = r"rank 0 waits for rank 1:\n.*f32\[3, 2\].*\n  rank 1 died.*f32\[2, 2\]|rank 1 died.*f32\[2, 2\]"
    assert re.search(found, replies[0][1]), replies[0][1]
    assert max(seconds for *_, seconds in replies) < SECONDS


# ── ranks that are busy ──


def busy(rank: int, port: int, folder: str) -> None:
    """Rank 1 is in one call of C that holds Python's lock, for more than half of the time that it is waited for."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = sw.init_mesh(tp=2)

    def program() -> None:
        if rank == 1:
            ctypes.PyDLL(None).usleep(3_500_000)
        gather(3, ("tp",), mesh)

    Path(folder, str(rank)).write_text(json.dumps(told(program, timeout=6)))
    os._exit(0)


def test_a_rank_that_is_long_in_one_call_lives(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [mp.get_context("spawn").Process(target=busy, args=(rank, port, str(tmp_path)), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    replies = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [kind for kind, *_ in replies] == ["", ""] and replies[0][2] > 3


def test_alone_nothing_is_compared() -> None:
    with sw.debug_mode(), sw.simulate(4):
        mesh = sw.init_mesh(dp=2, tp=2)
        assert type(transport(mesh)).__name__ == "Simulated"
    with pytest.raises(sw.ArgumentError, match="debug_mode: timeout is a number above 0, got 0"), sw.debug_mode(timeout=0):
        pass


# ── programs ──


def seeded(function: Callable[[Any], torch.Tensor], x: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return function(x)


def made(how: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a program."""
    torch._dynamo.reset()
    return sw.capture(function) if how == "captured" else torch.compile(function, backend=how, fullgraph=True)


def run_programs(how: str) -> tuple[Any, Any, tuple[str, str, float]]:
    """A program, with and without debug mode, and one that a rank skips before another."""
    mesh = sw.init_mesh(dp=2, tp=2)
    x = sw.distribute_tensor(torch.arange(20.0).view(4, 5), mesh, {"dp": Shard(0), "tp": Shard(1)})
    step = made(how, lambda x: (x @ x.T).sum())
    other = made(how, lambda x: x.redistribute(placements=[Replicate(), Replicate()]).to_local().sum())
    noisy = made(how, lambda x: torch.nn.functional.dropout(x, 0.5).to_local())
    most = made(how, lambda x: x.amax() + x.sum(0).redistribute(placements=[Shard(0), Replicate()]).to_local().sum())
    plain, moved, reduced = step(x).item(), other(x).item(), most(x).item()
    assert under_debug(lambda: [step(x).item(), other(x).item(), most(x).item()]) == [plain, moved, reduced]
    assert torch.equal(seeded(noisy, x), under_debug(lambda: seeded(noisy, x))), "nothing more is drawn"

    def skipping() -> None:
        if not rank_is(3):
            step(x)
        other(x)

    return plain, moved, told(skipping)


def check_programs(replies: list[Any], line: str) -> None:
    """All ranks were told the same: of the line of those that came and of the one that skipped."""
    texts = {text for *_, (kind, text, _) in replies if kind == "MismatchError"}
    assert len(texts) == 1 and all(seconds < SECONDS for *_, (_, _, seconds) in replies)
    assert re.search(line, min(texts)), texts
    assert re.search(r"rank 3: .* over dp, tp of .* at test_debug.py:\d+", min(texts)), texts


def test_captured_programs_are_compared(pool: Any) -> None:
    check_programs(pool(4).run(run_programs, "captured"), r"for aten.mm over .* at test_debug.py:\d+ in a captured program")


@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_programs_are_compared(pool: Any, how: str) -> None:
    """Also those that were compiled before; by the line that calls the program."""
    check_programs(pool(4).run(run_programs, how), r"all_gather of f32\[2, 2\] over dp of .* at test_debug.py:\d+ \(from")


def warned_of_sums() -> list[str]:
    mesh = sw.init_mesh(tp=2)
    x = sw.distribute_tensor(torch.tensor([[1.0, 2.0]]), mesh, [Shard(1)])
    weights = [sw.distribute_tensor(torch.tensor([[1.0], [last]]), mesh, [Shard(0)]) for last in (3.0, math.inf)]
    with warnings.catch_warnings(record=True) as told, sw.debug_mode():
        warnings.simplefilter("always")
        (x @ weights[0]).full_tensor()
        x.redistribute(placements=[Replicate()])
        for _ in range(3):
            (x @ weights[1]).full_tensor()
        (x @ weights[1]).full_tensor()
    return [str(warning.message) for warning in told if warning.category is RuntimeWarning]


def test_sums_that_are_not_finite_are_told_once_for_a_line(pool: Any) -> None:
    first, second = pool(2).run(warned_of_sums)
    assert not first
    assert len(second) == 2 and all("all_reduce(sum)" in text and "rank 1" in text for text in second), second
    assert all("test_debug.py:" in text and "redistribute" in text for text in second), second
