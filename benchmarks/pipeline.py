"""How much of their time the ranks of a pipeline wait: measured, beside what the schedule's table says.

    python benchmarks/pipeline.py                    two stages on 2 Gloo ranks, and on (pp=2, tp=2), one thread each
    python benchmarks/pipeline.py --rounds 20 --draw

The model is the demo's GPT in two halves, its microbatches of one size, so that a batch grows with their number. Of all rounds
the quickest counts: others make the rest longer. The bubble is 1 - busy / (ranks × wall), by the starts and ends of
each entry on each rank; what an entry waits for is not counted as work, its own collectives are. `table` is the bubble of the
table, which for two stages is 1 / (microbatches + 1) if every forward takes the same time and every backward too; `by times`
is that of the table with the measured mean time of each stage's forwards and backwards, so it shows what the unequal stages
cost, and the rest is what sending and the driver cost. Sleepers are stages that sleep for 20 ms forward and 40 ms backward:
where ranks have to share cores, they still show what the driver adds. `held` is how many microbatches each stage held at most.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import shardwise as sw
from shardwise.pipeline import Schedule, Timeline

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import pipeline_gpt as example

MESHES = [{"pp": 2}, {"pp": 2, "tp": 2}]
SCHEDULES, MICROBATCHES, ROWS = ("gpipe", "1f1b"), (2, 4, 8), 4
NAP = 0.02


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        time.sleep(2 * NAP)
        return grad


class Sleeper(nn.Module):
    """A stage that takes its time and computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        return Asleep.apply(x.float() * self.scale)


def sleepers(mesh: sw.Mesh) -> list[nn.Module]:
    return [Sleeper() for _ in range(mesh.axis_sizes["pp"])]


def halves(mesh: sw.Mesh) -> list[nn.Module]:
    """The demo's GPT in two halves."""
    stages = example.cut(example.untied(), mesh.axis_sizes["pp"])
    for index, stage in enumerate(stages if "tp" in mesh.axis_sizes else []):
        example.distribute(stage, mesh["pp"].at(index))
    return stages


def measured(pipe: Any, loss: Callable[..., Any], rounds: int) -> Timeline:
    """The timeline of the quickest step."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (ROWS * pipe.schedule.microbatches, example.LENGTH + 1), generator=draw)
    found = []
    for _ in range(rounds + 1):
        with pipe.record() as run:
            pipe.step(rows[:, :-1], target=rows[:, 1:], loss=loss)
        pipe.zero_grad()
        dist.barrier()
        found.append(run.timeline)
    return min(found[1:], key=lambda timeline: timeline.wall)


def by_times(schedule: Schedule, timeline: Timeline) -> float:
    """The bubble of the table, each stage's forwards and backwards taking the mean of what they took."""
    costs = {
        kind: [
            statistics.mean(end - start for row, what, _, start, end in timeline.spans if what == kind and names[row] == stage)
            for stage in range(schedule.stages)
        ]
        for names in [[int(name.rpartition(" ")[2]) for name in timeline.rows]]
        for kind in "FB"
    }
    return schedule.bubble(costs["F"], costs["B"])


def measure(mesh: sw.Mesh, name: str, rounds: int, draw: bool) -> None:
    make, loss = MODELS[name]
    say(f"\n{name} on {mesh}, microbatches of {ROWS} × {example.LENGTH} tokens")
    say("schedule  microbatches  step, ms  measured   table  by times  held")
    for schedule in SCHEDULES:
        for microbatches in MICROBATCHES:
            pipe = sw.pipeline(make(mesh), mesh["pp"], schedule, microbatches)
            timeline = measured(pipe, loss, rounds)
            held: list[Any] = [None] * mesh.size()
            dist.all_gather_object(held, pipe.most_held)
            most = [max(several) for several in zip(*held, strict=True)]
            told = [timeline.bubble, pipe.schedule.bubble(), by_times(pipe.schedule, timeline)]
            shares = f"{told[0]:9.1%} {told[1]:7.1%} {told[2]:9.1%}"
            say(f"{schedule:8}  {microbatches:12}  {timeline.wall * 1e3:8.0f}  {shares}  {', '.join(map(str, most))}")
            if draw:
                say(timeline.draw())


def distance(out: Any, target: Any) -> Any:
    return nn.functional.mse_loss(out, target.float())


MODELS: dict[str, tuple[Callable[[sw.Mesh], list[nn.Module]], Callable[..., Any]]] = {
    "a GPT": (halves, example.loss),
    "sleepers": (sleepers, distance),
}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def worker(rank: int, axes: dict[str, int], folder: str, options: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    size = axes["pp"] * axes.get("tp", 1)
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", size), rank=rank, world_size=size)
    mesh = sw.init_mesh(**axes)
    for name in options.only or MODELS:
        measure(mesh, name, options.rounds, options.draw)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draw", action="store_true", help="also draw the timelines")
    parser.add_argument("--only", nargs="*", choices=["a GPT", "sleepers"])
    options = parser.parse_args()
    for axes in MESHES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (axes, folder, options), nprocs=axes["pp"] * axes.get("tp", 1))


if __name__ == "__main__":
    main()
