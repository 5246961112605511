"""Pipelines: stages of a model on groups of ranks.

A stage is an ordinary module; a rank holds the parameters of its own stage only. Losses and gradients are those of
one device.
"""

import torch
from torch import nn

import shardwise as sw

# ## Two stages, each sharded over tp
#
# Stage i lives on `mesh["pp"].at(i)`. Shard it there as you like; what is not sharded is replicated. Parameters are
# replaced, so make the optimizer afterwards.

torch.manual_seed(0)
mesh = sw.init_mesh(pp=2, tp=2)
stages = [nn.Sequential(nn.Linear(16, 64), nn.GELU()), nn.Linear(64, 4)]
up = stages[0][0]
up.weight = nn.Parameter(sw.distribute_tensor(up.weight.detach(), mesh["pp"].at(0), {"tp": sw.Shard(0)}))

pipe = sw.pipeline(stages, mesh["pp"], schedule="1f1b", microbatches=4)
optimizer = torch.optim.AdamW(pipe.parameters())
print(pipe.schedule)
print(f"{pipe.schedule.bubble(backward=2.0):.2f}")
# → stage 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3
# → stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .
# → 0.20

# The table says what each stage runs when: the forward and backward of each microbatch. The bubble is the share of
# time in which ranks wait, here if a backward takes twice as long as a forward. `.draw()` and `.svg("table.svg")`
# draw it.
#
# ## A step
#
# `pipe.step` runs forward and backward of all microbatches; the loss is that of the whole batch, on every rank.

x, target = torch.randn(32, 16), torch.randint(4, (32,))
with pipe.record() as run:
    loss = pipe.step(x, target=target, loss=nn.functional.cross_entropy)
optimizer.step()
assert 0 < loss.item() < 10 and 0 <= run.timeline.bubble < 1

# `run.timeline` is what really happened, to be drawn beside the table. `pipe(x)` evaluates, `pipe.clip_grad_norm_`
# clips over all stages, `pipe.own_parameters()` are those of this rank's stage (an optimizer over all of them also
# works, and spends some time on shapes).
#
# ## Other schedules
#
# "gpipe" runs all forwards first. A table of your own is text; one that cannot run (a backward before its forward,
# two stages that wait for each other) is refused with the cell that is wrong:

print(sw.Schedule.read("F0 F1 .  B0 .  B1", ".  F0 B0 F1 B1 . ").alive)
try:
    sw.Schedule.read("B0 F0 .  .", ".  F0 B0 .")
except sw.PipelineError as error:
    print(type(error).__name__)
# → (2, 1)
# → PipelineError

# - `placements={"dp": Shard(0)}` shards batches that are plain tensors over another axis.
# - `compile=True` compiles each stage.
# - A parameter belongs to one stage: tied ones (an embedding that is also the head) become two.
#
# [examples/pipeline_gpt.py](../../examples/pipeline_gpt.py) is a GPT; [benchmarks](../benchmarks.md) has measured
# bubbles; the [design page](../design/0016-pipelines.md) has the reasons.
