"""Real ranks, data loading, printing and checkpoints.

The same script runs simulated and on processes, with the same numbers:

    python train.py                                # every rank simulated in this process
    torchrun --nproc-per-node 4 train.py           # four processes, Gloo or NCCL

What follows runs in both.
"""

import os
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from shardwise import DTensor, Shard

# ## The mesh
#
# `sw.init_mesh` takes the running `torch.distributed` job if there is one; started by `torchrun` it initialises the
# job; otherwise it simulates as many ranks as the mesh has. `device="cuda"` puts tensors on GPUs and uses NCCL.
# Axes between machines are slower: `slow=("dp",)` says so, or `sw.calibrate(mesh)` measures it, and plans then send
# less over them.

mesh = sw.init_mesh(dp=2, tp=2)
print(mesh, mesh["tp"], mesh.size("dp"))
# → (dp=2, tp=2) (tp=2) 2

# ## Data
#
# There are three ways to bring in a batch, depending on who has it:

whole = torch.arange(16.0).view(8, 2)

# One rank has read it. `distribute_tensor` sends the values of the first rank to the others (`src_data_rank=` names
# another):

batch = sw.distribute_tensor(whole, mesh, {"dp": Shard(0)})

# Every rank has read the same batch. Nothing is sent:

with sw.trace_comm() as log:
    same = sw.distribute_tensor(whole, mesh, {"dp": Shard(0)}, src_data_rank=None)
print(log.counts())
# → {}

# Every rank reads its own part. Ranks that differ along `dp` read different rows, ranks that differ along `tp` read
# the same rows: with a sampler, the number of parts is `mesh.size("dp")` and a rank's part is
# `mesh.get_local_rank("dp")`. Shapes are compared with the next communication, so that a wrong one is an error on
# every rank; uneven parts need `shape=` or `run_check=True`.

mine = same.to_local()  # stands for what a data loader gave this rank
loaded = DTensor.from_local(mine, mesh, {"dp": Shard(0)})
print(loaded.layout)
# → f32[8@dp, 2]

# ## Printing
#
# `print(x)` and `repr(x)` never communicate: on a job, a rank prints what it holds and where that lies in the
# whole, so one rank alone may print. `x.item()`, `x.tolist()`, `x.numpy()` and `x.full_tensor()` need the other
# ranks: all ranks of the mesh call them.

print(loaded.sum().item())
print(loaded[:2])
# → 120.0
# → DTensor(f32[2@dp{2,0}, 2], mesh=(dp=2, tp=2))
# → tensor([[0., 1.],
# →         [2., 3.]])

# ## Checkpoints
#
# `torch.distributed.checkpoint` stores each rank's shards and loads them into any layout, on any number of ranks.
# Here a tensor that was stored in rows is loaded in columns.

folder = Path(tempfile.gettempdir(), f"checkpoint-{os.environ.get('MASTER_PORT', os.getpid())}")  # the same on all ranks
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said of simulated ranks, which are one process
    dcp.save({"weight": loaded}, checkpoint_id=folder)
    columns = sw.zeros(8, 2, mesh=mesh, placements={"tp": Shard(1)})
    dcp.load({"weight": columns}, checkpoint_id=folder)
print(columns.layout, torch.equal(columns.full_tensor(), whole))
shutil.rmtree(folder, ignore_errors=True)
# → f32[8, 2@tp] True

# For a model and its optimizer use `get_model_state_dict`, `get_optimizer_state_dict` and their counterparts of
# `torch.distributed.checkpoint.state_dict`; with `full_state_dict=True` they give whole tensors. `torch.save`
# stores what one rank holds, and its file loads on that rank only. `safetensors` and `save_pretrained` refuse
# DTensors and say what to do instead.
