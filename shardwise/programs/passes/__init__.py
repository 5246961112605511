"""Graph passes on local programs.

In the order of imports, which go down only:

    graph        questions about the nodes of a local program; adding, replacing and removing them
    moves        passes on redistributions: redundant ones go, the rest become steps of plans
    all_reduces  passes on all-reduces: after linear operators, and small ones in buckets
    order        `improve`: all these passes in order, also for Inductor; waits as late as possible
    captured     passes for captured programs: fewer operators, and inputs updated in place
"""
