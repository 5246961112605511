"""Runs plans on local tensors, on one mesh or from one mesh to another.

In the order of imports, which go down only:

    shards          where shards lie in one another: views and copies of one rank's tensor
    step_kernels    what the kernels of each step need to know
    between_meshes  moves a tensor from one mesh to another
    run             runs plans; its steps as operators of a traced program
"""
