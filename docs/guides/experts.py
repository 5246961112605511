"""Experts: grouped products and tokens that travel.

A mixture of experts needs two things: one product for each group of tokens, and a way for tokens to reach the ranks
of their experts.
"""

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard

mesh = sw.init_mesh(ep=2, tp=2)

# ## Grouped products
#
# `torch.nn.functional.grouped_mm` works on DTensors, however experts, their rows or their columns are sharded. The
# ends of the groups are data: the second expert below has no tokens.

torch.manual_seed(0)
tokens, experts = torch.randn(10, 16), torch.randn(4, 16, 32)
ends = torch.tensor([3, 3, 4, 10], dtype=torch.int32)
y = F.grouped_mm(
    sw.distribute_tensor(tokens, mesh, {}), sw.distribute_tensor(experts, mesh, {"ep": Shard(0), "tp": Shard(2)}), offs=ends
)
print(y.layout)
torch.testing.assert_close(
    y.full_tensor(), torch.cat([tokens[:3] @ experts[0], tokens[3:4] @ experts[2], tokens[4:] @ experts[3]])
)
# → f32[10, 32@tp | sum@ep]

# Tokens are replicated over `ep` here, so each rank computes the rows of its own experts and the result is partial
# over `ep`.
#
# `sw.grouped_mm` is the same product of plain tensors, of all sizes and strides, in float32, float16 and bfloat16;
# torch's own takes aligned ones, and when traced bfloat16 alone.
#
# ## Tokens that travel
#
# Where tokens are sharded over `ep` too, each has to go to the rank of its expert and back. `sw.p2p.all_to_all_v`
# sends exactly those rows that have to move. `sw.each_rank` runs a function on what each rank holds: counts differ
# from rank to rank, so this part is written from the view of one rank.

ep = mesh["ep"]
held = sw.distribute_tensor(torch.arange(6.0).view(6, 1), ep, [Shard(0)]).to_local()  # tokens 0, 1, 2 and 3, 4, 5


def by_expert(x):
    """Odd tokens belong to the second rank: order tokens by rank, and count them."""
    owner = x[:, 0].long() % 2
    return x[owner.argsort(stable=True)], torch.bincount(owner, minlength=2)


ordered, going = sw.each_rank(by_expert, held)
print(sw.p2p.all_to_all_v(ordered, going, mesh=mesh, axis="ep"))
# → Bundle(
# →   0: tensor([[0.],
# →              [2.],
# →              [4.]])
# →   1: tensor([[0.],
# →              [2.],
# →              [4.]])
# →   2: tensor([[1.],
# →              [3.],
# →              [5.]])
# →   3: tensor([[1.],
# →              [3.],
# →              [5.]])
# → )

# [examples/moe.py](../../examples/moe.py) is a whole layer with a router, the same on one device, simulated, on
# processes, compiled and in a package.
