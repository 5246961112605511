"""Rules for your own operators.

An operator without a rule works: torch's decomposition is run, or its inputs are gathered. With a rule it stays
sharded. A rule is a sentence about one mesh axis, and it is proven on your samples before it is accepted.
"""

import torch

import shardwise as sw
from shardwise import Shard


@torch.library.custom_op("guide::gate", mutates_args=())
def gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x @ w)


@gate.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1])


mesh = sw.init_mesh(dp=4)
x, w = sw.distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)]), torch.randn(16, 32)
with sw.trace_comm() as log:
    gate(x, w)
print(log.fallbacks, log.counts())
# → ['guide.gate'] {'all_gather': 1}

# ## A sentence
#
# `"m k, k n -> m n"` names the dims of each tensor argument and of the result. Each letter may be sharded: `m` and
# `n` shard the result, and `k`, which the result lacks, makes it a partial sum. That last part is wrong for `gate`,
# since a sum of sigmoids is not the sigmoid of a sum, and the proof finds it:

samples = [(torch.randn(5, 4), torch.randn(4, 3))]
try:
    sw.rule("guide::gate", "m k, k n -> m n", samples=samples)
except sw.OperatorError as refused:
    print(refused)
# → the rule 'm k, k n -> m n' of guide.gate is refused: ...

# So `k` has to be whole:

sw.rule("guide::gate", "m k, k n -> m n", samples=samples, whole="k")
with sw.trace_comm() as log:
    print(gate(x, w).layout)
print(log.counts())
# → f32[8@dp, 32]
# → {}

# ## Words beside the sentence
#
# | word | says |
# |---|---|
# | `linear=((0,), (1,))` | linear in each argument: a partial sum passes through one, the other replicated |
# | `lost="max"` | sharding a dim that the result lacks leaves a partial max (None: it cannot be sharded) |
# | `passes="up"` | increasing: partial max and min pass |
# | `whole="k"` | `k` cannot be sharded |
# | `static={"dim"}` | this argument is part of the key by value |
# | `kernel=` | a function to run on each rank in place of the operator |
#
# `...` stands for any dims, broadcast from the right; `...[dim]` for the dims that the argument `dim` names. The
# grammar is in `shardwise/propagation/notation.py`. `python -m shardwise rules mm` prints the rule of an operator;
# a word that the proof cannot confirm is refused with a counterexample.
#
# ## Proving everything
#
# `make verify` proves all rules of the library in the same way, and searches by brute force for placements that
# would do and are not offered; `make coverage` sweeps torch's operator database and writes [the coverage
# page](../coverage.md). To add a rule to Shardwise itself, see [how to add a rule](../extending/add_a_rule.py).
