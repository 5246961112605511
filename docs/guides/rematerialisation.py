"""Recomputing instead of keeping: rematerialisation.

Activations that wait for the backward take memory. A block can compute them a second time when the backward needs
them, except for what a policy keeps. Also known as activation checkpointing.
"""

import torch
from torch import nn

import shardwise as sw

w = torch.randn(64, 64, requires_grad=True)
x = torch.randn(32, 64, requires_grad=True)


def block(x):
    return nn.functional.gelu(x @ w).sin() @ w


# ## One call, or modules by name
#
# The default policy runs no collective and no attention twice, and computes everything else again.

y = sw.remat(block, x, save=sw.save.matmuls | sw.save.collectives)
y.sum().backward()
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
model = sw.remat_module(model, select="*", save=sw.save.default)
model(x).sum().backward()

# ## Policies are values
#
# They combine with `|` (keep what either keeps), `&` (what both keep) and `~`. There are `matmuls`, `attention`,
# `collectives`, `random`, `custom`, `operators(...)`, `regions("blocks.0*")`, `up_to(bytes)` and `by(function)`.

print((sw.save.matmuls | sw.save.collectives) & sw.save.up_to(64 * 2**20))
# → (save.matmuls | save.collectives) & save.up_to(67108864)

# It works on plain tensors and DTensors, in eager, captured and compiled functions, and around compiled ones. The
# second run draws the same random numbers. A value is known by how it was made, so a result that the second run
# leaves out is never taken for another one; and a block that is not the same twice is an error that says where:

calls = []


def fickle(x):
    calls.append(x)
    return (x.sin() if len(calls) == 1 else x.cos()).exp()


try:
    sw.remat(fickle, x).sum().backward()
except sw.RematError as error:
    print(type(error).__name__)
# → RematError

# Measured on a GPT of 12 layers: keeping nothing takes 44 of 223 MiB and 1.5 times the time; keeping products 144
# MiB and 1.4 times ([benchmarks](../benchmarks.md), [design](../design/0013-rematerialisation.md)).
