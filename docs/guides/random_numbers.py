"""Random numbers belong to the global tensor.

A seed gives bitwise the same values on every mesh, in every layout, on every device, eager and compiled. A rank
computes the numbers of its own shard only.
"""

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Replicate, Shard

# ## The same tensor everywhere
#
# An element's number is a function of torch's seed, of how many random calls on DTensors there were since it was
# set, and of the element's index in the global tensor. Neither the rank nor the mesh enters.

drawn = []
for axes, placements in (({"dp": 1}, [Shard(0)]), ({"dp": 4}, [Shard(0)]), ({"dp": 2, "tp": 2}, [Shard(1), Replicate()])):
    torch.manual_seed(7)
    mesh = sw.init_mesh(**axes)
    drawn.append(sw.randn(4, 6, mesh=mesh, placements=placements).full_tensor())
assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
print(drawn[0][0])
# → tensor([ 1.8759,  0.9177, -1.5481, -0.0118,  1.1015,  1.0849])

# So replicas agree, shards differ, and a model that is initialised or trained with dropout on 8 ranks has the same
# numbers on 64:

torch.manual_seed(7)
x = sw.ones(8, 8, mesh=sw.init_mesh(dp=2), placements=[Shard(0)])
y = sw.ones(8, 8, mesh=sw.init_mesh(tp=4), placements=[Shard(1)])
first = F.dropout(x, 0.5).full_tensor()
torch.manual_seed(7)
assert torch.equal(first, F.dropout(y, 0.5).full_tensor())

# ## State
#
# The count of calls lives in torch's own CPU generator: `torch.manual_seed` restarts it, and `fork_rng`,
# `get_rng_state`, `set_rng_state` and activation checkpointing save and restore it. A `generator=` of your own
# works too. Random calls on plain tensors, which may differ between ranks, neither move the count nor are moved by
# it. Ranks that are seeded differently raise at the next random call.

state = torch.get_rng_state()
a = torch.rand_like(x)
torch.set_rng_state(state)
assert torch.equal(a.full_tensor(), torch.rand_like(x).full_tensor())

# ## Limits
#
# The numbers are not those that plain torch draws for the same seed. Poisson, binomial, gamma and Dirichlet numbers
# and attention with dropout are drawn whole on every rank. On an H200 numbers take 0.8 to 1.2 of the time of
# torch's generator, on a CPU 0.7 to 5 times ([benchmarks](../benchmarks.md),
# [design](../design/0011-random-numbers.md)).
