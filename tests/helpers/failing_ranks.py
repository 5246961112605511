"""Programs of four Gloo ranks of which one fails, as a program: `python -m tests.helpers.failing_ranks FOLDER CELL...`

A cell is FAILURE:KIND:MODE, as `kill:eager:debug`. Each is a job of its own, of processes that are forked from this one, so
that torch is imported once. What each rank saw is written to FOLDER/CELL/RANK: the values of its steps, the error it ended
with, and after how many seconds of the failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Shard

RANKS, STEPS, FAILS_AT, FAILS = 4, 6, 3, 2
#: The time-out of a job, and how long it may take at most until all ranks have ended, start included.
TIMEOUT, MOST = 5.0, 60.0
#: `data` raises inside an operator, or a stage, on one rank; `alike` on all of them, which then go on.
FAILURES = ("skip", "raise", "kill", "exit", "sleep", "data", "alike")
KINDS = ("eager", "p2p", "captured", "pipeline", "compiled")
MODES = ("plain", "debug")


def total(i: Any, table: Any) -> Any:
    return nn.functional.embedding(i, table).sum().sqrt()  # of a sum that has to be there: also programs communicate


class Layer(nn.Linear):
    """A stage that may fail."""

    def forward(self, x: Any) -> Any:
        if getattr(self, "fails", False):
            raise ValueError("bad data")
        return super().forward(x)


def program(kind: str) -> Callable[[int, str], float]:
    """A step of a kind: communicates, and gives a number that depends on the step."""
    mesh = sw.init_mesh(ax=RANKS)
    if kind == "p2p":
        return lambda step, how: float(
            sw.p2p.wait(sw.p2p.shift(torch.full((2,), 10.0 * step + dist.get_rank()), mesh=mesh)).sum()
        )
    if kind == "pipeline":
        torch.manual_seed(0)
        pipe = sw.pipeline([Layer(4, 4) for _ in range(RANKS)], mesh["ax"], microbatches=2)

        def step(step: int, how: str) -> float:
            pipe.stages[FAILS].fails = how == "data"
            return float(pipe.step(torch.full((4, 4), float(step)), loss=lambda out: out.sum()).item())

        return step
    table = sw.distribute_tensor(torch.arange(10.0)[:, None], mesh)
    run = {"eager": lambda: total, "captured": lambda: sw.capture(total)}.get(
        kind, lambda: torch.compile(total, backend="aot_eager")
    )()
    return lambda step, how: float(run(indices(step, how, mesh), table).item())


def indices(step: int, how: str, mesh: Any) -> Any:
    """Indices into a table of ten rows, two for each rank."""
    found = (torch.arange(8) + step) % 10
    if how == "data":
        found[2 * FAILS] = 99
    return sw.distribute_tensor(found + 99 if how == "alike" else found, mesh, [Shard(0)], src_data_rank=None)


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("bad data")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(1)
    if how == "sleep":
        time.sleep(TIMEOUT * 1.6)


def steps(how: str, run: Callable[[int, str], float], seen: dict[str, Any]) -> None:
    for step in range(STEPS):
        if step == FAILS_AT:
            seen["start"] = time.time()
            if dist.get_rank() == FAILS:
                fail(how)
                if how == "skip":
                    continue
        try:
            seen["values"].append((step, run(step, how if step == FAILS_AT else "")))
        except IndexError:
            if how != "alike":
                raise


def job(rank: int, how: str, kind: str, mode: str, port: int) -> dict[str, Any]:
    """What one rank sees."""
    seen: dict[str, Any] = {"values": [], "error": "", "text": "", "start": time.time()}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    run = program(kind)
    try:
        run(0, "")  # compiles, in time of its own
        with sw.debug_mode(lines=False) if mode == "debug" else nullcontext():
            steps(how, run, seen)
    except (Exception, SystemExit) as error:
        seen["error"], seen["text"] = type(error).__name__, str(error)
    seen["seconds"] = time.time() - seen["start"]
    return seen


def run_cell(folder: Path, cell: str, port: int) -> None:
    """A job; ranks that have not ended after a while are ended."""
    (folder / cell).mkdir(parents=True)
    started = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            answer = json.dumps(job(rank, *cell.split(":"), port))
            (folder / cell / str(rank)).write_text(answer)
            while cell.startswith("data") and len(list((folder / cell).iterdir())) < RANKS:
                time.sleep(0.05)  # whoever is woken, is not so because a process ended
            os._exit(0)
        started.append(pid)
    end = time.monotonic() + MOST
    while started:
        started = [pid for pid in started if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        if time.monotonic() > end:
            for pid in started:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        time.sleep(0.05)


def warm_up() -> None:
    """Load what compiles, so that ranks that compile are not late by more than the time-out."""
    with sw.simulate(RANKS):
        for kind in ("captured", "compiled"):
            program(kind)(0, "")


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder, *cells = sys.argv[1:]
    warm_up()
    for cell in cells:
        run_cell(Path(folder), cell, 20000 + (os.getpid() * 7 + hash(cell)) % 20000)


if __name__ == "__main__":
    main()
