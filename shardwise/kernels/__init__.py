"""Operators on plain tensors that torch lacks. They know nothing of meshes.

In the order of imports, which go down only:

    int_pow         `int_pow`: integers to integer powers, exact, as operators
    int_pow_triton  the same by kernels for GPUs, where Triton is
    grouped_mm      `grouped_mm`: products of groups of rows with a matrix each, as an operator that traces
    attention       attention to a part of the keys with its log-sum-exp, and how parts are joined: kernels of one rank
"""
