"""search(have, want): the cheapest steps between two layouts on one mesh, as a shortest path over layouts. Pure.

A node is a sharding of every dim and what is partial. Edges are the kinds of `Step` over any usable subset of the axes, so what
can be done in one collective is one edge, whatever order the axes come in. The search is A*: what is left to receive is never
less than what the target holds beyond what is held now, and costs one more launch latency unless local steps suffice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, permutations, product, takewhile
from typing import Any, NamedTuple

from ..base.caches import memo
from ..layouts.factor import Dim, Factor, default_sizes, whole
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .bounds import Side, carried, indices, missing, points, products, reductions, shares
from .cost import Link, received, route
from .step import Step

#: Launch latencies that a kind of step costs. An exchange is planned element by element, packed and unpacked.
LAUNCHES = {"all_reduce": 1.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0, "permute": 1.0}
LAUNCHES |= {"exchange": 1.2, "transfer": 1.2}
#: What is left to do is estimated from so many ranks at most: what they lack is a bound, and cheaper to count.
MOST_POINTS = 32
#: Cost of a local step: small but non-zero, so that useless steps are never chosen; the same for all bytes, since adjacent ones
#: are fused.
LOCAL_SECONDS = 1e-7

Partials = tuple[tuple[str, str], ...]
Numbers = tuple[int, ...]
Way = tuple[tuple[str, ...], ...]
Node = tuple[Numbers, Partials]
Path = tuple[Step, ...]


class Edge(NamedTuple):
    """A step to another node: its kind, its axes in any order, and its seconds."""

    kind: str
    axes: tuple[str, ...]
    node: Node
    seconds: float


def seconds(kind: str, link: Link, received: float) -> float:
    """What a collective costs: launch latency, and bytes received. Packing is not counted: memory is faster than any link."""
    return LAUNCHES[kind] * link.latency + received * link.per_byte


# ── shardings of one dim, as numbers ──────────────────────────────────────────────────────────────────────────────────


class Shardings:
    """The shardings of one dim that paths go through, numbered as they turn up, so that an edge costs a few look-ups."""

    def __init__(self, have: Dim, want: Dim, mesh: Mesh, pooled: Sequence[str]) -> None:
        self._mesh, self._numbers, self._pooled = mesh, dict[Dim, int](), pooled
        self._goals: list[tuple[int, int]] | None = None
        self._kept: dict[int, list[int]] = {}
        self.dims: list[Dim] = []
        self.axes: list[tuple[str, ...]] = []
        self.widths: list[int] = []
        self.even: list[bool] = []
        self._fewer: dict[tuple[int, int], int] = {}
        self._more: dict[tuple[int, str], int] = {}
        self.size = math.prod(factor.size for factor in want)
        self.unsharded = self.number((whole(self.size),))
        self.have, self.want = self.number(have), self.number(want)
        self._toward: dict[tuple[int, str], int] = {}
        self.near = {self.unsharded, self.want}  # shardings that local steps turn into the target's
        if len(want) == 1:
            steps = [self.fewer(self.want, k) for k in range(len(want[0].axes), -1, -1)]
            self.near |= set(steps)
            self._toward = {(a, axis): b for a, axis, b in zip(steps, want[0].axes, steps[1:], strict=False)}

    def number(self, dim: Dim) -> int:
        """The number of a sharding."""
        found = self._numbers.get(dim)
        if found is None:
            found = self._numbers[dim] = len(self.dims)
            self.dims.append(dim)
            self.axes.append(tuple(axis for factor in dim for axis in factor.axes))
            self.widths.append(math.prod(max(factor.sizes) for factor in dim))
            self.even.append(len(dim) == 1 and min(dim[0].sizes) == max(dim[0].sizes) > 0)
        return found

    def fewer(self, at: int, count: int) -> int:
        """The sharding without its `count` minor-most axes."""
        found = self._fewer.get((at, count))
        if found is None:
            factor = self.dims[at][0]
            keep = factor.axes[: len(factor.axes) - count] if len(self.dims[at]) == 1 else ()
            step = len(factor.sizes) // math.prod(self._mesh.axis_sizes[axis] for axis in keep)
            sizes = tuple(sum(factor.sizes[i : i + step]) for i in range(0, len(factor.sizes), step))
            made = (Factor(factor.size, keep, sizes),) if keep else (whole(self.size),)
            found = self._fewer[at, count] = self.number(made)
        return found

    def counts(self, at: int) -> Sequence[int]:
        """How many minor-most axes may leave at once: any number, or all where the dim is a product of factors."""
        return range(len(self.axes[at]) + 1) if len(self.dims[at]) == 1 else (0, len(self.axes[at]))

    def more(self, at: int, axis: str) -> int:
        """The sharding with one more axis at its minor end: into the target's shards if that leads there, else equal chunks."""
        found = self._toward.get((at, axis)) or self._more.get((at, axis))
        if found is None:
            factor = self.dims[at][0]
            chunks = {size: default_sizes(size, (self._mesh.axis_sizes[axis],)) for size in set(factor.sizes)}
            sizes = tuple([shard for size in factor.sizes for shard in chunks[size]])
            found = self._more[at, axis] = self.number((Factor(factor.size, (*factor.axes, axis), sizes),))
        return found

    def kept(self, at: int) -> list[int]:
        """At each point of the mesh, how much of what a rank wants of this dim it (or its pool) holds."""
        if at not in self._kept:
            self._kept[at] = self._shares(at)
        return self._kept[at]

    def _shares(self, at: int) -> list[int]:
        dim, want = self.dims[at], self.dims[self.want]
        if len(dim) > 1 or len(want) > 1 or any(axis in self._pooled for axis in self.axes[at]):
            every = points(self._mesh, self._mesh.axes, MOST_POINTS)
            return shares(Side(dim, self._mesh, every), Side(want, self._mesh, every), self._pooled)
        if self._goals is None:
            self._goals = [want[0].interval(i) for i in indices(self._mesh, want[0].axes, MOST_POINTS)]
        starts = dim[0].starts
        pairs = zip(indices(self._mesh, dim[0].axes, MOST_POINTS), self._goals, strict=True)
        return [max(0, min(starts[i + 1], stop) - max(starts[i], start)) for i, (start, stop) in pairs]

    def renamed(self, at: int, axes: tuple[str, ...]) -> int:
        """The same shards, dealt out along other axes."""
        return self.number((self.dims[at][0]._replace(axes=axes),))


# ── nodes and edges ───────────────────────────────────────────────────────────────────────────────────────────────────


class Space:
    """The nodes between two layouts of one mesh, and the edges that lead from one to the next."""

    def __init__(self, have: Layout, want: Layout, cap: float, without: Iterable[str], every_group: bool) -> None:
        self.mesh, self.have, self.want, self.cap, self.without = have.mesh, have, want, cap, frozenset(without)
        pooled = tuple(axis for axis, _ in want.partials)
        self.group = math.prod([self.mesh.axis_sizes[axis] for axis in pooled])
        self.tables = [Shardings(h, w, self.mesh, pooled) for h, w in zip(have.dims, want.dims, strict=True)]
        self.item = have.dtype.itemsize
        self.start: Node = tuple(c.have for c in self.tables), have.partials
        self.goal: Node = tuple(c.want for c in self.tables), want.partials
        self._every_group = every_group
        self._links: dict[tuple[str, ...], Link] = {}
        routes = [route(self.mesh, (axis,)) for axis, n in self.mesh.axis_sizes.items() if n > 1]
        self._least = min([link.per_byte for link in routes], default=0.0)
        self.latency = min([link.latency for link in routes], default=0.0)
        # Links alike and exchanges at hand: from what is held, sharded towards the target, one exchange brings the rest at the
        # bound of bytes. Other shardings on the way could save a fifth of a launch latency at most.
        at_hand = "exchange" not in self.without and (every_group or not self.mesh.explicit)
        self.straight = len(set(routes)) <= 1 and at_hand and not want.partials
        self._all = self.mesh.size() <= MOST_POINTS
        self._lacking: dict[Numbers, tuple[int, int]] = {}
        self._wanted = self._held(self.goal[0])
        self._due: dict[Partials, float] = {}

    def by_dim(self, *columns: Sequence[Any]) -> Iterator[Any]:
        """For each dim its table of shardings, with what stands for the dim in each of the columns."""
        return zip(self.tables, *columns, strict=True)

    def layout(self, node: Node) -> Layout:
        """The layout that a node stands for."""
        return self.have.replace(dims=[c.dims[at] for c, at in self.by_dim(node[0])], partials=node[1])

    def bytes(self, shardings: Numbers) -> int:
        """Bytes of the largest shard."""
        return self.item * math.prod([c.widths[at] for c, at in self.by_dim(shardings)])

    def _held(self, shardings: Numbers) -> list[int]:
        return products([c.kept(at) for c, at in self.by_dim(shardings)])

    def lacking(self, shardings: Numbers) -> tuple[int, int]:
        """Elements of the target that a rank, or a group over which it is left partial, does not hold: at worst, and in all."""
        if shardings not in self._lacking:
            lacks = [want - have for want, have in zip(self._wanted, self._held(shardings), strict=True)]
            self._lacking[shardings] = max(lacks), sum(lacks)
        return self._lacking[shardings]

    def left(self, node: Node) -> float:
        """At least what it costs from here to the target; see `lower_bound`."""
        shardings, partials = node
        if self._is_local(shardings, partials):
            return 0.0
        if partials not in self._due:
            transfers = reductions(partials, self.want)
            average = self.want.shape.numel() * self.item * transfers / self.mesh.size()
            self._due[partials] = max(self.want.nbytes / self.group, average) if transfers else 0.0
        worst, total = self.lacking(shardings)
        least = worst / self.group
        if self._all and partials and not self._due[partials]:
            least = max(least, carried(partials, self.want, total))
        return self.latency + max(self._due[partials], least * self.item) * self._least

    def _is_local(self, shardings: Numbers, partials: Partials) -> bool:
        """Whether what differs may be a matter of local steps: nothing is reduced, nothing gathered."""
        wanted = dict(self.want.partials)
        if not all(axis in wanted and _alike(kind, wanted[axis], self.have) for axis, kind in partials):
            return False
        for c, at in self.by_dim(shardings):
            axes = c.axes[at]
            embeds = (c.fewer(at, k) in c.near for k in range(1, len(axes) + 1) if set(axes[-k:]) <= wanted.keys())
            if at not in c.near and not any(embeds):
                return False
        return True

    def price(self, kind: str, axes: tuple[str, ...], received: float) -> float:
        """The seconds of a step over axes; infinite where it may not be done or there is no group for it."""
        known = self._links.get(axes)
        if known is None:
            ordered = self.mesh.sorted_axes(axes)
            usable = self._every_group or self.mesh.usable(ordered)
            known = self._links[axes] = route(self.mesh, ordered) if usable else Link(math.inf, 0.0)
        if kind in self.without:
            return math.inf
        return seconds(kind, known, received) if known.latency else 0.0

    def collective(self, kind: str, axes: tuple[str, ...], held: float) -> float:
        """The seconds of a collective over axes to which every rank gives `held` bytes."""
        return self.price(kind, axes, received(kind, held, self.ranks(axes)))

    def least(self, kind: str, received: float) -> float:
        """The seconds of a step over the quickest axis."""
        return math.inf if kind in self.without else LAUNCHES[kind] * self.latency + received * self._least

    def ranks(self, axes: tuple[str, ...]) -> int:
        """The number of ranks of a group over axes."""
        return math.prod([self.mesh.axis_sizes[axis] for axis in axes])


def _alike(kind: str, other: str, have: Layout) -> bool:
    return kind == other or ({kind, other} == {"sum", "avg"} and have.dtype.is_floating_point)


def _free(space: Space, node: Node) -> list[str]:
    used = {axis for c, at in space.by_dim(node[0]) for axis in c.axes[at]} | {axis for axis, _ in node[1]}
    return [axis for axis in space.mesh.axes if axis not in used]


def _exchanges(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """Straight to the target's shardings, whatever they are."""
    shardings, partials = node
    goal = space.goal[0]
    if space.least("exchange", space.lacking(shardings)[0] / space.group * space.item) >= budget:
        return
    wanted = {axis for c, at in space.by_dim(goal) for axis in c.axes[at]}
    if shardings == goal or any(axis in wanted for axis, _ in partials):
        return
    moved = space.by_dim(shardings, goal)
    axes = tuple(axis for c, at, other in moved if at != other for axis in c.axes[at])
    if axes:
        nbytes = missing(space.layout(node), space.layout((goal, partials)))
        yield Edge("exchange", axes, (goal, partials), space.price("exchange", axes, nbytes))


def _takes(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """One more axis shards a dim, or all of the target's where the dim is a product of factors."""
    shardings, partials = node
    free = _free(space, node)
    for dim, (c, at) in enumerate(space.by_dim(shardings)):
        ways: list[tuple[tuple[str, ...], int]] = []
        if len(c.dims[at]) == 1:
            ways = [((axis,), c.more(at, axis)) for axis in free]
        if at == c.unsharded and len(c.dims[c.want]) > 1 and set(c.axes[c.want]) <= set(free):
            ways.append((c.axes[c.want], c.want))
        for axes, after in ways:
            if after in c.near or partials or not space.straight:
                yield Edge("take", axes, ((*shardings[:dim], after, *shardings[dim + 1 :]), partials), LOCAL_SECONDS)


def _dropped(space: Space, shardings: Numbers) -> Iterator[tuple[tuple[str, ...], Numbers]]:
    """Every choice of minor-most axes, with the shardings that remain without them."""
    for counts in product(*(c.counts(at) for c, at in space.by_dim(shardings))):
        if any(counts):
            axes = tuple(a for c, at, k in space.by_dim(shardings, counts) if k for a in c.axes[at][-k:])
            yield axes, tuple(c.fewer(at, k) if k else at for c, at, k in space.by_dim(shardings, counts))


def _gathers(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    shardings, partials = node
    held = space.bytes(shardings)
    for axes, kept in _dropped(space, shardings):
        if space.bytes(kept) <= space.cap:
            yield Edge("all_gather", axes, (kept, partials), space.collective("all_gather", axes, held))


def _deals(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """All-to-alls: minor-most axes leave their dims and shard others; exchanges where the shards are not equal."""
    shardings, partials = node
    held = space.bytes(shardings)
    for axes, kept in _dropped(space, shardings):
        if any(len(c.dims[at]) > 1 for c, at, k in space.by_dim(shardings, kept) if at != k):
            continue
        price = space.collective("all_to_all", axes, held)
        least = min(price, space.price("exchange", axes, 0.0))
        if least >= budget:
            continue
        for dealt in _ways(space, shardings, kept, axes, budget - least):
            if space.bytes(dealt) <= space.cap:
                if all(c.even[a] and c.even[b] for c, a, b in space.by_dim(shardings, dealt) if a != b):
                    yield Edge("all_to_all", axes, (dealt, partials), price)
                elif "exchange" not in space.without:
                    nbytes = missing(space.layout(node), space.layout((dealt, partials)))
                    yield Edge("exchange", axes, (dealt, partials), space.price("exchange", axes, nbytes))


def _ways(space: Space, shardings: Numbers, kept: Numbers, axes: tuple[str, ...], budget: float) -> Iterator[Numbers]:
    """The shardings that come of sharding dims by all the axes: all of them, or, where no other step could be paid after it,
    only the one that leads to the target. A dim that loses axes gains none: its shards would not be equal."""
    if budget > space.latency:
        gains = tuple(len(c.dims[a]) == 1 and a == b for c, a, b in space.by_dim(shardings, kept))
        ways: Iterable[Way] = _arrangements(axes, gains)
    else:
        ways = _toward(space, shardings, kept, axes)
    for way in ways:
        dealt = list(kept)
        for dim, added in enumerate(way):
            for axis in added:
                dealt[dim] = space.tables[dim].more(dealt[dim], axis)
        yield tuple(dealt)


def _toward(space: Space, shardings: Numbers, kept: Numbers, axes: tuple[str, ...]) -> Iterable[Way]:
    way = []
    for c, at, base in space.by_dim(shardings, kept):
        gains = at == base and base in c.near and len(c.dims[base]) == len(c.dims[c.want]) == 1
        coming = c.axes[c.want][len(c.axes[base]) :] if gains else ()
        way.append(tuple(takewhile(axes.__contains__, coming)))
    return (tuple(way),) if sum(map(len, way)) == len(axes) else ()


@lru_cache(maxsize=1024)
def _arrangements(axes: tuple[str, ...], gains: tuple[bool, ...]) -> tuple[Way, ...]:
    """Every way to put all the axes, in any order, on the dims that may gain some.

    >>> _arrangements(("a",), (True, True, False))
    ((('a',), (), ()), ((), ('a',), ()))
    """
    dims = [dim for dim, gain in enumerate(gains) if gain]
    found = []
    for order in permutations(axes) if dims else ():
        for marks in combinations(range(len(axes) + len(dims) - 1), len(dims) - 1):
            edges = [mark - i for i, mark in enumerate(marks)]
            parts = {d: order[a:b] for d, a, b in zip(dims, [0, *edges], [*edges, len(axes)], strict=True)}
            found.append(tuple(parts.get(dim, ()) for dim in range(len(gains))))
    return tuple(found[::-1])


def _permutes(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """The same shards on other ranks: each dim keeps its number of shards, and other axes count them."""
    shardings, partials = node
    held = space.bytes(shardings)
    if space.least("permute", held) >= budget:
        return
    single = [len(c.dims[at]) == 1 for c, at in space.by_dim(shardings)]
    counts = tuple(len(c.dims[at][0].sizes) if one else 1 for c, at, one in space.by_dim(shardings, single))
    fixed = {a for c, at, one in space.by_dim(shardings, single) if not one for a in c.axes[at]}.union(dict(partials))
    alone = space.least("permute", held) + space.latency >= budget
    for way in _target_grids(space, counts) if alone else _grids(space.mesh, counts):
        if not fixed.isdisjoint(axis for axes in way for axis in axes):
            continue
        several = space.by_dim(shardings, single, way)
        moved = tuple(c.renamed(at, axes) if one and c.axes[at] != axes else at for c, at, one, axes in several)
        if moved != shardings:
            changed = [(c.axes[a], c.axes[b]) for c, a, b in space.by_dim(shardings, moved) if a != b]
            axes = tuple({axis: None for pair in changed for part in pair for axis in part})
            yield Edge("permute", axes, (moved, partials), space.price("permute", axes, held))


def _target_grids(space: Space, counts: Numbers) -> Iterable[Way]:
    """The way for axes to count so many shards of each dim that leads to the target, if there is one."""
    found = []
    for c, count in space.by_dim(counts):
        axes = c.axes[c.want]
        lengths = [k for k in range(len(axes) + 1) if space.ranks(axes[:k]) == count]
        if not lengths:
            return ()
        found.append(axes[: lengths[0]])
    return (tuple(found),)


@memo("grids", limit=1024)
def _grids(mesh: Mesh, counts: tuple[int, ...]) -> tuple[Way, ...]:
    """Every way for axes of the mesh (of more than one rank) to count so many shards of each dim."""
    if not counts:
        return ((),)
    found = []
    axes = [axis for axis, n in mesh.axis_sizes.items() if n > 1]
    for length in range(len(axes) + 1):
        for first in permutations(axes, length):
            if math.prod(mesh.axis_sizes[axis] for axis in first) == counts[0]:
                rest = _grids(mesh, counts[1:])
                found += [(first, *others) for others in rest if not any(a in first for other in others for a in other)]
    return tuple(found)


def _reduces(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """All-reduces and reduce-scatters over any of the axes whose reduction the target does not leave partial."""
    shardings, partials = node
    held = space.bytes(shardings)
    due = [axis for axis, kind in partials if (axis, kind) not in space.want.partials]
    for count in range(len(due), 0, -1):
        for axes in combinations(due, count):
            rest = tuple(item for item in partials if item[0] not in axes)
            yield Edge("all_reduce", axes, (shardings, rest), space.collective("all_reduce", axes, held))
            least = space.collective("reduce_scatter", axes, held)
            for dealt in _ways(space, shardings, shardings, axes, budget - least) if least < budget else ():
                price = space.collective("reduce_scatter", axes, space.bytes(dealt) * space.ranks(axes))
                yield Edge("reduce_scatter", axes, (dealt, rest), price)


def _leaves(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """Local steps that leave a value partial: of replicated axes, of axes that shard a dim, of a partial sum or average."""
    shardings, partials = node
    now = dict(partials)
    due = {axis: kind for axis, kind in space.want.partials if now.get(axis) != kind}
    pairs = [{kind, other} for axis, kind in due.items() for held, other in partials if held != axis]
    if not all(len(kinds) == 1 or kinds <= {"sum", "avg"} for kinds in pairs):
        return
    scaled = tuple(axis for axis, kind in due.items() if axis in now and _alike(now[axis], kind, space.have))
    if scaled:
        yield Edge("scale", scaled, (shardings, _with(space, now, due, scaled)), LOCAL_SECONDS)
    free = tuple(axis for axis in _free(space, node) if axis in due)
    for axes in dict.fromkeys((free, *((axis,) for axis in free))):
        if axes:
            yield Edge("split", axes, (shardings, _with(space, now, due, axes)), LOCAL_SECONDS)
    for dim, (c, at) in enumerate(space.by_dim(shardings)):
        for count in range(1, len(c.axes[at]) + 1 if len(c.dims[at]) == 1 else 1):
            axes = c.axes[at][-count:]
            embedded = (*shardings[:dim], c.fewer(at, count), *shardings[dim + 1 :])
            if not due.keys() >= set(axes) or space.bytes(embedded) > space.cap:
                break
            yield Edge("embed", axes, (embedded, _with(space, now, due, axes)), LOCAL_SECONDS)


def _with(space: Space, now: dict[str, str], due: dict[str, str], axes: Iterable[str]) -> Partials:
    after = now | {axis: due[axis] for axis in axes}
    return tuple((axis, after[axis]) for axis in space.mesh.axes if axis in after)


_FAMILIES = (_exchanges, _leaves, _takes, _gathers, _reduces, _permutes, _deals)


# ── the shortest path ─────────────────────────────────────────────────────────────────────────────────────────────────


def search(have: Layout, want: Layout, cap: float, without: Iterable[str] = (), every_group: bool = False) -> Path | None:
    """The cheapest steps through layouts of at most `cap` bytes without certain kinds; None if there are none.

    `every_group` plans as if every group of ranks were there. Of equally cheap paths the one found first is taken, and
    the order of the search depends on nothing but the two layouts.
    """
    space = Space(have, want, cap, without, every_group)
    best: dict[Node, float] = {space.start: 0.0}
    came: dict[Node, tuple[Node, Edge]] = {}
    queue: list[tuple[float, int, Node]] = [(space.left(space.start), 0, space.start)]
    count, limit = 0, math.inf
    done: set[Node] = set()
    while queue:
        _, _, node = heappop(queue)
        if node == space.goal:
            return _steps(space, came)
        if node in done:
            continue
        done.add(node)
        spent = best[node]
        for family in _FAMILIES:
            for edge in family(space, node, limit - spent):
                total = spent + edge.seconds
                if total >= limit or total >= best.get(edge.node, math.inf):
                    continue
                estimate = total + space.left(edge.node)
                if estimate >= limit:
                    continue
                best[edge.node], came[edge.node] = total, (node, edge)
                limit = total if edge.node == space.goal else limit
                count += 1
                heappush(queue, (estimate, count, edge.node))
    return None


def _steps(space: Space, came: dict[Node, tuple[Node, Edge]]) -> Path:
    """The path to the goal as steps; neighbouring local steps of one kind are one."""
    path: list[Step] = []
    node, after = space.goal, space.want
    while node in came:
        node, edge = came[node]
        before = space.have if node == space.start else space.layout(node)
        axes = space.mesh.sorted_axes(edge.axes)
        if path and edge.kind == path[-1].kind and edge.kind in ("take", "split"):
            last = path.pop()
            path.append(Step(edge.kind, space.mesh.sorted_axes((*axes, *last.axes)), before, last.after))
        else:
            path.append(Step(edge.kind, axes, before, after))
        after = before
    return tuple(reversed(path))
