"""Point-to-point communication.

`sw.p2p` has batches of sends and receives that trace, compile and differentiate. Peers are relative to a mesh axis,
so that the program, its graph and its cache key are the same on every rank; sends and receives that do not match
are refused on all ranks before anything is sent.
"""

import torch

import shardwise as sw
from shardwise import p2p

mesh = sw.init_mesh(pp=4)
x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)]).to_local()  # each rank's shard: [0, 1], [2, 3], ...

# ## A batch
#
# All messages of a batch are launched together; a received tensor waits when it is first used. With `wrap=False`
# the ends of the axis have no neighbour: the first rank sends nothing to the left, and the last rank receives zeros
# from the right.

left, right = p2p.batch(
    [
        p2p.send(x, mesh=mesh, axis="pp", shift=+1),
        p2p.recv(x.shape, x.dtype, mesh=mesh, axis="pp", shift=-1),
        p2p.send(x, mesh=mesh, axis="pp", shift=-1, wrap=False),
        p2p.recv(x.shape, x.dtype, mesh=mesh, axis="pp", shift=+1, wrap=False),
    ]
)
print(left)
print(right)
# → Bundle(
# →   0: tensor([6., 7.])
# →   1: tensor([0., 1.])
# →   2: tensor([2., 3.])
# →   3: tensor([4., 5.])
# → )
# → Bundle(
# →   0: tensor([2., 3.])
# →   1: tensor([4., 5.])
# →   2: tensor([6., 7.])
# →   3: tensor([0., 0.])
# → )

# ## Patterns
#
# `shift` moves along an axis, `permute` by a permutation of it. `halo_exchange` puts the neighbours' rows at both
# ends of a shard; convolution and pooling of a sharded plane use it by themselves.

print(p2p.permute(x, [1, 0, 3, 2], mesh=mesh))
print(p2p.halo_exchange(x, dim=0, before=1, after=1, mesh=mesh))
# → Bundle(
# →   0: tensor([2., 3.])
# →   1: tensor([0., 1.])
# →   2: tensor([6., 7.])
# →   3: tensor([4., 5.])
# → )
# → Bundle(
# →   0: tensor([0., 0., 1., 2.])
# →   1: tensor([1., 2., 3., 4.])
# →   2: tensor([3., 4., 5., 6.])
# →   3: tensor([5., 6., 7., 0.])
# → )

# `all_to_all_v` sends some rows to each rank. How many may be data, which differs from rank to rank and from step
# to step: that is how tokens reach their [experts](experts.py).

print(p2p.all_to_all_v(x, [[2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]], mesh=mesh))
# → Bundle(
# →   0: tensor([0., 1., 2.])
# →   1: tensor([3.])
# →   2: tensor([4.])
# →   3: tensor([5., 6., 7.])
# → )

# ## Gradients
#
# The backward of a batch is the batch reversed: gradients go back where the values came from.

y = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)]).to_local().requires_grad_()
p2p.shift(y, mesh=mesh, wrap=False).sum().backward()
print(y.grad)
# → Bundle(
# →   0: tensor([1.])
# →   1: tensor([1.])
# →   2: tensor([1.])
# →   3: tensor([0.])
# → )

# The last rank sends to nobody, so its gradient is zero.
#
# ## Code written for torch
#
# `p2p.batch_isend_irecv` takes a list of `torch.distributed.P2POp`. It gives tensors instead of work objects: what
# was received stands in the result, and the tensor that was passed in is not written to ([coming from
# torch](coming_from_torch.py)). Peers are ranks of the job there, so such a program belongs to the rank that runs
# it.
#
# Design page: [point-to-point messages](../design/0014-point-to-point.md).
