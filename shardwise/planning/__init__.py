"""How a tensor gets from one layout to another: layouts in, a proven list of steps out. Pure.

In the order of imports, which go down only:

    cost    latency and bytes of a step over the links of a mesh
    bounds  what a move must bring to a rank at the least, from index sets
    step    `Step`: one move between two layouts
    search  the cheapest steps between two layouts: a shortest path over layouts
    proof   interprets steps on index sets: the proof that a plan denotes its target
    plan    `plan`: from one layout to another, with a certificate
"""
