"""Rematerialisation: what the backward needs is computed a second time, but for what a policy saves; eager and traced.

In the order of imports, which go down only:

    policies       policies of rematerialisation: which results a block keeps for its backward
    traced         blocks of `remat` in traced programs: which results are kept
    names          values by how they are made, so that two runs can be told to have made the same one
    generators     the state of random number generators before a call
    record_replay  what watches the two runs of a block, operator by operator
    block          a block that is run twice: what autograd saves waits for its value
    remat          `remat`, `remat_module`: functions and modules whose activations are computed twice
"""

from .block import kept_values
from .remat import remat, remat_module

__all__ = ["kept_values", "remat", "remat_module"]
