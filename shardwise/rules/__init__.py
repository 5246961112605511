"""Every row of the table of rules, one file for each family of operators. Importing this package fills the table.

In the order of imports, which go down only:

    shard_position  the part of a dim that a rank holds, for kernels that must know where it lies
    creation        rows: tensors made from a shape; tangents of forward-mode automatic differentiation
    pointwise       rows: element by element, with broadcasting
    matmul          rows: products
    embedding       rows: looking up rows of a table
    loss            rows: losses
    random          rows: random numbers
    attention       rows: attention, flex attention too
    gather_scatter  rows: gather and scatter along a dim
    indexing        rows: indexing by tensors
    views           rows: the same data under another shape
    view_gradients  rows: gradients of slices, diagonals and windows; writing to a slice
    halo            the rows that windows along a sharded dim need of other ranks' shards
    windows         `windowed`: rows of operators on windows, of which the plane may be sharded
    pooling         rows: pooling
    convolution     rows: convolution
    spatial         rows: interpolation, padding, sampling, columns
    recurrent       rows: fused recurrent layers and cells
    reduction       rows: reductions, also over sharded dims and empty shards; one Python number or truth value
    sorting         rows: running sums, products and extremes; sorting, searching, counting
    linalg          rows: linear algebra of matrices, distances, Fourier transforms
    normalisation   rows: softmax and normalisation
    foreach         rows: lists of tensors, element by element: foreach and fused optimizers
    ring_attention  `ring_attention`: keys and values go round
    composites      operators that torch takes apart too early: `one_hot`, `tensor_split`, packed sequences, some with `out=`
    listing         the table as text, for `python -m shardwise rules`
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
