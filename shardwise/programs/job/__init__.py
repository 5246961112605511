"""Compiles a program once for the whole job.

In the order of imports, which go down only:

    serialize  compiled programs as bytes that another process installs; the versions they depend on
    election   elects the rank that compiles a program for all that need it
    compile    `compile`: torch.compile, once for the whole job
    artifacts  `save_artifacts`, `load_artifacts`: compiled programs as one file
"""
