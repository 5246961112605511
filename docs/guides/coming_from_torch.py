"""Coming from torch.distributed.tensor.

Porting is a change of import: names, arguments and placements are those of `torch.distributed.tensor`, and a
`DeviceMesh` is accepted wherever a mesh is. This page tells what is not the same; [every name](../porting.md) has
the table of all public names, written by a script from both signatures.
"""

import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor  # was: from torch.distributed.tensor import ...

mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])
print(x.placements, x.device_mesh.shape, x.layout)
# → (Shard(0), Replicate()) (2, 2) f32[8@dp, 16]

# ## `from_local` checks
#
# Without a job, meshes are simulated, and a local tensor is a bundle of one tensor for each rank.
# `DTensor.from_local` communicates nothing, but ranks compare their shapes with the next communication, once for
# each line of the program: shapes that are not those of equal shards raise on every rank. Uneven shards need
# `run_check=True` (which asks the ranks), `shape=`, or sizes as in `Shard(0, sizes=(5, 3))`. `run_check=True`
# compares dtype, device and `requires_grad` too, and broadcasts nothing.

y = DTensor.from_local(x.to_local(), mesh, [Shard(0), Replicate()])
print(y.layout)
# → f32[8@dp, 16]

# ## Gradients have the layout of their tensor
#
# After `backward()`, `p.grad` has the layout of `p`, reduced once however often `p` was used; it is never left
# partial (where `p` is partial, the gradient is replicated). The all-reduce that you may have written by hand after
# `backward()` must go. A plain tensor that is used beside DTensors counts as replicated, and its gradient is a
# DTensor.

w = nn.Parameter(distribute_tensor(torch.randn(16, 4), mesh, [Replicate(), Shard(1)]))
(x @ w).sum().backward()
print(w.grad.placements)
# → (Replicate(), Shard(1))

# ## `x.layout`
#
# `x._spec` is not there; `x.layout` is, and says more: the order of axes on one dim, explicit sizes, factors of a
# dim. For torch's own code, which asks a tensor's `layout` for its memory format, it compares equal to
# `torch.strided`.

print(x.layout == torch.strided, x.layout == sw.layout((8, 16), mesh, {"dp": Shard(0)}))
# → True True

# ## Point-to-point
#
# `p2p.batch_isend_irecv` takes torch's `P2POp` and returns *tensors*, not work objects: what was received stands in
# the list that it returns, and the tensor that was passed in is not written to. There is nothing to wait for: a
# tensor waits when it is first used, so a program that calls `work.wait()` for each result drops that line. See
# [point-to-point](point_to_point.py).
#
# ## What goes further
#
# - Placements by axis name, `{"tp": Shard(0)}`; axes that are not named replicate.
# - `redistribute` to `Partial`, and to another mesh; with no placements it replicates.
# - Uneven, empty and strided shards are ordinary layouts: slices, views and `cat` keep them without communication.
# - A random call gives the same numbers on every mesh ([random numbers](random_numbers.py)).
# - What an operator may not do is an error on every rank, never a wrong number.

total = distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()]).redistribute(placements=[Partial(), Replicate()])
print(total.layout, total.full_tensor())
# → f32[4 | sum@dp] tensor([1., 1., 1., 1.])

# ## Together with torch's own
#
# There is no `isinstance` between the two classes of DTensor. Functions of torch that make its own (`fully_shard`,
# `parallelize_module`) take `mesh.to_torch()`. `shardwise.debug.CommDebugMode` and `visualize_sharding` stand in
# for torch's.
