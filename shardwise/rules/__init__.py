"""Every row of the table of rules, one file for each family of operators. Importing this package fills the table.

In the order of imports, which go down only:

    shard_position  the part of a dim that a rank holds, for kernels that must know where it lies
    creation        rows: tensors made from a shape
    forward_ad      rows: tangents of forward-mode automatic differentiation
    scalars         rows: from tensors to one Python number or truth value
    pointwise       rows: element by element, with broadcasting
    matmul          rows: products
    embedding       rows: looking up rows of a table
    loss            rows: losses
    random          rows: random numbers
    attention       rows: attention
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
    reduction       rows: reductions, also over sharded dims and empty shards
    scan            rows: running sums, products and extremes
    sorting         rows: sorting, searching, counting
    linalg          rows: linear algebra of matrices, distances
    fourier         rows: Fourier transforms
    normalisation   rows: softmax and normalisation
    foreach         rows: lists of tensors, element by element: foreach and fused optimizers
    ring_attention  `ring_attention`: keys and values go round
    flex_attention  flex attention on DTensors
    composites      operators that torch takes apart too early: `one_hot`, `tensor_split`, packed sequences, some with `out=`
    listing         the table as text, for `python -m shardwise rules`
"""

from . import (
    attention as attention,
)
from . import (
    composites as composites,
)
from . import (
    convolution as convolution,
)
from . import (
    creation as creation,
)
from . import (
    embedding as embedding,
)
from . import (
    flex_attention as flex_attention,
)
from . import (
    foreach as foreach,
)
from . import (
    forward_ad as forward_ad,
)
from . import (
    fourier as fourier,
)
from . import (
    gather_scatter as gather_scatter,
)
from . import (
    halo as halo,
)
from . import (
    indexing as indexing,
)
from . import (
    linalg as linalg,
)
from . import (
    listing as listing,
)
from . import (
    loss as loss,
)
from . import (
    matmul as matmul,
)
from . import (
    normalisation as normalisation,
)
from . import (
    pointwise as pointwise,
)
from . import (
    pooling as pooling,
)
from . import (
    random as random,
)
from . import (
    recurrent as recurrent,
)
from . import (
    reduction as reduction,
)
from . import (
    ring_attention as ring_attention,
)
from . import (
    scalars as scalars,
)
from . import (
    scan as scan,
)
from . import (
    sorting as sorting,
)
from . import (
    spatial as spatial,
)
from . import (
    view_gradients as view_gradients,
)
from . import (
    views as views,
)
from . import (
    windows as windows,
)
