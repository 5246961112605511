"""search(have, want): the cheapest steps between two layouts on one mesh, as a shortest path over layouts. Pure.

A node is a sharding of every dim and what is partial. Edges are the kinds of `Step` over any usable subset of the axes, so what
can be done in one collective is one edge, whatever order the axes come in. The search is A*: what is left to receive is never
less than what the target holds beyond what is held now, and costs one more start unless local steps suffice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, permutations, product, takewhile
from typing import NamedTuple

from ..base.caches import memo
from ..layouts.layout import Dim, Factor, Layout, default_sizes, whole
from ..layouts.mesh import Mesh
from .bounds import Side, carried, indices, missing, points, products, reductions, shares
from .cost import Link, route
from .step import Step

#: Starts that a kind of step costs. An exchange is planned element by element, packed and unpacked.
STARTS = {"all_reduce": 1.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0, "permute": 1.0}
STARTS |= {"exchange": 1.2, "transfer": 1.2}
#: What is left to do is estimated from so many ranks at most: what they lack is a bound, and cheaper to count.
MOST_POINTS = 32
#: Seconds of a local step: not nothing, so that none is taken in vain, and no matter of bytes, since several become one.
AT_HAND = 1e-7

Pending = tuple[tuple[str, str], ...]
Numbers = tuple[int, ...]
Way = tuple[tuple[str, ...], ...]
Node = tuple[Numbers, Pending]


class Edge(NamedTuple):
    """A step to another node: its kind, its axes in any order, and its seconds."""

    kind: str
    axes: tuple[str, ...]
    node: Node
    seconds: float


def seconds(kind: str, link: Link, received: float) -> float:
    """What a collective costs: starts, and bytes received. Packing is not counted: memory is much faster than any link."""
    return STARTS[kind] * link.latency + received * link.per_byte


# ── shardings of one dim, as numbers ───────────────────────────────────────────────────────────────────────────────────────


class Cuts:
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
        self.uncut = self.number((whole(self.size),))
        self.have, self.want = self.number(have), self.number(want)
        self._toward: dict[tuple[int, str], int] = {}
        self.near = {self.uncut, self.want}  # shardings that local steps turn into the target's
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

    def fewer(self, cut: int, count: int) -> int:
        """The sharding without its `count` minor-most axes."""
        found = self._fewer.get((cut, count))
        if found is None:
            factor = self.dims[cut][0]
            keep = factor.axes[: len(factor.axes) - count] if len(self.dims[cut]) == 1 else ()
            step = len(factor.sizes) // math.prod(self._mesh.axis_sizes[axis] for axis in keep)
            sizes = tuple(sum(factor.sizes[i : i + step]) for i in range(0, len(factor.sizes), step))
            made = (Factor(factor.size, keep, sizes),) if keep else (whole(self.size),)
            found = self._fewer[cut, count] = self.number(made)
        return found

    def counts(self, cut: int) -> Sequence[int]:
        """How many minor-most axes may leave at once: any number, or all where the dim is a product of factors."""
        return range(len(self.axes[cut]) + 1) if len(self.dims[cut]) == 1 else (0, len(self.axes[cut]))

    def more(self, cut: int, axis: str) -> int:
        """The sharding with one more axis at its minor end: into the target's shards where that leads there, else equal
        chunks."""
        found = self._toward.get((cut, axis)) or self._more.get((cut, axis))
        if found is None:
            factor = self.dims[cut][0]
            chunks = {size: default_sizes(size, (self._mesh.axis_sizes[axis],)) for size in set(factor.sizes)}
            sizes = tuple([shard for size in factor.sizes for shard in chunks[size]])
            found = self._more[cut, axis] = self.number((Factor(factor.size, (*factor.axes, axis), sizes),))
        return found

    def kept(self, cut: int) -> list[int]:
        """At each point of the mesh, how much of what a rank wants of this dim it (or its pool) holds."""
        found = self._kept.get(cut)
        if found is None:
            found = self._kept[cut] = self._shares(cut)
        return found

    def _shares(self, cut: int) -> list[int]:
        dim, want = self.dims[cut], self.dims[self.want]
        if len(dim) > 1 or len(want) > 1 or any(axis in self._pooled for axis in self.axes[cut]):
            at = points(self._mesh, self._mesh.axes, MOST_POINTS)
            return shares(Side(dim, self._mesh, at), Side(want, self._mesh, at), self._pooled)
        if self._goals is None:
            self._goals = [want[0].interval(i) for i in indices(self._mesh, want[0].axes, MOST_POINTS)]
        starts = dim[0].starts
        every = zip(indices(self._mesh, dim[0].axes, MOST_POINTS), self._goals, strict=True)
        return [max(0, min(starts[i + 1], stop) - max(starts[i], start)) for i, (start, stop) in every]

    def renamed(self, cut: int, axes: tuple[str, ...]) -> int:
        """The same shards, dealt out along other axes."""
        factor = self.dims[cut][0]
        return self.number((factor._replace(axes=axes),))


# ── nodes and edges ───────────────────────────────────────────────────────────────────────────────────────────────────


class Space:
    """The nodes between two layouts of one mesh, and the edges that lead from one to the next."""

    def __init__(self, have: Layout, want: Layout, cap: float, without: Iterable[str], every_group: bool) -> None:
        self.mesh, self.have, self.want, self.cap, self.without = have.mesh, have, want, cap, frozenset(without)
        pooled = tuple(axis for axis, _ in want.partials)
        self.group = math.prod([self.mesh.axis_sizes[axis] for axis in pooled])
        self.cuts = [Cuts(h, w, self.mesh, pooled) for h, w in zip(have.dims, want.dims, strict=True)]
        self.item = have.dtype.itemsize
        self.start: Node = tuple(c.have for c in self.cuts), have.partials
        self.goal: Node = tuple(c.want for c in self.cuts), want.partials
        self._every_group = every_group
        self._links: dict[tuple[str, ...], Link] = {}
        routes = [route(self.mesh, (axis,)) for axis, n in self.mesh.axis_sizes.items() if n > 1]
        self._least = min([link.per_byte for link in routes], default=0.0)
        self.start_seconds = min([link.latency for link in routes], default=0.0)
        # Links alike and exchanges at hand: from what is held, cut towards the target, one exchange brings the rest at the
        # bound of bytes. Other shardings on the way could save a fifth of a start at most.
        at_hand = "exchange" not in self.without and (every_group or not self.mesh.explicit)
        self.straight = len(set(routes)) <= 1 and at_hand and not want.partials
        self._all = self.mesh.size() <= MOST_POINTS
        self._lacking: dict[Numbers, tuple[int, int]] = {}
        self._wanted = self._held(self.goal[0])
        self._due: dict[Pending, float] = {}

    def layout(self, node: Node) -> Layout:
        """The layout that a node stands for."""
        return self.have.replace(dims=[c.dims[cut] for c, cut in zip(self.cuts, node[0], strict=True)], partials=node[1])

    def bytes(self, cuts: Numbers) -> int:
        """Bytes of the largest shard."""
        total = self.item
        for c, cut in zip(self.cuts, cuts, strict=True):
            total *= c.widths[cut]
        return total

    def _held(self, cuts: Numbers) -> list[int]:
        return products([c.kept(cut) for c, cut in zip(self.cuts, cuts, strict=True)])

    def lacking(self, cuts: Numbers) -> tuple[int, int]:
        """Elements of the target that a rank, or a group over which it is left partial, does not hold: at worst, and in all."""
        found = self._lacking.get(cuts)
        if found is None:
            lacks = [want - have for want, have in zip(self._wanted, self._held(cuts), strict=True)]
            found = self._lacking[cuts] = max(lacks), sum(lacks)
        return found

    def left(self, node: Node) -> float:
        """At least what it costs from here to the target; see `lower_bound`."""
        cuts, pending = node
        if self._is_local(cuts, pending):
            return 0.0
        if pending not in self._due:
            transfers = reductions(pending, self.want)
            average = self.want.shape.numel() * self.item * transfers / self.mesh.size()
            self._due[pending] = max(self.want.nbytes / self.group, average) if transfers else 0.0
        worst, total = self.lacking(cuts)
        least = max(
            worst / self.group, carried(pending, self.want, total) if self._all and pending and not self._due[pending] else 0.0
        )
        return self.start_seconds + max(self._due[pending], least * self.item) * self._least

    def _is_local(self, cuts: Numbers, pending: Pending) -> bool:
        """Whether what differs may be a matter of local steps: nothing is reduced, nothing gathered."""
        wanted = dict(self.want.partials)
        if not all(axis in wanted and _alike(kind, wanted[axis], self.have) for axis, kind in pending):
            return False
        return all(cut in c.near or self._embeds(c, cut, wanted) for c, cut in zip(self.cuts, cuts, strict=True))

    def _embeds(self, c: Cuts, cut: int, wanted: dict[str, str]) -> bool:
        axes = c.axes[cut]
        return any(c.fewer(cut, k) in c.near for k in range(1, len(axes) + 1) if set(axes[-k:]) <= wanted.keys())

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

    def least(self, kind: str, received: float) -> float:
        """The seconds of a step over the quickest axis."""
        return math.inf if kind in self.without else STARTS[kind] * self.start_seconds + received * self._least

    def ranks(self, axes: tuple[str, ...]) -> int:
        """The number of ranks of a group over axes."""
        return math.prod([self.mesh.axis_sizes[axis] for axis in axes])


def _alike(kind: str, other: str, have: Layout) -> bool:
    return kind == other or ({kind, other} == {"sum", "avg"} and have.dtype.is_floating_point)


def _set(cuts: Numbers, dim: int, cut: int) -> Numbers:
    return (*cuts[:dim], cut, *cuts[dim + 1 :])


def _free(space: Space, node: Node) -> list[str]:
    used = {axis for c, cut in zip(space.cuts, node[0], strict=True) for axis in c.axes[cut]} | {axis for axis, _ in node[1]}
    return [axis for axis in space.mesh.axes if axis not in used]


def _exchanges(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """Straight to the target's shardings, whatever they are."""
    cuts, pending = node
    goal = space.goal[0]
    if space.least("exchange", space.lacking(cuts)[0] / space.group * space.item) >= budget:
        return
    wanted = {axis for c, cut in zip(space.cuts, goal, strict=True) for axis in c.axes[cut]}
    if cuts == goal or any(axis in wanted for axis, _ in pending):
        return
    moved = zip(space.cuts, cuts, goal, strict=True)
    axes = tuple(axis for c, cut, other in moved if cut != other for axis in c.axes[cut])
    if axes:
        received = missing(space.layout(node), space.layout((goal, pending)))
        yield Edge("exchange", axes, (goal, pending), space.price("exchange", axes, received))


def _takes(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """One more axis shards a dim, or all of the target's where the dim is a product of factors."""
    cuts, pending = node
    free = _free(space, node)
    for dim, (c, cut) in enumerate(zip(space.cuts, cuts, strict=True)):
        ways: list[tuple[tuple[str, ...], int]] = []
        if len(c.dims[cut]) == 1:
            ways = [((axis,), c.more(cut, axis)) for axis in free]
        if cut == c.uncut and len(c.dims[c.want]) > 1 and set(c.axes[c.want]) <= set(free):
            ways.append((c.axes[c.want], c.want))
        for axes, after in ways:
            if after in c.near or pending or not space.straight:
                yield Edge("take", axes, (_set(cuts, dim, after), pending), AT_HAND)


def _dropped(space: Space, cuts: Numbers) -> Iterator[tuple[tuple[str, ...], Numbers]]:
    """Every choice of minor-most axes, with the shardings that remain without them."""
    for counts in product(*(c.counts(cut) for c, cut in zip(space.cuts, cuts, strict=True))):
        if any(counts):
            axes = tuple(a for c, cut, k in zip(space.cuts, cuts, counts, strict=True) if k for a in c.axes[cut][-k:])
            yield axes, tuple(c.fewer(cut, k) if k else cut for c, cut, k in zip(space.cuts, cuts, counts, strict=True))


def _gathers(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    cuts, pending = node
    held = space.bytes(cuts)
    for axes, kept in _dropped(space, cuts):
        if space.bytes(kept) <= space.cap:
            ranks = space.ranks(axes)
            yield Edge("all_gather", axes, (kept, pending), space.price("all_gather", axes, held * (ranks - 1)))


def _deals(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """All-to-alls: minor-most axes leave their dims and shard others; exchanges where the shards are not equal."""
    cuts, pending = node
    held = space.bytes(cuts)
    for axes, kept in _dropped(space, cuts):
        if any(len(c.dims[cut]) > 1 for c, cut, k in zip(space.cuts, cuts, kept, strict=True) if cut != k):
            continue
        ranks = space.ranks(axes)
        price = space.price("all_to_all", axes, held * (ranks - 1) / ranks)
        least = min(price, space.price("exchange", axes, 0.0))
        if least >= budget:
            continue
        for dealt in _ways(space, cuts, kept, axes, budget - least):
            if space.bytes(dealt) <= space.cap:
                if all(c.even[a] and c.even[b] for c, a, b in zip(space.cuts, cuts, dealt, strict=True) if a != b):
                    yield Edge("all_to_all", axes, (dealt, pending), price)
                elif "exchange" not in space.without:
                    received = missing(space.layout(node), space.layout((dealt, pending)))
                    yield Edge("exchange", axes, (dealt, pending), space.price("exchange", axes, received))


def _ways(space: Space, cuts: Numbers, kept: Numbers, axes: tuple[str, ...], budget: float) -> Iterator[Numbers]:
    """The shardings that come of sharding dims by all the axes: all of them, or, where no other step could be paid after it,
    only the one that leads to the target. A dim that loses axes gains none: its shards would not be equal."""
    if budget > space.start_seconds:
        gains = tuple(len(c.dims[a]) == 1 and a == b for c, a, b in zip(space.cuts, cuts, kept, strict=True))
        ways: Iterable[Way] = _arrangements(axes, gains)
    else:
        ways = _toward(space, cuts, kept, axes)
    for way in ways:
        dealt = list(kept)
        for dim, added in enumerate(way):
            for axis in added:
                dealt[dim] = space.cuts[dim].more(dealt[dim], axis)
        yield tuple(dealt)


def _toward(space: Space, cuts: Numbers, kept: Numbers, axes: tuple[str, ...]) -> Iterable[Way]:
    way = []
    for c, cut, base in zip(space.cuts, cuts, kept, strict=True):
        gains = cut == base and base in c.near and len(c.dims[base]) == len(c.dims[c.want]) == 1
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
    cuts, pending = node
    held = space.bytes(cuts)
    if space.least("permute", held) >= budget:
        return
    single = [len(c.dims[cut]) == 1 for c, cut in zip(space.cuts, cuts, strict=True)]
    counts = tuple(len(c.dims[cut][0].sizes) if one else 1 for c, cut, one in zip(space.cuts, cuts, single, strict=True))
    fixed = {a for c, cut, one in zip(space.cuts, cuts, single, strict=True) if not one for a in c.axes[cut]}
    fixed |= {axis for axis, _ in pending}
    alone = space.least("permute", held) + space.start_seconds >= budget
    for way in _target_grids(space, counts) if alone else _grids(space.mesh, counts):
        if not fixed.isdisjoint(axis for axes in way for axis in axes):
            continue
        moved = tuple(
            c.renamed(cut, axes) if one and c.axes[cut] != axes else cut
            for c, cut, one, axes in zip(space.cuts, cuts, single, way, strict=True)
        )
        if moved != cuts:
            changed = [(c.axes[a], c.axes[b]) for c, a, b in zip(space.cuts, cuts, moved, strict=True) if a != b]
            axes = tuple({axis: None for pair in changed for part in pair for axis in part})
            yield Edge("permute", axes, (moved, pending), space.price("permute", axes, held))


def _target_grids(space: Space, counts: Numbers) -> Iterable[Way]:
    """The way for axes to count so many shards of each dim that leads to the target, if there is one."""
    found = []
    for c, count in zip(space.cuts, counts, strict=True):
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
    cuts, pending = node
    held = space.bytes(cuts)
    due = [axis for axis, kind in pending if (axis, kind) not in space.want.partials]
    for count in range(len(due), 0, -1):
        for axes in combinations(due, count):
            rest = tuple(item for item in pending if item[0] not in axes)
            ranks = space.ranks(axes)
            yield Edge("all_reduce", axes, (cuts, rest), space.price("all_reduce", axes, 2 * held * (ranks - 1) / ranks))
            least = space.price("reduce_scatter", axes, held * (ranks - 1) / ranks)
            if least >= budget:
                continue
            for dealt in _ways(space, cuts, cuts, axes, budget - least):
                price = space.price("reduce_scatter", axes, space.bytes(dealt) * (ranks - 1))
                yield Edge("reduce_scatter", axes, (dealt, rest), price)


def _leaves(space: Space, node: Node, budget: float) -> Iterator[Edge]:
    """Local steps that leave a value partial: of replicated axes, of axes that sharding a dim, of a partial sum or average."""
    cuts, pending = node
    now = dict(pending)
    due = {axis: kind for axis, kind in space.want.partials if now.get(axis) != kind}
    if not all(_mixes(kind, other) for axis, kind in due.items() for held, other in pending if held != axis):
        return
    scaled = tuple(axis for axis, kind in due.items() if axis in now and _alike(now[axis], kind, space.have))
    if scaled:
        yield Edge("scale", scaled, (cuts, _with(space, now, due, scaled)), AT_HAND)
    free = tuple(axis for axis in _free(space, node) if axis in due)
    for axes in dict.fromkeys((free, *((axis,) for axis in free))):
        if axes:
            yield Edge("split", axes, (cuts, _with(space, now, due, axes)), AT_HAND)
    for dim, (c, cut) in enumerate(zip(space.cuts, cuts, strict=True)):
        for count in range(1, len(c.axes[cut]) + 1 if len(c.dims[cut]) == 1 else 1):
            axes = c.axes[cut][-count:]
            embedded = _set(cuts, dim, c.fewer(cut, count))
            if not due.keys() >= set(axes) or space.bytes(embedded) > space.cap:
                break
            yield Edge("embed", axes, (embedded, _with(space, now, due, axes)), AT_HAND)


def _with(space: Space, now: dict[str, str], due: dict[str, str], axes: Iterable[str]) -> Pending:
    after = now | {axis: due[axis] for axis in axes}
    return tuple((axis, after[axis]) for axis in space.mesh.axes if axis in after)


def _mixes(kind: str, other: str) -> bool:
    return kind == other or {kind, other} <= {"sum", "avg"}


_FAMILIES = (_exchanges, _leaves, _takes, _gathers, _reduces, _permutes, _deals)


# ── the shortest path ─────────────────────────────────────────────────────────────────────────────────────────────────


def search(
    have: Layout, want: Layout, cap: float, without: Iterable[str] = (), every_group: bool = False
) -> tuple[Step, ...] | None:
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
                best[edge.node] = total
                came[edge.node] = node, edge
                if edge.node == space.goal:
                    limit = total
                count += 1
                heappush(queue, (estimate, count, edge.node))
    return None


def _steps(space: Space, came: dict[Node, tuple[Node, Edge]]) -> tuple[Step, ...]:
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
