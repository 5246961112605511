"""Eager, captured or compiled.

A program over DTensors can run in three ways. They give the same results; what differs is how much work the host
does at each call. The README has the times of one training step; [benchmarks](../benchmarks.md) has how they were
measured.

- **Eager**: every operator is decided (or looked up) and run at once. Use it to write and to debug, and where
  kernels are long.
- **`sw.capture`**: the function is traced at its first call to plain operators and collectives, the same text on
  every rank. Later calls replay it without any work on layouts. Nothing is compiled, so the first call takes
  seconds, not minutes.
- **`sw.compile`**: the same program, through Inductor. One rank of the job compiles and the others load what it
  made.

Plain `torch.compile` works too, as one graph, forward and backward; it pays at every call for guards and hooks of
the parameters.
"""

import torch

import shardwise as sw
from shardwise import Shard

mesh = sw.init_mesh(dp=2, tp=2)
x = sw.distribute_tensor(torch.randn(8, 16), mesh, {"dp": Shard(0)})
w = torch.nn.Parameter(sw.distribute_tensor(torch.randn(16, 32), mesh, {"tp": Shard(1)}))

# ## A whole training step
#
# Forward, backward, clipping and the optimizer become one program, without autograd's work at each call. In it,
# moves are merged, small all-reduces are bucketed, reductions move behind linear operators, and waits go late. The
# results of a function that calls `backward` come without gradients.

optimizer = torch.optim.AdamW([w], lr=torch.tensor(1e-3))  # a tensor, since a number would be part of the program


@sw.capture
def step(x):
    loss = torch.relu(x @ w).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


losses = [step(x).item() for _ in range(3)]
assert losses[0] > losses[2]

# `step.print()` shows the local program, and behind each collective the line that needs it. On a job it is the program
# of one rank, which is the program of all. Simulated, each operator stands there once for each rank:

activate = sw.capture(lambda x: torch.relu(x @ w))
with torch.no_grad():
    activate(x)
activate.print()
# → ...
# →   mm: f32[4, 16] = mm(...)
# →   mm_1: f32[4, 16] = mm(...)
# →   mm_2: f32[4, 16] = mm(...)
# →   mm_3: f32[4, 16] = mm(...)
# →   relu: f32[4, 16] = relu(mm)
# → ...

# Inputs of another layout, shape or dtype, and changes of what the function reads from outside (globals, attributes
# of modules), trace it anew. A number that changes from step to step, such as a learning rate, is given as a
# tensor.
#
# ## Compiling
#
# `sw.compile` takes what `torch.compile` takes: functions, modules, an optimizer's `step`, `fullgraph=`,
# `dynamic=`, `mode=`. `sw.compile_report()` tells which rank compiled what.

gelu = sw.compile(lambda x, w: torch.nn.functional.gelu(x @ w), fullgraph=True)
torch.testing.assert_close(gelu(x, w).full_tensor(), torch.nn.functional.gelu(x @ w).full_tensor())
print(sw.compile_report()[-1].how in ("compiled", "hit", "loaded"))
# → True

# The graph is the same text on every rank, and so is its cache key: a warm cache hits everywhere and never returns
# another rank's program. Where uneven shards make a shape depend on the rank, the program is that rank's own and is
# kept apart. `sw.save_artifacts(path)` and `sw.load_artifacts(path)` ship compiled programs to another job of the
# same torch, library and mesh; [packages](packages.py) ship a model without tracing.
#
# ## What to know
#
# - Inside a compiled function ranks cannot compare shapes: `DTensor.from_local` takes `shape=` there, or the
#   promise `run_check=False`.
# - Random numbers and dropout are the same as in eager mode ([random numbers](random_numbers.py)).
# - Integer powers with a symbolic exponent are exact ([integer powers](integer_powers.py)).
# - `sw.trace_comm` and `sw.debug_mode` see captured and compiled programs on real ranks. Simulated, a captured
#   program communicates inside one process, which a log does not count.
#
# Design pages: [compiled programs](../design/0008-compiled-programs.md), [captured
# programs](../design/0010-captured-programs.md).
