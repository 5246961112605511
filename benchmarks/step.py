"""What one training step of a small GPT costs: plain torch, torch.distributed.tensor (the peer) and Shardwise, in one run.

    python benchmarks/step.py                  rank 0 of 8 on (dp=2, tp=4), fake process group
    python benchmarks/step.py --device cuda    one rank on NCCL, width 1024, 8 layers, bfloat16
    python benchmarks/step.py --only plain ours

A fake process group takes no time to communicate, so what is measured is the libraries' own work and the local operators.
A step is `loss_fn(tokens, targets)`, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. `sw.capture` and
`sw.compile` take the step whole; torch.compile breaks it at the backward, so its rows compile the first and the third by
themselves. What compiles only with graph breaks, or not at all, is run so, and the error stands in the table.

The plain step is what one rank computes: the same program on its shards of the parameters, tokens and targets, so that the
operators have the shapes of the distributed run, without collectives. Where that run gathers the logits over `tp` before the
loss, the plain step pads its own to the whole vocabulary: it writes as many values, and its backward takes the same slice.

Rounds alternate between the rows, so that noise meets all of them, and the best round counts; the median beside it shows
how noisy the machine is. Compiled code is cached in a folder of this run alone, so that no older graph is measured. Exits
with 1 when a target is missed.
"""

import argparse
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer_api
import torch.nn.functional as F
from small_gpt import distribute
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

Call = Callable[[], Any]
Wrap = Callable[[Callable], Callable]

DEFAULTS = {
    "cpu": {"width": 64, "layers": 2, "heads": 4, "vocab": 128, "batch": 4, "length": 16, "dtype": "float32"},
    "cuda": {"width": 1024, "layers": 8, "heads": 16, "vocab": 8192, "batch": 8, "length": 512, "dtype": "bfloat16"},
}
MESH = {"cpu": {"dp": 2, "tp": 4}, "cuda": {"dp": 1, "tp": 1}}
# Row to the row it is compared with, and the largest allowed ratio on each device.
AGAINST = {
    "peer eager": ("plain eager", {}),
    "peer compiled": ("plain compiled", {}),
    "ours eager": ("peer eager", {}),
    "ours captured": ("plain eager", {"cpu": 1.25, "cuda": 1.05}),
    "plain sw.compile": ("plain compiled", {}),
    "ours torch.compile": ("plain compiled", {}),
    "ours sw.compile": ("plain compiled", {"cpu": 1.1, "cuda": 1.03}),
}
COMPILED: list[Wrap] = [partial(torch.compile, fullgraph=True), torch.compile]
# Row to the ways in which its parts are wrapped, to be tried in this order; none for an eager row.
WRAPS: dict[str, list[Wrap]] = {
    "plain eager": [],
    "plain compiled": COMPILED,
    "plain sw.compile": [],
    "peer eager": [],
    "peer compiled": COMPILED,
    "ours eager": [],
    "ours captured": [],
    "ours torch.compile": COMPILED,
    "ours sw.compile": [],
}
# Row to the way in which its step is wrapped as a whole.
WHOLE: dict[str, Wrap] = {
    "plain sw.compile": partial(sw.compile, fullgraph=True),
    "ours captured": sw.capture,
    "ours sw.compile": partial(sw.compile, fullgraph=True),
}


# ── the model ──


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x):
        """Written as softmax(qk)v because the peer has no CPU rule for `F.scaled_dot_product_attention`."""
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.softmax(q @ k.transpose(-1, -2) * self.head_width**-0.5, -1) @ v
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class GPT(nn.Module):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        width, vocab = options.width, options.vocab
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.to(options.device, getattr(torch, options.dtype))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data(options: argparse.Namespace) -> list[torch.Tensor]:
    """Random tokens and targets."""
    shape = (options.batch, options.length)
    return [torch.randint(0, options.vocab, shape, device=options.device) for _ in range(2)]


# ── programs: a model, its data, and what is done with the logits before the loss ──


class Program(NamedTuple):
    """A model on its data: `gather` takes the logits to the whole vocabulary."""

    model: nn.Module
    data: Sequence[Any]
    gather: Callable[[Any], Any]


def distributed(options: argparse.Namespace, api: ModuleType, mesh: Any) -> Program:
    """Batch on dp, heads, hidden units and the vocabulary of the head on tp; logits gathered over tp."""
    rows = [api.Shard(0), api.Replicate()]
    shards = [api.distribute_tensor(t, mesh, rows) for t in data(options)]
    return Program(distribute(GPT(options), api, mesh), shards, lambda logits: logits.redistribute(mesh, rows))


def plain(options: argparse.Namespace, mesh: sw.Mesh) -> Program:
    """What one rank computes: its own shards as plain tensors."""
    model, shards, _ = distributed(options, sw, mesh)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.detach().to_local().clone()))
    missing = options.vocab - len(model.head.weight)
    return Program(model, [t.to_local() for t in shards], lambda x: F.pad(x, (0, missing)) if missing else x)


# ── steps ──


class Row(NamedTuple):
    """A step that has run once (none, where it fails eagerly too), the seconds this took, and the errors met."""

    step: Call | None
    first: float
    notes: list[str]


def own_code(function: Callable, name: str) -> Callable:
    """The function with a code object and a name of its own.

    Dynamo keeps graphs with the code object, and by its name the sizes seen: rows that share them would look through each
    other's guards, and where their sizes differ be compiled for dynamic ones.
    """
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__, name, None, function.__closure__)


def in_short(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {next((line.strip() for line in str(error).splitlines() if line.strip()), '')}"


def tried(part: Callable, name: str, wraps: Sequence[Wrap], call: Callable[[Callable], Any]) -> tuple[Callable, list[str]]:
    """The part in the first of the wraps that works, or as it is, after its first call; and the errors met on the way."""
    notes = []
    for wrap in wraps:
        try:
            wrapped = wrap(own_code(part, name) if isinstance(part, FunctionType) else part)
            call(wrapped)
            return wrapped, notes
        except Exception as error:
            notes.append(f"{name}: {in_short(error)}")
    call(part)
    return part, notes


def make_row(name: str, program: Program, wraps: Sequence[Wrap]) -> Row:
    model, (tokens, targets), gather = program
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def loss_of(tokens, targets):
        return F.cross_entropy(gather(model(tokens)).flatten(0, 1), targets.flatten())

    start = time.perf_counter()
    loss_fn, notes = tried(loss_of, f"{name}: loss_fn", wraps, lambda f: f(tokens, targets).backward())
    # torch breaks the graph in `Optimizer.step` itself, so one whole graph is not asked for.
    optimizer_step, more = tried(optimizer.step, f"{name}: optimizer.step", wraps[-1:], lambda f: f())
    optimizer.zero_grad()
    first = time.perf_counter() - start

    def step() -> None:
        loss = loss_fn(tokens, targets)
        loss.backward()
        optimizer_step()
        optimizer.zero_grad()

    return Row(step, first, notes + more)


def make_whole_row(name: str, program: Program, wrap: Wrap) -> Row:
    model, (tokens, targets), gather = program
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(tokens, targets):
        loss = F.cross_entropy(gather(model(tokens)).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    start = time.perf_counter()
    whole, notes = tried(step, name, [wrap], lambda f: f(tokens, targets))
    return Row(lambda: whole(tokens, targets), time.perf_counter() - start, notes)


def make_rows(options: argparse.Namespace) -> dict[str, Row]:
    """Every row by name, in the order of the table."""
    axes = MESH[options.device]
    mesh = sw.init_mesh(device=options.device, **axes)
    peer_mesh = init_device_mesh(options.device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    makers = {
        "plain": lambda: plain(options, mesh),
        "peer": lambda: distributed(options, peer_api, peer_mesh),
        "ours": lambda: distributed(options, sw, mesh),
    }
    rows = {}
    for name, wraps in WRAPS.items():
        side = name.split()[0]
        if side not in options.only or (options.rows and name not in options.rows):
            continue
        print(f"preparing: {name}", file=sys.stderr, flush=True)
        try:
            program = makers[side]()
            rows[name] = make_whole_row(name, program, WHOLE[name]) if name in WHOLE else make_row(name, program, wraps)
        except Exception as error:
            rows[name] = Row(None, 0.0, [f"{name}: {in_short(error)}"])
    return rows


# ── measures ──


def seconds(call: Call, repeats: int) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def rounds_of(calls: Sequence[Call], rounds: int, repeats: int = 3, warm_up: int = 5) -> list[list[float]]:
    """Seconds per call of each, round by round; many short rounds, because a shared machine drifts within seconds."""
    for call in calls:
        seconds(call, warm_up)
    times = [[seconds(call, repeats) for call in calls] for _ in range(rounds)]
    return [list(column) for column in zip(*times, strict=True)]


def collectives(step: Call) -> int:
    """Collectives of one step, as torch's profiler sees them: compiled code hides them from the libraries' own logs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("c10d::") for event in profile.events())


# ── the table; gives the names of missed targets ──


def ratio_cells(name: str, best: dict[str, float], device: str) -> tuple[str, bool]:
    """The ratio, its target and the verdict of a row; whether the target is met."""
    other, targets = AGAINST.get(name, ("", {}))
    if other not in best:
        return "", True
    ratio = best[name] / best[other]
    text = f"{ratio:8.2f} × {other:15}"
    if device not in targets:
        return text, True
    return f"{text}{targets[device]:7.2f}  {'OK' if ratio <= targets[device] else 'MISS'}", ratio <= targets[device]


def table(rows: dict[str, Row], options: argparse.Namespace) -> list[str]:
    steps = {name: row.step for name, row in rows.items() if row.step}
    times = dict(zip(steps, rounds_of(list(steps.values()), options.rounds), strict=True))
    best = {name: min(column) for name, column in times.items()}
    missed = []
    print(f"{'step':20}{'first, s':>9}{'best, ms':>10}{'median':>9}{'collectives':>13}{'ratio':>8}   {'to':15}{'target':>7}")
    for name, row in rows.items():
        cells, ok = f"{'n/a':>9}", not AGAINST.get(name, ("", {}))[1]
        if name in steps:
            ratio, ok = ratio_cells(name, best, options.device)
            milliseconds = f"{best[name] * 1e3:10.2f}{statistics.median(times[name]) * 1e3:9.2f}"
            cells = f"{row.first:9.2f}{milliseconds}{collectives(steps[name]):13}{ratio}"
        missed += [] if ok else [name]
        print(f"{name:20}{cells}".rstrip())
        for note in row.notes:
            print(f"    {note[:124]}")
    return missed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of one training step, plain and distributed.")
    parser.add_argument("--device", choices=DEFAULTS, default="cpu")
    parser.add_argument("--only", nargs="+", choices=["plain", "peer", "ours"], default=["plain", "peer", "ours"])
    parser.add_argument("--rows", nargs="+", choices=WRAPS, help="these alone")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", help="of the parameters")
    for name in ("width", "layers", "heads", "vocab", "batch", "length"):
        parser.add_argument(f"--{name}", type=int)
    device = parser.parse_known_args()[0].device
    parser.set_defaults(**DEFAULTS[device])
    return parser.parse_args()


def start(device: str) -> None:
    """The process group: fake on the CPU, one NCCL rank on a GPU."""
    if device == "cpu":
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    else:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())


def be_quiet() -> None:
    """One thread, and no warnings of torch, of its compiler and of its profiler between the rows of a table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["KINETO_LOG_LEVEL"] = "99"
    torch.set_num_threads(1)


def main() -> None:
    options = parse()
    be_quiet()
    torch.manual_seed(0)
    start(options.device)
    sizes = ", ".join(f"{name} {getattr(options, name)}" for name in DEFAULTS["cpu"])
    mesh = ", ".join(f"{axis}={size}" for axis, size in MESH[options.device].items())
    print(f"torch {torch.__version__}, {options.device}, ({mesh}): {sizes}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows = make_rows(options)
        # A collection in the middle of a timed call would count against whichever row it meets.
        gc.collect()
        gc.disable()
        missed = table(rows, options)
    dist.destroy_process_group()
    if missed:
        sys.exit(f"\nmissed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
