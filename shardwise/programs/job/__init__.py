"""Compiles a program once for the whole job.

In the order of imports, which go down only:

    serialize  compiled programs as bytes that another process takes in
    election   who of the ranks that need the same program compiles it
    compile    `compile`: torch.compile, once for the whole job
    artifacts  `save_artifacts`, `load_artifacts`: compiled programs as one file
"""
