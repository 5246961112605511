"""Memory and time of a GPT whose blocks are computed again in the backward: `sw.remat` beside torch's own checkpointing.

    python benchmarks/remat.py                          12 layers on one thread of the host
    python benchmarks/remat.py --device cuda            GPT-2 small, bfloat16
    python benchmarks/remat.py --compiled               torch.compile around the whole model
    python benchmarks/remat.py --rows none full matmuls
    python benchmarks/remat.py --plot docs/remat.png    memory against time (needs matplotlib)

A row is a policy. "none" computes nothing again and "full" everything. Torch's side is `create_selective_checkpoint_contexts`
with a policy that keeps the results of the same operators; "full, plain" is its `checkpoint` that sees no operators, and so
cannot tell whether they are the same twice. On one device `collectives` and `custom` keep nothing, and `default` what
`attention` does. A step is a forward and a backward, without an optimizer.

Gradients are compared with those of "none" first: eager on the host bit by bit, elsewhere to within rounding. Memory is the
highest sum of what steps allocate and have not freed yet: on the host as torch's profiler sees its allocator, exactly, and
apart from the timed rounds. Time on the host is that of the processor, on one thread, so that other programs count less. Rounds
alternate between all rows and sides, the best round counts, and a row above its target is given as many rounds again, up to
three times. Exits with 1 when a gradient differs or a target is missed.
"""

import argparse
import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from step import be_quiet, in_short, own_code
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from shardwise import save

#: Where matplotlib is not, everything but `--plot` works.
pyplot: Any = importlib.import_module("matplotlib.pyplot") if importlib.util.find_spec("matplotlib") else None

#: A forward and a backward, which gives the gradients.
Step = Callable[[], list[Tensor]]
#: How a model runs one of its blocks.
Run = Callable[[nn.Module, Tensor], Tensor]
#: A row and a side.
Key = tuple[str, str]

DEFAULTS = {
    "cpu": {"width": 128, "layers": 12, "heads": 4, "vocab": 512, "batch": 8, "length": 256, "dtype": "float32"},
    "cuda": {"width": 768, "layers": 12, "heads": 12, "vocab": 50304, "batch": 16, "length": 1024, "dtype": "bfloat16"},
}
SIDES = ("torch", "ours")
#: The most that ours may take of what torch takes.
TIME, MEMORY = 1.05, 1.0
#: How far apart gradients may be where kernels differ or add in no fixed order, as a part of the largest.
ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}

#: Rows that keep the same on one device as another one does; the plot and, since each takes a minute, `--compiled` omit them.
SAME = {"collectives": "full", "custom": "full", "default": "attention"}


def policies(options: argparse.Namespace) -> dict[str, save.Policy]:
    """Every policy by the name of its row; the limit lets products as wide as the model pass, and no wider ones."""
    limit = options.batch * options.length * options.width * getattr(torch, options.dtype).itemsize
    return {
        "full": save.nothing,
        "collectives": save.collectives,
        "custom": save.custom,
        "random": save.random,
        "attention": save.attention,
        "default": save.default,
        "matmuls & up_to": save.matmuls & save.up_to(limit),
        "matmuls": save.matmuls,
        "matmuls | attention": save.matmuls | save.attention,
        "everything": save.everything,
    }


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + dropout(self.o(y))
        return x + dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def dropout(x: Tensor) -> Tensor:
    """One operator on every device: `F.dropout` on the host changes its mask in place, and torch refuses to keep such a one."""
    return torch.native_dropout(x, 0.1, True)[0]


class GPT(nn.Module):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        width, vocab = options.width, options.vocab
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(options.length, width)
        self.blocks = nn.ModuleList(Block(width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.to(options.device, getattr(torch, options.dtype))

    def forward(self, tokens, run):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = run(block, x)
        return self.head(self.norm(x))


# ── the two sides ─────────────────────────────────────────────────────────────────────────────────────────────────────


def kept_by_torch(policy: save.Policy) -> Callable[..., CheckpointPolicy]:
    """The policy as torch's own checkpointing takes it, remembered for each operator where nothing else decides."""
    known: dict[Any, CheckpointPolicy] = {}

    def choose(context: Any, op: Any, *args: Any, **words: Any) -> CheckpointPolicy:
        if op in known:
            return known[op]
        made = save.Made(str(op), bytes=product_bytes(op, args), random=torch.Tag.nondeterministic_seeded in op.tags)
        said = CheckpointPolicy.MUST_SAVE if policy.choose(made, op, args).saves else CheckpointPolicy.PREFER_RECOMPUTE
        if policy.by_operator:
            known[op] = said
        return said

    return choose


def product_bytes(op: Any, args: Sequence[Any]) -> int:
    """The bytes of a product of matrices, by its factors: torch 2.11 shows a policy no results. Of another operator, 0."""
    if not save.matmuls.choose(save.Made(str(op))).saves:
        return 0
    *_, left, right = args
    return left.shape[:-1].numel() * right.shape[-1] * left.element_size()


def runs(policy: save.Policy) -> dict[str, Run]:
    """How each side runs a block under a policy."""
    contexts = partial(create_selective_checkpoint_contexts, kept_by_torch(policy))

    def by_torch(block, x):
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    def by_us(block, x):
        return sw.remat(block, x, save=policy)

    return {"torch": by_torch, "ours": by_us}


def make_step(model: GPT, run: Run, name: str, options: argparse.Namespace) -> Step:
    draw = torch.Generator().manual_seed(0)
    shape = (options.batch, options.length)
    tokens, targets = (torch.randint(0, options.vocab, shape, generator=draw).to(options.device) for _ in range(2))

    def loss_of(tokens, targets):
        return F.cross_entropy(model(tokens, run).flatten(0, 1).float(), targets.flatten())

    loss_fn = torch.compile(own_code(loss_of, name), fullgraph=True) if options.compiled else loss_of

    def step() -> list[Tensor]:
        model.zero_grad()  # a step that failed half-way has left some
        loss_fn(tokens, targets).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return gradients

    return step


def make_steps(options: argparse.Namespace) -> dict[Key, Step]:
    """The steps by row and side, all of one model; those without a policy are on torch's side alone."""
    torch.manual_seed(0)
    model = GPT(options)
    chosen: dict[str, dict[str, Run]] = {
        "none": {"torch": lambda block, x: block(x)},
        "full, plain": {"torch": lambda block, x: checkpoint(block, x, use_reentrant=False)},
    }
    chosen |= {name: runs(policy) for name, policy in policies(options).items() if name in options.rows}
    return {
        (name, side): make_step(model, run, f"{name} by {side}", options)
        for name, sides in chosen.items()
        for side, run in sides.items()
    }


# ── measures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(steps: dict[Key, Step], options: argparse.Namespace) -> dict[Key, str]:
    """What is wrong with the steps that fail, or whose gradients are not those of "none"; the first step also compiles."""
    allowed = 0.0 if options.device == "cpu" and not options.compiled else ROUNDING[options.dtype]
    wrong, want = {}, []
    for key, step in steps.items():
        torch.manual_seed(1)
        try:
            got = step()
        except Exception as error:
            wrong[key] = in_short(error)
            continue
        want = want or got
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
        if not apart <= allowed:
            wrong[key] = f"gradients differ from those of none: by {apart:.1e} of the largest, where {allowed:.1e} is allowed"
    return wrong


def peak(step: Step, device: str) -> int:
    """The most bytes that two steps in a row hold at a time."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(), step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(), step()
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


def seconds(step: Step, device: str) -> float:
    clock = time.process_time
    if device == "cuda":
        clock = time.perf_counter
        torch.cuda.synchronize()
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def best_of(steps: Mapping[Key, Step], options: argparse.Namespace) -> dict[Key, float]:
    """Seconds of the best round of each step; rounds alternate between them, and go on for rows above their target."""
    # What is there already is no garbage: a collection during a step then costs what the step itself left behind.
    gc.collect()
    gc.freeze()
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(4):
        slow = {key: step for key, step in steps.items() if not turn or ratio(best, key[0]) > TIME}
        for _ in range(options.rounds):
            best |= {key: min(best[key], seconds(step, options.device)) for key, step in slow.items()}
    return best


def ratio(figures: Mapping[Key, float], name: str) -> float:
    """Ours over torch's in one row; 0 where one of the two is missing."""
    return figures[name, "ours"] / figures[name, "torch"] if all((name, side) in figures for side in SIDES) else 0.0


# ── the table and the plot ────────────────────────────────────────────────────────────────────────────────────────────


def cells(figures: Mapping[Key, float], name: str, unit: float, target: float) -> str:
    """Torch's figure and ours, their ratio and the verdict."""
    text = "".join(f"{figures[name, side] / unit:10.1f}" if (name, side) in figures else f"{'':10}" for side in SIDES)
    part = ratio(figures, name)
    return f"{text}{part:8.3f}  {'OK' if part <= target else 'MISS':4}" if part else f"{text}{'':14}"


def table(memory: Mapping[Key, int], times: Mapping[Key, float], wrong: Mapping[Key, str]) -> list[str]:
    """Prints a line for each row; gives the rows that miss a target."""
    heads = "".join(f"{head:>10}{'ours':>10}{'ratio':>8}  {target:<4}" for head, target in (("MiB", MEMORY), ("ms", TIME)))
    print(f"{'kept':22}{heads}")
    missed = []
    for name in dict.fromkeys(name for name, _ in [*memory, *wrong]):
        print(f"{name:22}{cells(memory, name, 2**20, MEMORY)}{cells(times, name, 1e-3, TIME)}".rstrip())
        notes = [f"    {side}: {wrong[name, side]}" for side in SIDES if (name, side) in wrong]
        print("".join(f"{note[:124]}\n" for note in notes), end="", flush=True)
        if notes or ratio(memory, name) > MEMORY or ratio(times, name) > TIME:
            missed.append(name)
    return missed


def draw(path: str, memory: Mapping[Key, int], times: Mapping[Key, float], title: str) -> None:
    """Memory against time: a line from torch's point to ours for each policy."""
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    places = {key: (memory[key] / 2**20, times[key] * 1e3) for key in times if key[0] not in SAME}
    looks = {"torch": ("s", "tab:orange"), "ours": ("o", "tab:blue")}
    for side, (marker, colour) in looks.items():
        points = [place for key, place in places.items() if key[1] == side and key[0] != "none"]
        axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, zorder=2, label=side)
    axes.scatter(*places["none", "torch"], marker="*", s=150, color="black", label="no checkpointing")
    for name in dict.fromkeys(name for name, side in places if side == "ours"):
        axes.plot(*zip(*(places[name, side] for side in SIDES if (name, side) in places), strict=True), color="grey", zorder=1)
        label = ", ".join([name, *(other for other, one in SAME.items() if one == name)])
        axes.annotate(label, places[name, "ours"], textcoords="offset points", xytext=(8, 6), fontsize=9)
    if ("full, plain", "torch") in places:
        axes.annotate("full, plain", places["full, plain", "torch"], textcoords="offset points", xytext=(8, -12), fontsize=9)
    axes.set(xlabel="peak memory of a step, MiB", ylabel="time of a step, ms", title=title)
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and time of a GPT that computes its blocks again.")
    parser.add_argument("--device", choices=DEFAULTS, default="cpu")
    parser.add_argument("--compiled", action="store_true", help="torch.compile around the whole model")
    parser.add_argument("--rows", nargs="+", help="these policies alone")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--plot", help="a file for the plot")
    parser.add_argument("--dtype", choices=ROUNDING, help="of the parameters")
    for name in ("width", "layers", "heads", "vocab", "batch", "length"):
        parser.add_argument(f"--{name}", type=int)
    device = parser.parse_known_args()[0].device
    parser.set_defaults(**DEFAULTS[device])
    options = parser.parse_args()
    if options.plot and pyplot is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    known = [*policies(options)]
    options.rows = options.rows or [name for name in known if not (options.compiled and name in SAME)]
    if unknown := {*options.rows} - {*known, "none"}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are none, {', '.join(known)}")
    return options


def main() -> None:
    options = parse()
    be_quiet()
    sizes = ", ".join(f"{name} {getattr(options, name)}" for name in DEFAULTS["cpu"])
    title = f"torch {torch.__version__}, {options.device}{', compiled' * options.compiled}"
    print(f"{title}: {sizes}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        steps = make_steps(options)
        wrong = compared(steps, options)
        steps = {key: step for key, step in steps.items() if key not in wrong}
        memory = {key: peak(step, options.device) for key, step in steps.items()}
        times = best_of(steps, options)
    missed = table(memory, times, wrong)
    if options.plot:
        draw(options.plot, memory, times, f"{title}\n{sizes}")
    if missed:
        sys.exit(f"\nmissed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
