"""Benchmarks, and the environment variables of the tests.

Figures are in [benchmarks](../benchmarks.md). Machines drift, so plain torch, `torch.distributed.tensor` and
Shardwise are always measured in one run, in turns, and ratios are what counts.

| command | measures |
|---|---|
| `make bench` | each operator warm and cold, and one training step |
| `make bench-moves` | plans, and moves between layouts on 4 and 8 Gloo ranks |
| `make bench-step` | a training step: eager, captured, compiled |
| `make gpu` | everything that needs a CUDA device, in at most nine minutes, as a table |
| `python benchmarks/remat.py` | memory and time of policies |
| `python benchmarks/random_numbers.py` | random numbers beside torch's generator |
| `python benchmarks/int_pow.py` | integer powers |
| `python benchmarks/ring_attention.py` | ring attention: bytes, memory, time |
| `python benchmarks/pipeline.py` | the bubble of pipelines |
| `python benchmarks/packages.py` | how soon a package gives its first result |
| `python benchmarks/debug_mode.py` | what debug mode adds to a communication |

| variable | of the tests |
|---|---|
| `SHARDWISE_PROGRAMS=5000 SHARDWISE_SEED=7` | tries more random programs, from another seed |
| `SHARDWISE_COMPILED=200` | compiles and captures more of them |
| `SHARDWISE_SWEEP=20` | tries more pairs of layouts (`all`: every one, in hours) |
| `WORKERS=4` | of `make`: how many processes run tests |
| `GPU_PYTHON=python3` | of `make gpu`: a Python whose torch fits the GPU |
"""

import timeit

import torch

import shardwise as sw

# ## Measuring your own program
#
# Simulated ranks run one after another in one process, so their time means nothing. Count collectives and bytes
# there ([costs](costs.py)), and measure time on processes. What one rank's host spends, without communication, is
# measured with torch's fake process group:
#
# ```text
# from torch.testing._internal.distributed.fake_pg import FakeStore
# torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
# ```
#
# Take the best of many short rounds, and warm up first: the first call of an operator on given layouts is decided
# and planned.

mesh = sw.init_mesh(tp=2)
x = sw.ones(8, 8, mesh=mesh, placements=[sw.Shard(0)])
x + x
warm = min(timeit.repeat(lambda: torch.add(x, x), number=100, repeat=5)) / 100
assert warm < 0.01
