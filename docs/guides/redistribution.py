"""Redistribution: the shortest path between two layouts.

`x.redistribute` takes any layout to any other, on the same mesh or on another one. The way is a shortest path over
layouts, by a cost of launch latency and bytes received. Collectives over several axes are merged, no layout on the
way is larger than the larger end, and every plan is proven on index sets before it runs.
"""

import warnings

import shardwise as sw
from shardwise import Partial, Shard

grid = sw.init_mesh(a=2, b=4)

# ## Looking at a plan
#
# `print(sw.plan(have, want))` has the steps, the bytes that the worst rank receives, the least that any algorithm
# must bring it, and the peak memory. `explain()` adds what was rejected.

have = sw.layout((1024, 1024), grid, [Shard(0), Shard(1)])
want = sw.layout((1024, 1024), grid, [Shard(1), Shard(0)])
print(sw.plan(have, want).explain())
# → f32[1024@a, 1024@b] → f32[1024@b, 1024@a]: 1 collective, 524,288 bytes received (at least 524,288: 1.00), ...
# →   exchange over a,b  → f32[1024@b, 1024@a]  524,288 bytes
# → Rejected:
# →   gather, then ... 93.5 µs, 1 collective, 3,670,016 bytes, peak 4,194,304 (over the bound ...
# →   no exchange              79.7 µs, 3 collectives, 983,040 bytes, peak 524,288: all_to_all over a, ...
# →   no exchange, any memory  66.3 µs, 2 collectives, 1,310,720 bytes, peak 1,048,576 ...

# A sum over both axes that is wanted in shards is one reduce-scatter over all eight ranks:

print(sw.plan(sw.layout((1024, 1024), grid, [Partial(), Partial()]), sw.layout((1024, 1024), grid, [Shard(0), Shard(0)])))
# → f32[1024, 1024 | sum@a, sum@b] → f32[1024@(a,b), 1024]: 1 collective, 3,670,016 bytes received (at least ...
# →   reduce_scatter over a,b  → f32[1024@(a,b), 1024]  3,670,016 bytes

# `sw.plan(..., max_bytes=)` and `x.redistribute(..., max_bytes=)` bound the memory of layouts on the way; if that
# cannot be kept, it is an error that says what can. `x.redistribute(..., async_op=True)` returns before the data is
# there, and waits at its first use.
#
# ## From one mesh to another
#
# Eight ranks to six. `sw.relabel` chooses which six of the eight, and their order, so that the least has to move:

six = sw.init_mesh(c=6)
y = sw.ones(24, 16, mesh=grid, placements={"a": Shard(0), "b": Shard(0)})
best = sw.relabel(six, (y, [Shard(0)]))
print(best.ranks, y.redistribute(best, [Shard(0)]).layout)
print(
    sw.plan(y.layout, sw.layout((24, 16), six, [Shard(0)])).bytes,
    sw.plan(y.layout, sw.layout((24, 16), best, [Shard(0)])).bytes,
)
# → (0, 1, 3, 4, 5, 7) f32[24@c, 16]
# → 256 128

# A rank outside a mesh runs the same program: it holds a tensor without data, communicates nothing, and cannot read
# it.
#
# ## Slow links and few communicators
#
# Axes that are marked slow (or measured by `sw.calibrate(mesh)`) are crossed with fewer bytes: a plan may take a
# detour over fast axes. With `groups="explicit"` only groups over one axis are used, and those that `mesh.flatten`
# made: communicators cost memory on GPUs. A warning then says which group would help.

few = sw.init_mesh(rows=3, columns=4, groups="explicit")
source, target = (sw.layout((1024, 1024), few, [p, p]) for p in (Partial(), sw.Replicate()))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(len(sw.plan(source, target).steps))
print(caught[0].message)
few.flatten("rows", "columns")
print(len(sw.plan(source, target).steps))
# → 3
# → mesh (rows=3, columns=4, groups='explicit') has no group over rows, columns; mesh.flatten(...
# → 1
