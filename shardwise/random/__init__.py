"""Random numbers by global index: the same bits on every mesh.

In the order of imports, which go down only:

    curves  quantile functions: the normal and the exponential number of a probability, alike on every device
    bits    random bits of an index, and numbers made of bits
    keys    random numbers of global tensors, the same on every mesh
    triton  the same numbers by kernels for GPUs, where Triton is
"""
