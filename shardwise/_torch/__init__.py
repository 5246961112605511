"""Every private torch name that Shardwise uses, by subsystem of torch, and every change that is made to torch.

In the order of imports, which go down only:

    tensors  every private torch name used elsewhere, each with a why
    groups   every private name of `torch.distributed`, each with a why
    tracer   what torch's tracer, its functions on state dicts and its composite operators are taught
    aoti     what packages need of torch's private names
"""
