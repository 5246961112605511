"""A whole model: data, fully sharded, tensor and sequence parallel.

A model becomes distributed when its parameters do. Which recipe it follows is a matter of layouts alone: the model,
the loss and the optimizer stay as they are, and Shardwise adds the collectives. This page trains one model by four
recipes, and compares each with one device.
"""

import copy
import re

import torch
from torch import nn

import shardwise as sw
from shardwise import Shard

# ## Placing parameters by name
#
# A parameter that is used in two places (here the embedding is also the head) must stay one parameter, so the loop
# remembers what it has placed.


def distribute(model, mesh, rules):
    """The first rule that matches a parameter's name places it, otherwise it is replicated."""
    placed = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter not in placed:
            to = next((to for pattern, to in rules.items() if re.search(pattern, name)), {})
            placed[parameter] = nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, to))
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, placed[parameter])
    return model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(128, 64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) * 0.1
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


# `sw.distribute_module(model, mesh, partition_fn)` is torch's function of this name, where you prefer it.
#
# ## Four recipes
#
# A recipe is a mesh, the layouts of parameters, and the layout of a batch.
#
# - *Data parallel*: every rank has all parameters and a part of the batch. Gradients are summed over the ranks.
# - *Fully sharded*: parameters, gradients and optimizer states are sharded over the same ranks as the batch. Each
#   operator gathers the parameter it needs, or moves activations where they are smaller; gradients are scattered as
#   they are summed.
# - *Tensor parallel*: the columns of one matrix, the rows of the next, and the vocabulary.
# - *Sequence parallel*: as tensor parallel, and what stands between (norms, residuals) is sharded along the
#   sequence.

by_tensor = {r"embed|up": {"tp": Shard(0)}, r"down.weight": {"tp": Shard(1)}}
recipes = {
    "data parallel": ({"dp": 4}, {}, {"dp": Shard(0)}),
    "fully sharded": ({"dp": 4}, {"": {"dp": Shard(0)}}, {"dp": Shard(0)}),
    "tensor parallel": ({"tp": 4}, by_tensor, {}),
    "sequence parallel": ({"tp": 4}, by_tensor, {"tp": Shard(1)}),
    "data and tensor": ({"dp": 2, "tp": 2}, by_tensor, {"dp": Shard(0)}),
}


def step(model, optimizer, tokens, targets):
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(0)
model, text = Model(), torch.randint(128, (8, 33))
tokens, targets = text[:, :-1], text[:, 1:]
dense = copy.deepcopy(model)
expected = [step(dense, optimizer, tokens, targets) for optimizer in [torch.optim.AdamW(dense.parameters())] for _ in range(3)]

for name, (axes, rules, placements) in recipes.items():
    mesh = sw.init_mesh(**axes)
    ours = distribute(copy.deepcopy(model), mesh, rules)
    assert ours.head.weight is ours.embed.weight
    optimizer = torch.optim.AdamW(ours.parameters())
    batch = [sw.distribute_tensor(part, mesh, placements) for part in (tokens, targets)]
    with sw.trace_comm() as log:
        losses = [step(ours, optimizer, *batch) for _ in range(3)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert not log.fallbacks
    held = sum(parameter.layout.nbytes for parameter in ours.parameters())
    print(f"{name:18} {sum(log.counts().values()) // 3:3} collectives a step, {held:7,} bytes of parameters on a rank")
# → data parallel        8 collectives a step, 165,632 bytes of parameters on a rank
# → fully sharded       22 collectives a step,  41,408 bytes of parameters on a rank
# → tensor parallel     13 collectives a step,  41,984 bytes of parameters on a rank
# → sequence parallel   16 collectives a step,  41,984 bytes of parameters on a rank
# → data and tensor     19 collectives a step,  83,200 bytes of parameters on a rank

# A captured or compiled step merges these collectives (see [compiling](compiling.py)). What is not here: fully
# sharded parameters are gathered where they are needed, again in the backward, and not ahead of time.
#
# ## The other axes
#
# [Pipelines](pipelines.py) give stages of the model to groups of ranks, [experts](experts.py) give each rank some
# of the experts, and [ring attention](ring_attention.py) keeps long sequences sharded inside attention. All of them
# combine with the above: a mesh has as many axes as you name. [examples/train_gpt.py](../../examples/train_gpt.py)
# is a whole program.
