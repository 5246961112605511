"""Integer powers.

Integers to integer powers are exact modulo two to the width of their type, however they are computed: eager,
captured or compiled, with an exponent that is a number, a tensor, or a symbol of the program.
"""

import torch

import shardwise as sw
from shardwise import Shard

# `sw.int_pow` takes plain tensors; `x ** n` and `torch.pow` of integer DTensors use it. Above 2^53 a way through
# floats would round:

print(sw.int_pow(torch.tensor([3, -7]), 41))
x = sw.distribute_tensor(torch.arange(6), sw.init_mesh(tp=2), [Shard(0)])
print((x**5).full_tensor(), (x**5).layout)
# → tensor([-420491770248316829, 6596974204628493241])
# → tensor([   0,    1,   32,  243, 1024, 3125]) i64[6@tp]

# ## Negative exponents
#
# A negative number is an error, as in torch. In a tensor it gives what is left of the fraction: 0, or 1 and -1 of
# themselves.

print(sw.int_pow(torch.tensor([-1, 2, 3]), torch.tensor([-3, -1, 4])))
# → tensor([-1,  0, 81])

# ## Speed
#
# On a CPU narrow types take 0.2 to 0.7 of the time of torch's `pow`, 64 bits the same
# ([benchmarks](../benchmarks.md)). On a GPU one Triton kernel serves all exponents
# ([design](../design/0017-integer-powers.md)).
