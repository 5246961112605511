"""How to add a kind of step.

A plan is a list of steps, and a step is of a kind: `all_reduce`, `all_gather`, `take` and so on. This page adds
one, `all_to_all`, to the small planner of the [tour](../tour.py), and then says where the five places are in
Shardwise.
"""

import contextlib
import importlib.util
import io
import itertools
from pathlib import Path

import torch

spec = importlib.util.spec_from_file_location("tour", Path(__file__).parents[1] / "tour.py")
tour = importlib.util.module_from_spec(spec)
with contextlib.redirect_stdout(io.StringIO()):
    spec.loader.exec_module(tour)

# Without it, moving an axis from one dim to another gathers everything first:

have, want = tour.layout((64, 64), "tp", ""), tour.layout((64, 64), "", "tp")
print([step.kind for step in tour.plan(have, want)])
# → ['all_gather', 'take']

# ## Which layouts it joins, and what it costs
#
# The axis that shards one dim last shards another one afterwards. A rank keeps one part of its shard and receives
# the others.

known = tour.steps_from


def steps_from(have):
    yield from known(have)
    for start, stop in itertools.permutations(range(len(have.dims)), 2):
        for axis in have.dims[start][-1:]:
            n, size = have.mesh.size((axis,)), torch.Size(have.local_shape).numel()
            if have.local_shape[stop] % n == 0:
                after = have.with_dim(start, have.dims[start][:-1]).sharded(stop, axis)
                yield tour.Step("all_to_all", axis, (start, stop), after, tour.LATENCY + size * (n - 1) / n)


# ## How it runs


def all_to_all(local, mesh, step):
    start, stop = step.dim
    results = []
    for rank in range(mesh.ranks):
        group = mesh.group(rank, (step.axis,))
        parts = [local[peer].chunk(len(group), stop)[group.index(rank)] for peer in group]
        results.append(torch.cat(parts, start))
    return results


tour.steps_from, tour.RUN["all_to_all"] = steps_from, all_to_all
tour.plan.cache_clear()
print([step.kind for step in tour.plan(have, want)])
# → ['all_to_all']

# ## That it is right
#
# Every pair of layouts still leads to the same tensor:

for one, other in itertools.product(tour.shardings + tour.partials, tour.shardings):
    moved = tour.redistribute(tour.shard(tour.t, one), one, other)
    assert torch.equal(tour.whole(moved, other), tour.t)

# ## The same in Shardwise
#
# | place | what to add |
# |---|---|
# | `planning/step.py` | a line in the docstring of `Step`; bytes that the worst rank receives |
# | `planning/search.py` | edges: from which layouts to which, over which axes; what launching it costs |
# | `planning/proof.py` | a predicate on index sets that says whether the kind can bring about what a step claims |
# | `redistribution/run.py` | a function in its table of kinds; packing and unpacking in `step_kernels.py` |
# | `comm/transport.py` | a verb, only if none does: for processes, for simulated ranks, and in `comm/watch` |
#
# The proof shares no code with the search: a kind that the search offers wrongly is refused when the first plan is
# made. Tests compare the search with Dijkstra's algorithm without bounds, and every pair of layouts with the dense
# tensor (`SHARDWISE_SWEEP=all`). If the new kind changes plans, `make bench-moves` tells whether they became
# better.
