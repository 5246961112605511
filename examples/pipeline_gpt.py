"""Train a GPT in two stages, each sharded over two ranks, beside one device, and see the same losses.

    python examples/pipeline_gpt.py                            four ranks simulated in this process
    torchrun --nproc-per-node 4 examples/pipeline_gpt.py       four Gloo processes, the same numbers

The model and the data are those of train_gpt.py; here the embedding and the head are two parameters, since a stage has its own.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import nn
from train_gpt import BATCH, GPT, LENGTH, RATE, batches, distribute

import shardwise as sw

STEPS, MICROBATCHES = 10, 4


def cut(model, stages):
    """The model as a chain of modules: the embeddings before the first blocks, the head after the last."""
    size = len(model.blocks) // stages
    parts = [nn.Sequential(*model.blocks[i * size : (i + 1) * size]) for i in range(stages)]
    parts[0] = nn.Sequential(Start(model), *parts[0])
    parts[-1] = nn.Sequential(*parts[-1], model.norm, model.head)
    return parts


class Start(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embed, self.position = model.embed, model.position

    def forward(self, tokens):
        return self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))


def untied():
    torch.manual_seed(0)
    model = GPT()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(mesh, schedule="1f1b"):
    model = untied()
    stages = cut(copy.deepcopy(model), mesh.axis_sizes["pp"])
    for i, stage in enumerate(stages):
        distribute(stage, mesh["pp"].at(i))  # heads, hidden units and the vocabulary over "tp"
    pipe = sw.pipeline(stages, mesh["pp"], schedule, MICROBATCHES)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=RATE) for m in (model, pipe)]
    say(f"{pipe.schedule}\n")
    say(f"{'step':>4}  {'one device':>10}  {'pipeline':>10}")
    for step, batch in zip(range(STEPS), batches(), strict=False):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        one_device = loss(model(tokens), targets)
        one_device.backward()
        piped = pipe.step(tokens, target=targets, loss=loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        say(f"{step + 1:4}  {one_device.item():10.6f}  {piped.item():10.6f}")
        assert abs(one_device.item() - piped.item()) < 1e-4
    with pipe.record() as run:
        pipe.step(tokens, target=targets, loss=loss)
    say(f"\n{run.timeline.draw()}")
    say(f"bubble: {run.timeline.bubble:.0%} measured, {pipe.schedule.bubble():.0%} if all entries took the same time")


def say(text):
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


if __name__ == "__main__":
    say(f"a GPT on (pp=2, tp=2): {MICROBATCHES} microbatches of {BATCH // MICROBATCHES} × {LENGTH} tokens")
    main(sw.init_mesh(pp=2, tp=2))
