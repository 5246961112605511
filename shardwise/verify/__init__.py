"""Proof that operators and rules mean what they mean on one device: `python -m shardwise verify`.

In the order of imports, which go down only:

    spread        distributes tensors, with partial values that are hard to get right, and compares them with one device's
    calls         `Sample`: one call of an operator on plain tensors
    soundness     whether everything that a rule offers gives what one device gives
    register      `rule`: a rule for a user's own operator, proven before it is taken
    completeness  by brute force, the placements that a rule could offer and does not
    samples       torch's database of operators: names, sample inputs, in-place forms, and the calls they make
    pool          many small tasks in forked processes
    sweeps        the check of every rule, and of each of torch's operators
    coverage      writes docs/coverage.md
"""
