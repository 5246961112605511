"""Debugging hangs: ranks that diverge.

On a real job a rank that skips a collective, or brings another shape, makes the others wait until the job's
time-out; or, worse, its next collective pairs with the one it skipped, and every rank goes on with wrong numbers.
Shardwise has four answers.
"""

import torch

import shardwise as sw
from shardwise import Shard

mesh = sw.init_mesh(dp=2, tp=2)

# ## 1. Errors are raised alike
#
# Whether an operator succeeds is decided from global facts, before anything is sent. So a wrong shape, layout or
# argument raises the same error on every rank, and no rank is left waiting.

x = sw.distribute_tensor(torch.randn(8, 16), mesh, {"tp": Shard(0)})
try:
    x.redistribute(placements={"pp": Shard(0)})
except sw.ShardwiseError as error:
    print(type(error).__name__)
# → MeshError

# ## 2. Debug mode
#
# Inside `sw.debug_mode()` the ranks of a job compare operator, group, shape, dtype and source line before each
# communication, and the values of plain tensors that operators take for replicated. Where they differ, or a rank
# raises, leaves or dies, all ranks raise the same `MismatchError` with what each was about to do and where. It sees
# eager, captured and compiled programs and packages, not calls to `torch.distributed` itself, and costs 2 to 3 ms
# for each communication of four ranks on one host. In a simulated world there is nothing to compare, and the block
# costs nothing.

with sw.debug_mode(timeout=60):
    x.full_tensor()

# ## 3. A failure of one rank reaches all
#
# Without debug mode, too, an error in one rank's shard (an index out of range, no memory) or in one stage of a
# pipeline reaches the others: they raise a `RankError` that names the rank, its error and its line. The time-out of
# the job (`init_process_group(timeout=...)`) holds for every group and every wait. Ranks that seed torch
# differently raise at the next random call.
#
# ## 4. Simulate it
#
# A simulated world has no processes and cannot hang. What one rank holds is one entry of a bundle, so a debugger,
# `print` and assertions see all ranks at once:

print(sw.distribute_tensor(torch.arange(4), mesh, {"tp": Shard(0)}).to_local())
# → Bundle(
# →   0: tensor([0, 1])
# →   1: tensor([2, 3])
# →   2: tensor([0, 1])
# →   3: tensor([2, 3])
# → )

# Design pages: [debug mode](../design/0015-debug-mode.md), [failures](../design/0021-failures.md).
