"""Graph passes on local programs.

In the order of imports, which go down only:

    graph        what graph passes ask of the nodes of a local program, and how they add some
    moves        graph passes on moves: needless ones go, the rest become steps
    all_reduces  graph passes on all-reduces: behind linear operators, and small ones together
    order        `improve`: all graph passes in order; the same for Inductor
    views        graph passes for programs that are run operator by operator
    foreach      graph passes for the same programs: many small operators become few
"""
