"""Train a GPT on four ranks and on one device, side by side, and see the same losses.

    python examples/train_gpt.py                            four ranks simulated in this process
    torchrun --nproc-per-node 4 examples/train_gpt.py       four Gloo processes, the same numbers

The model is ordinary `torch.nn`. What makes it distributed is `placements` and `distribute`: some 15 lines.
"""

import copy
import os
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Shard

VOCAB, WIDTH, HEADS, LAYERS = 256, 128, 4, 4
STEPS, BATCH, LENGTH, RATE = 50, 8, 64, 1e-3
TOLERANCE = 1e-4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x):
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def placements(name):
    """Shard heads, hidden units and the vocabulary over `tp`; everything else is replicated."""
    *_, owner, leaf = name.split(".")
    if owner in ("query", "key", "value", "up", "embed"):
        return {"tp": Shard(0)}
    return {"tp": Shard(1)} if owner in ("out", "down") and leaf == "weight" else {}


def distribute(model, mesh):
    """Replace each parameter by a distributed one; a parameter used in two places stays one parameter."""
    done = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter not in done:
            done[parameter] = nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, placements(name)))
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, done[parameter])
    return model


def batches():
    """Random shards of the Python standard library's sources, byte by byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        yield text[starts + torch.arange(LENGTH + 1)]


def make_step(model, place):
    """A function from a batch to its loss, which also updates the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)

    def step(batch):
        tokens, targets = place(batch[:, :-1]), place(batch[:, 1:])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def train(mesh):
    """Both losses of every step, and the communication of the last one."""
    torch.manual_seed(0)
    model, losses = GPT(), []
    twin = distribute(copy.deepcopy(model), mesh)
    one_device = make_step(model, lambda batch: batch)
    sharded = make_step(twin, lambda batch: sw.distribute_tensor(batch, mesh, {"dp": Shard(0)}))
    for batch in batches():
        with sw.trace_comm() as log:
            losses.append((one_device(batch), sharded(batch)))
        progress(len(losses), *losses[-1])
    return losses, log


def say(text="", end="\n"):
    if os.environ.get("RANK", "0") == "0":
        print(text, end=end, flush=True)


def progress(step, one_device, sharded):
    """A bar that moves on a terminal; a line now and then elsewhere."""
    filled = 30 * step // STEPS
    line = f"step {step:3}/{STEPS} {'━' * filled}{'·' * (30 - filled)} one device {one_device:.4f}  sharded {sharded:.4f}"
    if sys.stdout.isatty():
        say(f"\r{line}", end="\n" if step == STEPS else "")
    elif step % 10 == 0:
        say(line)


def show(losses, log):
    """The two tables; gives the largest relative difference."""
    rows = [(step, a, b, abs(a - b) / abs(a)) for step, (a, b) in enumerate(losses, 1)]
    largest = max(row[-1] for row in rows)
    say(f"\n{'step':>4}  {'one device':>10}  {'sharded':>10}  {'difference':>10}")
    for step, one_device, sharded, difference in rows[:1] + rows[4::5]:
        say(f"{step:4}  {one_device:10.6f}  {sharded:10.6f}  {difference:10.1e}")
    say(f"largest relative difference over {STEPS} steps: {largest:.1e} (at most {TOLERANCE:.0e})")
    counts, sizes = Counter(), Counter()
    for record in log.records:
        counts[record.kind, record.axes] += 1
        sizes[record.kind, record.axes] += record.bytes
    say(f"\n{'collectives of one step':24}  {'axes':8}  {'count':>5}  {'bytes':>10}")
    for (kind, axes), count in sorted(counts.items()):
        say(f"{kind:24}  {'×'.join(axes):8}  {count:5}  {sizes[kind, axes]:10,}")
    say(f"{'total':24}  {'':8}  {sum(log.counts().values()):5}  {log.bytes:10,}")
    return largest


if __name__ == "__main__":
    mesh = sw.init_mesh(dp=2, tp=2)
    say(f"a GPT of {LAYERS} layers on (dp=2, tp=2), beside the same model on one device")
    if show(*train(mesh)) > TOLERANCE:
        sys.exit(f"the two programs differ by more than {TOLERANCE:.0e}")
