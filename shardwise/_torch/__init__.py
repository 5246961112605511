"""Every private torch name that Shardwise uses, by subsystem of torch, and every change that is made to torch.

In the order of imports, which go down only:

    tensors       tensors, operators, the dispatcher and autograd
    symbols       symbolic sizes of a trace
    compiler      Dynamo, AOTAutograd and Inductor, also ahead of time for packages
    groups        process groups and meshes of `torch.distributed`
    replacements  what stands in for functions of torch
    patches       the table of all changes to torch, and what installs them
"""
