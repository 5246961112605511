"""Layouts: what each rank holds.

A layout says which part of a global tensor every rank holds. It is printed on one line, as in `f32[8@dp, 16 |
sum@tp]`; this page reads that line part by part. Layouts are immutable values: equal ones are one object, so
comparing them costs nothing.
"""

import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard

mesh = sw.init_mesh(dp=2, tp=4)
t = torch.arange(128.0).view(8, 16)

# ## Sharded, replicated, partial
#
# Placements are given by axis name; axes that are not named replicate. The list form of torch, one placement for
# each axis, works too. A rank along `dp` holds 4 of the 8 rows below; all ranks along `tp` hold the same.

x = sw.distribute_tensor(t, mesh, {"dp": Shard(0)})
print(x.layout, x.layout == sw.layout((8, 16), mesh, [Shard(0), Replicate()]))
print(x.layout.local_shape(0))
# → f32[8@dp, 16] True
# → (4, 16)

# A partial value stands behind the bar. Each rank along the axis holds a summand, and the tensor is their sum
# (`max`, `min`, `avg`, `product` and bitwise reductions exist as well). Partial values come from operators that sum
# over a sharded dim; they are reduced when something needs the sum, and not before.

w = sw.distribute_tensor(torch.ones(16, 8), mesh, {"tp": Shard(0)})
y = x.redistribute(placements={"dp": Shard(0), "tp": Shard(1)}) @ w
print(y.layout, y.placements)
print((y * 2).layout, torch.relu(y).layout)
# → f32[8@dp, 8 | sum@tp] (Shard(0), Partial('sum'))
# → f32[8@dp, 8 | sum@tp] f32[8@dp, 8]

# Doubling is linear, so it passes the partial value on; `relu` is not, so the sum is made first.
#
# ## Several axes on one dim
#
# The order counts: the first axis is the outermost. A list of placements shards by the earlier axis first.

print(sw.layout((8, 16), mesh, [Shard(0), Shard(0)]))
# → f32[8@(dp,tp), 16]

# ## Uneven and empty shards
#
# Shards of a dim that does not divide are as torch's `chunk` makes them: the last are shorter or empty. Other sizes
# are written behind the axis. No operator treats them as a special case.

print(
    sw.layout((7, 16), mesh, {"tp": Shard(0)}), [sw.layout((7, 16), mesh, {"tp": Shard(0)}).local_shape(i)[0] for i in range(4)]
)
print(sw.layout((7, 16), mesh, {"tp": Shard(0, sizes=(1, 0, 4, 2))}))
# → f32[7@tp, 16] [2, 2, 2, 1]
# → f32[7@tp{1,0,4,2}, 16]

# Slicing keeps rows where they are, so its result has such sizes and nothing is communicated:

with sw.trace_comm() as log:
    part = x[1:5]
print(part.layout, log.counts())
# → f32[4@dp{3,1}, 16] {}

# ## A dim that is a product
#
# Flattening `[4, 6@tp]` interleaves shards: rank 0 holds rows 0, 1 of every six. The layout keeps the two factors
# of the dim, so flattening and its reverse move nothing. The placements of torch say the same with a
# `StridedShard`.

z = sw.distribute_tensor(torch.arange(96.0).view(4, 8, 3), mesh, {"tp": Shard(1)}).flatten(0, 1)
print(z.layout, z.unflatten(0, (4, 8)).layout)
# → f32[(4*8@tp), 3] f32[4, 8@tp, 3]

# ## A layout without a tensor
#
# `sw.layout(shape, mesh, placements, dtype)` makes one, for `sw.plan` or for `sw.distribute_tensor`. On a real job,
# `x.to_local()` is the tensor that this rank holds; simulated, it is a bundle of every rank's.

print(sw.layout((4096, 4096), mesh, {"tp": Shard(1), "dp": Partial()}, torch.bfloat16))
assert torch.equal(x.full_tensor(), t)
# → bf16[4096, 4096@tp | sum@dp]
