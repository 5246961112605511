"""What a step costs: collectives, bytes and lines.

Communication is never hidden: it can be listed, priced before it happens, limited and forbidden.
"""

import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

mesh = sw.init_mesh(dp=2, tp=2)
x = sw.randn(64, 32, mesh=mesh, placements={"dp": Shard(0)})
up = nn.Parameter(sw.randn(32, 128, mesh=mesh, placements={"tp": Shard(1)}))
down = nn.Parameter(sw.randn(128, 32, mesh=mesh, placements={"tp": Shard(0)}))

# ## Listing
#
# `sw.trace_comm` records every communication inside its block, also that of captured and compiled programs: its
# kind, the mesh axes, the bytes that the worst rank receives, the operator that needed it and the line of your
# program.

with sw.trace_comm() as log:
    loss = (torch.relu(x @ up) @ down).square().mean()
    loss.backward()
print(log)
print(log.counts(), log.bytes, log.records[0].axes)
# → kind        axes  bytes  operator  source
# → all_reduce  tp    4,096  aten.pow  costs.py:24
# → all_reduce  tp    4,096  aten.pow  costs.py:25
# → all_reduce  dp    8,192  gradient  costs.py:25
# → all_reduce  dp    8,192  gradient  costs.py:25
# → 4 collectives, 24,576 bytes
# → {'all_reduce': 4} 24576 ('tp',)

# `log.fallbacks` names operators that were gathered because they have no rule, `log.decomposed` those that ran as
# torch's decomposition into other operators:

with sw.trace_comm() as log:
    torch.histc(x, 4), torch.unique(x.round())
print(log.fallbacks)
# → ['aten._unique2']

# ## Forbidding
#
# Inside `sw.communication("forbid")` an operator that would have to communicate raises, on every rank alike and
# before anything is sent; `"warn"` warns once for a line. Moves that you ask for yourself (`redistribute`,
# `full_tensor`) are allowed, and `over_bytes=` lets small ones pass.

try:
    with sw.communication("forbid", over_bytes=1024):
        torch.linalg.inv(sw.randn(32, 32, mesh=mesh, placements={"tp": Shard(0)}))
except sw.CommunicationError as error:
    print(type(error).__name__)
# → CommunicationError

# ## Pricing
#
# `sw.plan` gives the steps between two layouts without running them. Neither tensors nor ranks are needed, so it
# answers for a mesh you do not have: here, one gradient of a large layer on 512 ranks.

big = sw.init_mesh(dp=64, tp=8, slow=("dp",))
gradient = sw.layout((8192, 28672), big, {"tp": Shard(1), "dp": sw.Partial()}, torch.bfloat16)
weight = sw.layout((8192, 28672), big, {"tp": Shard(1), "dp": Replicate()}, torch.bfloat16)
print(sw.plan(gradient, weight))
# → bf16[8192, 28672@tp | sum@dp] → bf16[8192, 28672@tp]: 1 collective, 115,605,504 bytes received (at least ...
# →   all_reduce over dp  → bf16[8192, 28672@tp]  115,605,504 bytes

# ## Time on the host
#
# A call that is known (same operator, layouts and static arguments) costs a look-up. `sw.cache_info()` tells what
# the caches hold; they are bounded, and `sw.cache_clear()` empties them. To remove the host's share of a step,
# [capture or compile](compiling.py) it.

print(sw.cache_info().size < sw.cache_info().limit)
# → True
