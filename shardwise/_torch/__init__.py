"""Every private torch name that Shardwise uses, by subsystem of torch, and every change that is made to torch.

In the order of imports, which go down only:

    tensors   tensors, operators, the dispatcher and autograd
    symbols   symbolic sizes of a trace
    compiler  Dynamo, AOTAutograd and Inductor
    groups    process groups and meshes of `torch.distributed`
    tracer    what torch's tracer, its functions on state dicts and its composite operators are taught
    aoti      what packages need of torch's private names
"""
