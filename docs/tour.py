"""A distributed tensor from nothing.

This file builds a small distributed tensor, one idea at a time, out of `torch` alone. It does what Shardwise does, in the same
order and under the same names, and leaves out everything that is not needed to see how it works: shards are equal, ranks are
simulated, sums are the only reduction. Read it from top to bottom, or run it: `python docs/tour.py`.
Lines that begin with `# →` are what the code above them prints.
"""

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import torch

import shardwise as sw  # for one comparison at the end

# ## 1. Mesh: ranks with coordinates
#
# A mesh gives names to the directions in which ranks are arranged. Four ranks as `(dp=2, tp=2)`: ranks 0 and 1
# share a `tp` group, ranks 0 and 2 share a `dp` group. Everything later speaks of axes, never of ranks, so that
# every rank can run the same program.


@dataclass(frozen=True)
class Mesh:
    axes: tuple[tuple[str, int], ...]

    @property
    def ranks(self):
        return math.prod(size for _, size in self.axes)

    def size(self, axes):
        return math.prod(dict(self.axes)[axis] for axis in axes)

    def coordinates(self, rank):
        every = list(itertools.product(*(range(size) for _, size in self.axes)))  # the last axis counts fastest
        return dict(zip(dict(self.axes), every[rank], strict=True))

    def group(self, rank, axes):
        """The ranks that differ from this one along `axes` only, in order."""
        here = self.coordinates(rank)
        return [r for r in range(self.ranks) if all(self.coordinates(r)[a] == here[a] for a in here if a not in axes)]


mesh = Mesh((("dp", 2), ("tp", 2)))
print(mesh.coordinates(2), mesh.group(2, ("tp",)), mesh.group(2, ("dp",)))
# → {'dp': 1, 'tp': 0} [2, 3] [0, 2]

# ## 2. Layout: what each rank holds of a global tensor
#
# For each dim, the axes that shard it; for the remaining axes, whether the ranks hold the same value (replicated)
# or summands of it (partial). A layout is a frozen value: it can be compared, printed and used as a key, and it
# says nothing of any rank.


@dataclass(frozen=True)
class Layout:
    mesh: Mesh
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]  # for each dim, the axes that shard it
    partial: frozenset[str] = frozenset()  # axes along which ranks hold summands

    def __str__(self):
        dims = ", ".join(f"{n}@{','.join(axes)}" if axes else f"{n}" for n, axes in zip(self.shape, self.dims, strict=True))
        return f"f32[{dims}{''.join(f' | sum@{axis}' for axis in sorted(self.partial))}]"

    @property
    def local_shape(self):
        return tuple(n // self.mesh.size(axes) for n, axes in zip(self.shape, self.dims, strict=True))

    def offset(self, rank, dim):
        """Where in a dim the shard of a rank begins."""
        at, index = self.mesh.coordinates(rank), 0
        for axis in self.dims[dim]:
            index = index * self.mesh.size((axis,)) + at[axis]
        return index * self.local_shape[dim]

    def with_dim(self, dim, axes):
        return replace(self, dims=(*self.dims[:dim], axes, *self.dims[dim + 1 :]))

    def sharded(self, dim, axis):
        """The same with one more axis on a dim."""
        return self.with_dim(dim, (*self.dims[dim], axis))


def layout(shape, *dims, sums=()):
    return Layout(mesh, tuple(shape), tuple(tuple(axes.split()) for axes in dims), frozenset(sums))


print(layout((8, 16), "dp", ""), layout((8, 16), "dp", "", sums=["tp"]), layout((8, 16), "dp", "tp").local_shape)
# → f32[8@dp, 16] f32[8@dp, 16 | sum@tp] (4, 8)

# ## 3. Local values: a whole cluster in one process
#
# On a real job each rank holds one local tensor. Here a local value is a list with one tensor for each rank. Only
# this part and the next one know that; with processes in their place nothing else would change.


def shard(tensor, to):
    """The local value of a whole tensor: every rank takes its own part, the first of a partial group takes all of the value."""
    return [my_part(tensor, to, rank) for rank in range(to.mesh.ranks)]


def my_part(tensor, to, rank):
    for dim, length in enumerate(to.local_shape):
        tensor = tensor.narrow(dim, to.offset(rank, dim), length)
    first = all(to.mesh.coordinates(rank)[axis] == 0 for axis in to.partial)
    return tensor.clone() if first else torch.zeros_like(tensor)


def whole(local, have):
    """The global tensor that a local value stands for; summands add up, replicas are counted once."""
    total = torch.zeros(have.shape)
    replicas = have.mesh.ranks // have.mesh.size([*itertools.chain(*have.dims), *have.partial])
    for rank, tensor in enumerate(local):
        here = tuple(slice(have.offset(rank, d), have.offset(rank, d) + n) for d, n in enumerate(have.local_shape))
        total[here] += tensor / replicas
    return total


t = torch.arange(8.0 * 16).view(8, 16)
for each in (layout(t.shape, "dp", "tp"), layout(t.shape, "", "dp"), layout(t.shape, "", "", sums=["dp"])):
    assert torch.equal(whole(shard(t, each), each), t)

# ## 4. Transport: the one way to communicate
#
# Collectives over the group along some axes. In Shardwise the same few verbs have two implementations, process
# groups and simulated ranks, and whoever wants to log or to compare communication stands in between.


class Transport:
    def __init__(self):
        self.log = []

    def all_reduce(self, local, mesh, axes):
        self.log.append(f"all_reduce over {','.join(axes)}")
        return [sum(local[peer] for peer in mesh.group(rank, axes)) for rank in range(mesh.ranks)]

    def all_gather(self, local, mesh, axes, dim):
        self.log.append(f"all_gather over {','.join(axes)}")
        return [torch.cat([local[peer] for peer in mesh.group(rank, axes)], dim) for rank in range(mesh.ranks)]

    def reduce_scatter(self, local, mesh, axes, dim):
        self.log.append(f"reduce_scatter over {','.join(axes)}")
        sums = [sum(local[peer] for peer in mesh.group(rank, axes)) for rank in range(mesh.ranks)]
        return [my_chunk(tensor, mesh, axes, dim, rank) for rank, tensor in enumerate(sums)]

    def each(self, function, mesh, *locals):
        """The same function on every rank; no communication."""
        return [function(*args) for args in zip(*locals, strict=True)]


def my_chunk(tensor, mesh, axes, dim, rank):
    """The chunk of a tensor that belongs to a rank's place in its group."""
    group = mesh.group(rank, axes)
    return tensor.chunk(len(group), dim)[group.index(rank)]


transport = Transport()
assert torch.equal(transport.all_gather(shard(t, layout(t.shape, "dp", "")), mesh, ("dp",), 0)[3], t)

# ## 5. Redistribution is a shortest path
#
# Layouts are nodes; a step leads from one layout to another. A step costs the latency of launching it and the
# elements that a rank receives. Dijkstra's search finds the cheapest plan between any two layouts. It has seen
# neither data nor a rank, so a plan is made once and kept.

LATENCY = 1000.0  # launching a collective costs as much as receiving a thousand elements


@dataclass(frozen=True)
class Step:
    kind: str
    axis: str
    dim: int | None
    after: Layout
    cost: float


def steps_from(have):
    """Every step that leads away from a layout."""
    size = math.prod(have.local_shape)
    for axis, n in have.mesh.axes:
        dims = [dim for dim, length in enumerate(have.local_shape) if length % n == 0]
        if axis in have.partial:
            reduced = replace(have, partial=have.partial - {axis})
            yield Step("all_reduce", axis, None, reduced, LATENCY + 2 * size * (n - 1) / n)
            for dim in dims:
                yield Step("reduce_scatter", axis, dim, reduced.sharded(dim, axis), LATENCY + size * (n - 1) / n)
        elif axis in itertools.chain(*have.dims):
            for dim, axes in enumerate(have.dims):
                if axes[-1:] == (axis,):  # only the axis that shards last can be gathered
                    yield Step("all_gather", axis, dim, have.with_dim(dim, axes[:-1]), LATENCY + size * (n - 1))
        else:  # replicated: every rank keeps a part, and nothing is sent
            for dim in dims:
                yield Step("take", axis, dim, have.sharded(dim, axis), 1.0)


@cache
def plan(have, want):
    """The cheapest steps from one layout to another."""
    count = itertools.count()  # breaks ties, so that layouts are never compared
    queue, seen = [(0.0, next(count), have, ())], set()
    while queue:
        cost, _, now, steps = heapq.heappop(queue)
        if now == want:
            return steps
        if now not in seen:
            seen.add(now)
            for step in steps_from(now):
                heapq.heappush(queue, (cost + step.cost, next(count), step.after, (*steps, step)))
    raise ValueError(f"no way from {have} to {want}")


total = layout((64, 64), "", "", sums=["dp"])
for have, want in ((total, ("dp", "")), (total, ("", "tp")), (layout((64, 64), "tp", ""), ("", "tp"))):
    print("; ".join(f"{step.kind} over {step.axis} → {step.after}" for step in plan(have, layout((64, 64), *want))))
# → reduce_scatter over dp → f32[64@dp, 64]
# → take over tp → f32[64, 64@tp | sum@dp]; all_reduce over dp → f32[64, 64@tp]
# → all_gather over tp → f32[64, 64]; take over tp → f32[64, 64@tp]

# The second plan splits the sum among replicas first, so that each reduces only its share. Nobody wrote that down
# as a case: it is the shortest path. (Shardwise has more kinds of steps: the third would be one all-to-all.)
#
# Running a plan is a table from the kind of a step to a call of the transport.

RUN = {
    "all_reduce": lambda x, mesh, step: transport.all_reduce(x, mesh, (step.axis,)),
    "reduce_scatter": lambda x, mesh, step: transport.reduce_scatter(x, mesh, (step.axis,), step.dim),
    "all_gather": lambda x, mesh, step: transport.all_gather(x, mesh, (step.axis,), step.dim),
    "take": lambda x, mesh, step: [my_chunk(each, mesh, (step.axis,), step.dim, rank) for rank, each in enumerate(x)],
}


def redistribute(local, have, want):
    for step in plan(have, want):
        local = RUN[step.kind](local, have.mesh, step)
    return local


shardings = [layout(t.shape, *dims) for dims in (("", ""), ("dp", ""), ("", "dp"), ("dp", "tp"), ("tp dp", ""))]
partials = [layout(t.shape, "", "", sums=["dp", "tp"]), layout(t.shape, "tp", "", sums=["dp"])]
for have, want in itertools.product(shardings + partials, shardings):
    assert torch.equal(whole(redistribute(shard(t, have), have, want), want), t)

# ## 6. A rule is a sentence about one axis
#
# `"m k, k n -> m n"` says all that a matrix product allows. An axis may shard `m`: the first argument by rows, the
# result by rows, the second argument replicated. Or `n`. Or `k`, which the result lacks: then every rank computes a
# summand, and the result is partial. `linear` adds: where one argument is partial and the others are replicated,
# the result is partial.

RULES = {
    "mm": ("m k, k n -> m n", "linear"),
    "t": ("m n -> n m", "linear"),
    "relu": ("m n -> m n", ""),
    "threshold_backward": ("m n, m n -> m n", ""),
    "detach": ("m n -> m n", "linear"),
}


# For one axis, a candidate gives each argument and the result a state: the dim that the axis shards, `"sum"`, or
# None (replicated).


def candidates(name):
    sentence, linear = RULES[name]
    left, right = sentence.split("->")
    inputs, output = [part.split() for part in left.split(",")], right.split()
    yield [None] * len(inputs), None
    for letter in sorted({letter for letters in inputs for letter in letters}):
        states = [letters.index(letter) if letter in letters else None for letters in inputs]
        yield states, output.index(letter) if letter in output else "sum"
    if linear:
        for i in range(len(inputs)):
            yield ["sum" if i == j else None for j in range(len(inputs))], "sum"


print(*candidates("t"))
# → ([None], None) ([0], 1) ([1], 0) (['sum'], 'sum')

# ## 7. Decide: from a rule and layouts to layouts
#
# One axis at a time: price what each candidate would move, and keep the cheapest; of equals the first, so an axis
# that shards nothing stays that way. The work grows with the number of axes, not with their product. Again no data
# and no rank: a decision is made once for an operator and the layouts of its arguments.


@cache
def decide(name, haves, shape):
    """The layouts that the arguments should have, and the layout that the result then has."""
    wants = [Layout(mesh, have.shape, ((),) * len(have.shape)) for have in haves]
    result = Layout(mesh, shape, ((),) * len(shape))
    for axis, _ in mesh.axes:
        prices = [(sum(map(price, haves, states, itertools.repeat(axis))), states, out) for states, out in candidates(name)]
        _, states, out = min(prices, key=lambda candidate: candidate[0])
        wants = [in_state(want, state, axis) for want, state in zip(wants, states, strict=True)]
        result = in_state(result, out, axis)
    return wants, result


def in_state(have, state, axis):
    if state == "sum":
        return replace(have, partial=have.partial | {axis})
    return have if state is None else have.sharded(state, axis)


def price(have, state, axis):
    """What bringing one argument into a state costs, as if there were no other axis."""
    alone = Layout(mesh, have.shape, tuple((axis,) if axis in axes else () for axes in have.dims), have.partial & {axis})
    want = in_state(Layout(mesh, have.shape, ((),) * len(have.shape)), state, axis)
    if want.partial and not alone.partial:
        return math.inf  # into a partial layout there is no step here
    return sum(step.cost for step in plan(alone, want))


_, by_columns = decide("mm", (layout((8, 16), "dp", ""), layout((16, 32), "", "tp")), (8, 32))
_, by_rows = decide("mm", (layout((8, 16), "", "tp"), layout((16, 32), "tp", "")), (8, 32))
print(by_columns, by_rows)
# → f32[8@dp, 32@tp] f32[8, 32 | sum@tp]

# ## 8. The tensor: dispatch
#
# torch hands every operator on a subclass to `__torch_dispatch__`, below autograd. There the parts meet: take local
# values and layouts, decide, move what has to move, run the operator on every rank, wrap. An operator without a
# rule is gathered: it is slower, and never wrong.


class DTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, local, layout, requires_grad=False):
        self = torch.Tensor._make_wrapper_subclass(cls, layout.shape, dtype=torch.float32, requires_grad=requires_grad)
        self.local, self.placed = local, layout
        return self

    def __repr__(self):
        return f"DTensor({self.placed})"

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        name, tensors = op.__name__.split(".")[0], [x for x in args if isinstance(x, DTensor)]

        def call(*tensors):
            ours = iter(tensors)
            return op(*(next(ours) if isinstance(x, DTensor) else x for x in args), **(kwargs or {}))

        shape = tuple(call(*(torch.empty(x.shape, device="meta") for x in tensors)).shape)  # torch's own shapes and errors
        if name in RULES:
            wants, result = decide(name, tuple(x.placed for x in tensors), shape)
        else:
            *wants, result = (layout(s, *[""] * len(s)) for s in (*(x.shape for x in tensors), shape))
        moved = [redistribute(x.local, x.placed, want) for x, want in zip(tensors, wants, strict=True)]
        return DTensor(transport.each(call, mesh, *moved), result)

    def full_tensor(self):
        return whole(self.local, self.placed)


def distribute(tensor, to, requires_grad=False):
    return DTensor(shard(tensor, to), to, requires_grad)


torch.manual_seed(0)
dense_x, dense_w = torch.randn(8, 16), torch.randn(16, 32)
x, w = distribute(dense_x, layout((8, 16), "dp", "")), distribute(dense_w, layout((16, 32), "", "tp"), requires_grad=True)
transport.log.clear()
y = torch.relu(x @ w)
assert torch.allclose(y.full_tensor(), torch.relu(dense_x @ dense_w), atol=1e-5)
print(y, transport.log)
# → DTensor(f32[8@dp, 32@tp]) []

# ## 9. Backward
#
# Autograd runs above dispatch, on whole tensors as far as it knows, so the backward is a program like any other. A
# gradient comes in the layout its operators chose, here partial over `dp`: each half of the batch made its summand.
# A hook brings it to the layout of its parameter, which is data parallelism's all-reduce. Nobody asked for it.

w.register_hook(lambda grad: DTensor(redistribute(grad.local, grad.placed, w.placed), w.placed))
y.backward(distribute(torch.ones(8, 32), y.placed))
dense_w.requires_grad_()
torch.relu(dense_x @ dense_w).sum().backward()
assert torch.allclose(w.grad.full_tensor(), dense_w.grad, atol=1e-4)
print(w.grad, transport.log)
# → DTensor(f32[16, 32@tp]) ['all_reduce over dp']

# That is the whole machine. Shardwise adds uneven and strided shards, every reduction, proven rules for some 590
# operators, plans with a bound on memory, process groups, a quick path for calls that are known, and programs that
# are captured or compiled. It says the same of this program:

grid = sw.init_mesh(dp=2, tp=2)
x = sw.distribute_tensor(dense_x, grid, {"dp": sw.Shard(0)})
w = sw.distribute_tensor(dense_w.detach(), grid, {"tp": sw.Shard(1)}).requires_grad_()
with sw.trace_comm() as log:
    torch.relu(x @ w).sum().backward()
print(w.grad.layout, log.counts())
# → f32[16, 32@tp] {'all_reduce': 1}
