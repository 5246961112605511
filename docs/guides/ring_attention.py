"""Long sequences: ring attention.

Attention over a sequence that is sharded can stay sharded: keys and values go round the ranks, each shard on its
way while it is attended to, and gradients follow them home.
"""

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard

mesh = sw.init_mesh(tp=2, sp=4)
placements = {"tp": Shard(1), "sp": Shard(2)}  # heads over tp, the sequence over sp
torch.manual_seed(0)
q = sw.randn(2, 8, 256, 16, mesh=mesh, placements=placements)
k, v = (sw.randn(2, 2, 256, 16, mesh=mesh, placements=placements) for _ in range(2))

with sw.trace_comm() as log:
    out = sw.ring_attention(q, k, v, is_causal=True, enable_gqa=True)
print(out.layout, log.counts())
# → f32[2, 8@tp, 256@sp, 16] {'p2p': 3}

dense = F.scaled_dot_product_attention(*(t.full_tensor() for t in (q, k, v)), is_causal=True, enable_gqa=True)
torch.testing.assert_close(out.full_tensor(), dense)

# ## What it costs
#
# Each of n ranks receives (n - 1)/n of its keys and values in the forward; in the backward as much again, and as
# much of their gradients. What a rank holds falls with the number of ranks, where gathered keys and values do not.
#
# ## When to use it
#
# `F.scaled_dot_product_attention` on the same tensors shards heads instead of the sequence, if there are enough of
# them. That moves less, and is the one to use then:

with sw.trace_comm() as log:
    F.scaled_dot_product_attention(q, *(t.repeat_interleave(4, 1) for t in (k, v)), is_causal=True)
print(log.counts())
# → {'all_to_all': 3}

# The ring is for sequences over more ranks than there are heads, and for few heads of keys. It takes uneven and
# empty shards, and runs eager, captured and compiled; it has no dropout, no mask and no second derivative. A causal
# ring is uneven: the last rank attends to all shards, the first one to its own only ([measured](../benchmarks.md),
# [design](../design/0019-ring-attention.md)).
