"""How to add a graph pass.

A captured or compiled function is an fx graph of plain operators and collectives. Passes rewrite it in place before
it is run or given to Inductor. They stand in `shardwise/programs/passes`: `order.py` runs those that hold for every
program, in order; `views.py` and `foreach.py` have those for programs that are replayed operator by operator, where
each operator that is left costs its call.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

# ## What a pass is
#
# A function that takes a `torch.fx.Graph`, rewrites it and returns how many times it did. The count is part of the
# tests: a pass that never applies is found. This one removes multiplications by one.


def drop_ones(graph):
    """`x * 1` is `x`, where that changes neither dtype nor shape."""
    count = 0
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            count += 1
    return count


traced = make_fx(lambda x: (x * 1).relu() * 1)(torch.randn(3))
print(drop_ones(traced.graph))
traced.recompile()
print([node.name for node in traced.graph.nodes])
# → 2
# → ['x_1', 'relu', 'output']

# ## What it must keep to
#
# - **The same rewrite on every rank.** A pass reads the graph, which is the same text on every rank, and nothing
#   else: no rank, no `id()`, no order of a set. Where shards are uneven the graph is a rank's own; passes that add,
#   remove or merge collectives then leave them alone (`order.py` asks `is_of_one_rank`), since other ranks would
#   wait.
# - **No collective is dead code.** A result may be unused on one rank and used on another. `remove_dead` in
#   `graph.py` knows which nodes to keep; use it instead of `graph.eliminate_dead_code`.
# - **Writes.** An operator that writes to a tensor is a border: `mutates` in `graph.py` tells. A wait never moves
#   behind one.
# - **`meta["val"]`.** New nodes need the tensor without data that they stand for; the helpers of `graph.py` that
#   add nodes set it.
#
# ## Where to put it
#
# 1. Write the function in the file of `passes/` whose sentence fits.
# 2. Call it in `order.py` (or `views.py`), where what it needs is done and what it breaks is not yet relied on.
# 3. Test it twice: on a small graph by itself (that it applies, how often, and that it leaves the case beside it
#    alone), and on the random programs of the compiled tests, which compare every captured program with eager and
#    with one device.
# 4. Measure: `make bench-step` before and after.
