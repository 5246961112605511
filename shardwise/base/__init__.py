"""What every layer uses and what knows nothing of tensors over meshes: argument checks, caches, settings, process groups.

In the order of imports, which go down only:

    argument_checks  arguments of public callables: each checked by one function, refused by one text
    caches           bounded caches on pure functions; `cache_info`
    settings         `Setting`: what a `with` block sets for a while, in which threads, tasks and generators
    schema           what an operator says of its arguments, writes and views
    process_groups   process groups by their ranks: made once for all meshes, freed by all of their ranks together
"""
