"""How to add a rule.

A rule says what an operator allows along one mesh axis. Rules of the library stand in `shardwise/rules`, one file
for each family, as calls of `rule(names, sentence, **words)`; your own operators get theirs by `sw.rule`, which
takes the same words. This page goes from the simplest kind of rule to the last resort. What a rule may say is
listed in `shardwise/propagation/notation.py` (`Rule`); `python -m shardwise rules mm` prints the one of `mm` and
where it stands.
"""

import torch

import shardwise as sw
from shardwise import Shard

mesh = sw.init_mesh(dp=2, tp=2)


def operator(name, function, shape):
    """A custom operator for this page."""
    made = torch.library.custom_op(f"extending::{name}", function, mutates_args=())
    made.register_fake(lambda *args: args[0].new_empty(shape(*args)))
    return made


# ## 1. A sentence
#
# Letters name dims. A letter of the result may be sharded wherever it stands; a letter that the result lacks is
# summed over, so sharding it leaves a partial sum. `shardwise/rules/matmul.py` begins with five such lines. Words
# beside the sentence add facts; `linear` lets partial sums pass.


def outer_function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[:, None] * y


outer = operator("outer", outer_function, lambda x, y: (len(x), len(y)))
samples = [(torch.randn(5), torch.randn(4))]
sw.rule("extending::outer", "m, n -> m n", samples=samples, linear=((0,), (1,)))
x, y = (sw.randn(8, mesh=mesh, placements={axis: Shard(0)}) for axis in ("dp", "tp"))
print(outer(x, y).layout)
# → f32[8@dp, 8@tp]

# Every placement that the sentence allows is now tried on the samples, with uneven and empty shards, and compared
# with one device. Choose sizes that no axis divides.
#
# ## 2. A kernel
#
# Sometimes the local operator is not the same one. The mean of a shard is not a summand of the mean of the whole:
# each rank has to divide its sum by the *global* number of rows. A kernel maker gets the call, with layouts in the
# place of tensors, and the layouts that were chosen; it gives the function to run on each rank (or None for the
# operator itself). It must not look at ranks: the same function runs on all of them.


def average_function(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0)


def divide_by_all_rows(call, wants):
    rows = call.tensors[0].shape[0]
    return lambda x: x.sum(0) / rows


average = operator("average", average_function, lambda x: x.shape[1:])
samples = [(torch.randn(5, 3),)]
try:
    sw.rule("extending::average", "m n -> n", samples=samples)
except sw.OperatorError as refused:
    print("refused:", type(refused).__name__)
sw.rule("extending::average", "m n -> n", samples=samples, kernel=divide_by_all_rows, linear=((0,),))
t = torch.randn(7, 3)
result = average(sw.distribute_tensor(t, mesh, {"dp": Shard(0)}))
torch.testing.assert_close(result.full_tensor(), t.mean(0))
print(result.layout)
# → refused: OperatorError
# → f32[3 | sum@dp]

# ## 3. A function
#
# Where the sentence depends on the arguments (`view`, `cat`, indexing), `function=` gets the call and gives a
# `Proposal` (layouts that are wanted, layouts of the results, arguments to replace) or another `Rule` for this one
# call. It is pure: layouts in, layouts out. `shardwise/rules/views.py` has examples.
#
# ## 4. A program
#
# Where ranks have to talk to one another in the middle of the operator (scans, windows, ring attention), `program=`
# is a function on DTensors that runs in place of it. It gets a toolbox with `move` and the transport's verbs.
# `_scan` of `shardwise/rules/sorting.py` is a short one.
#
# ## Then
#
# 1. `python -m shardwise verify 'aten.name'` proves the row: everything it offers is right, and placements that
#    would do and are not offered are listed. Those that are left out for a reason get it as `unoffered="max min:
#    why"`.
# 2. `python -m shardwise verify --operators 'name'` sweeps torch's samples of the operator, forward and backward.
# 3. `make coverage` writes [the coverage page](../coverage.md) anew.
#
# A row is part of the library's key: compiled programs of an older table are never reused.
