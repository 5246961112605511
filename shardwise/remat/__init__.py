"""Rematerialisation (activation checkpointing): the backward recomputes what a policy does not save; eager and traced.

In the order of imports, which go down only:

    policies       `sw.save`: which results a block saves for its backward
    names          names of values that tell how they are computed, so that a second run recognises them
    record_replay  the two runs of a block in eager mode, operator by operator
    traced         `remat` in traced programs: asks the policy for each operator
    block          a block in eager mode: autograd saves empty cells, which the second run fills
    remat          `remat`, `remat_module`: functions and modules with recomputed activations
"""

from .block import kept_values
from .remat import remat, remat_module

__all__ = ["kept_values", "remat", "remat_module"]
