"""How pooling, median and cumulative max/min behave on a sharded tensor.

Some operators can keep a tensor sharded only in part. This page has the table of those that are asked for most; a
test holds each of its cells.
"""

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard

# "Plane" means the spatial dims, "its dim" the one that an operator works along. A dim in the second column stays
# sharded as it is. Indices that come with a result are those of the whole tensor.
#
# | operator | no collective | partial values that pass | one collective |
# |---|---|---|---|
# | `avg_pool1d`, `avg_pool2d`, `avg_pool3d` | batch, channels, plane (1) | sum, avg | plane: messages (2) |
# | `max_pool1d`, `max_pool2d`, `max_pool3d` | batch, channels, plane (1) | none: all-reduce (3) | plane: messages (2) |
# | `median`, `nanmedian` of a dim | every other dim | none: all-reduce | its dim: all-to-all (4) |
# | `median`, `nanmedian` of all | | none: all-reduce | any dim: all-gather |
# | `cummax`, `cummin` | every other dim | none: all-reduce | its dim: all-gather (5) |
#
# 1. Where windows neither overlap nor cross the border of a shard.
# 2. Other windows: a batch of messages brings the rows that a rank lacks, and the result is sharded as the plane; an
# all-to-all that shards channels instead is taken where it moves less.
# 3. The index of a summand would be wrong.
# 4. It shards another dim instead; where there is none, an all-gather.
# 5. Of one row for each rank; the result is sharded as before.

mesh = sw.init_mesh(tp=2)
image = torch.randn(1, 3, 8, 8)
rows = sw.distribute_tensor(image, mesh, {"tp": Shard(2)})


def show(result, dense):
    torch.testing.assert_close(result.full_tensor(), dense)
    print(result.layout, log.counts())


with sw.trace_comm() as log:
    result = F.avg_pool2d(rows, 2)
show(result, F.avg_pool2d(image, 2))
with sw.trace_comm() as log:
    result = F.avg_pool2d(rows, 3, stride=1, padding=1)
show(result, F.avg_pool2d(image, 3, stride=1, padding=1))
with sw.trace_comm() as log:
    result = rows.cummax(2).indices
show(result, image.cummax(2).indices)
# → f32[1, 3, 4@tp, 4] {}
# → f32[1, 3, 8@tp, 8] {'p2p': 1}
# → i64[1, 3, 8@tp, 8] {'all_gather': 1}

# Convolutions of a sharded plane exchange the rows at the borders in the same way
# ([design](../design/0020-windows.md)).
