"""Packages: a model as a compiled program in one file.

One process exports a model, without a job; every rank of a job loads the file and runs it. There nothing is traced,
no layout is looked at, and the compiler is not even imported. From the start of a process to the first result, a
GPT on two ranks took 3.4 s, of which 3.3 s are for loading the model; with a warm compile cache it took 8.7 s
([benchmarks](../benchmarks.md)).
"""

import tempfile
from pathlib import Path

import torch

import shardwise as sw
from shardwise import Shard

# ## Exporting
#
# The mesh is simulated here; where the package is loaded it is a job of two ranks.

mesh = sw.init_mesh(tp=2)
model = torch.nn.Linear(16, 32)
model.weight = torch.nn.Parameter(sw.distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
model.bias = torch.nn.Parameter(sw.distribute_tensor(model.bias.detach(), mesh, [Shard(0)]))
x = sw.distribute_tensor(torch.randn(8, 16), mesh, {})

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.pt2"
sw.export(model, (x,), mesh, path)  # for inputs of these shapes, dtypes and layouts
print(path.stat().st_size > 0)
# → True

# ## Loading
#
# On every rank of the job, started by `torchrun`. Parameters are a module's or a state dict's, of DTensors or of
# whole tensors; they are bound when the package is loaded, so that one package serves all versions of the weights.


def serve(path):
    program = sw.load_package(path, parameters=model)
    return program(x)


# A package fits one torch, one version of Shardwise, one mesh, one number of ranks and one kind of chip; anything
# else is refused, and so is an input of another shape, dtype or layout. It also refuses to be loaded without a job:

try:
    serve(path)
except sw.ShardwiseError as error:
    print(type(error).__name__)
folder.cleanup()
# → CompileError

# ## What to know
#
# - A package gives results and no gradients, for static shapes and equal shards.
# - It ends with a digest, so damage is found before anything is unpacked. It holds native code: load only what you
#   trust.
# - Parameters of another layout than those exported are redistributed when they are bound.
#
# Design page: [packages](../design/0018-packages.md).
