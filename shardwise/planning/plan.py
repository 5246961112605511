"""plan(have, want): the cheapest steps that turn one layout into another, with a certificate. Pure, cached, bounded.

On one mesh the steps come from `search`; between meshes what is partial is reduced first, then exactly the shards that ranks
lack are transferred. Every plan is proven on index sets when it is made (`proof`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..base.argument_checks import choice, instance, integer, optional, several
from ..base.caches import memo
from ..errors import LayoutError, PlanError
from ..layouts.factor import Factor, default_sizes
from ..layouts.layout import Layout
from .bounds import lower_bound
from .cost import Link, links, route
from .proof import prove
from .search import LAUNCHES, LOCAL_SECONDS, search, seconds
from .step import LOCAL, Step

#: Ways to plan that `Plan.explain` compares with the chosen one: steps left out, and whether the memory bound is lifted.
_OTHER_WAYS = {
    "gather, then slice": (("all_to_all", "permute", "exchange"), True),
    "no exchange": (("exchange",), False),
    "no exchange, any memory": (("exchange",), True),
    "exchange only": (("all_gather", "all_to_all", "permute", "reduce_scatter"), False),
    "all-reduce, no reduce-scatter": (("reduce_scatter",), False),
    "no all-reduce": (("all_reduce",), False),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another, and what they cost.

    >>> from shardwise import Mesh, Shard, layout
    >>> mesh = Mesh(("a", "b"), (2, 2), range(4), "cpu", "simulated")
    >>> found = plan(layout((8, 4), mesh, [Shard(0), Shard(1)]), layout((8, 4), mesh, [Shard(1), Shard(0)]))
    >>> found.collectives, found.bytes, found.lower_bound, found.ratio
    (1, 32, 32, 1.0)
    """

    have: Layout
    want: Layout
    steps: tuple[Step, ...]
    max_bytes: float = field(default=math.inf, repr=False)

    @property
    def collectives(self) -> int:
        """The number of steps that communicate."""
        return sum([step.communicates for step in self.steps])

    @property
    def bytes(self) -> int:
        """Bytes received in all steps together, each counted on its worst rank."""
        return sum([step.bytes for step in self.steps])

    @property
    def lower_bound(self) -> int:
        """Bytes that the worst rank must receive whatever the algorithm."""
        return lower_bound(*_lifted(self.have, self.want))

    @property
    def ratio(self) -> float:
        """Bytes received over the lower bound; 1 where nothing must be received and nothing is."""
        return self.bytes / self.lower_bound if self.lower_bound else math.inf if self.bytes else 1.0

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts on the way, from the first to the last."""
        return self.have, *(step.after for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds in any layout on the way; buffers within a step come on top."""
        return max(layout.nbytes for layout in self.layouts)

    @property
    def cost(self) -> float:
        """Estimated seconds."""
        return sum([_seconds(step) for step in self.steps])

    def __str__(self) -> str:
        received = [f"{step.bytes:,} bytes" if step.communicates else "" for step in self.steps]
        lines = [(f"  {_name(step)}", str(step.after), text) for step, text in zip(self.steps, received, strict=True)]
        widths = [max((len(line[i]) for line in lines), default=0) for i in (0, 1)]
        shown = [f"{a:<{widths[0]}}  → {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines]
        bound = f"{self.bytes:,} bytes received (at least {self.lower_bound:,}: {self.ratio:.2f})"
        summary = f"{_count(self)}, {bound}, peak {self.peak_bytes:,} bytes, {_time(self.cost)}"
        return "\n".join([f"{self.have} → {self.want}: {summary}", *shown])

    def explain(self) -> str:
        """The plan, and the other ways to go with what each costs.

        >>> from shardwise import Mesh, Replicate, Shard, layout
        >>> mesh = Mesh(("a", "b"), (2, 2), range(4), "cpu", "simulated")
        >>> have, want = (layout((8, 4), mesh, [Shard(d), Shard(1 - d)]) for d in (0, 1))
        >>> print(plan(have, want).explain())  # doctest: +ELLIPSIS
        f32[8@a, 4@b] → f32[8@b, 4@a]: 1 collective, 32 bytes received (at least 32: 1.00), peak 32 bytes, 20 µs
          permute over a,b  → f32[8@b, 4@a]  32 bytes
        Rejected:
          gather, then slice  20.1 µs, 1 collective, 96 bytes, peak 128 (over the bound of 32): ...
          exchange only         24 µs, 1 collective, 32 bytes, peak 32: exchange over a,b
        """
        if self.have.mesh.root is not self.want.mesh.root:
            return f"{self}\nBetween meshes only what ranks lack is transferred: there is no other way to compare with."
        seen, lines = {self.steps}, []
        for name, (without, lifted) in _OTHER_WAYS.items():
            steps = search(*_lifted(self.have, self.want), math.inf if lifted else self.max_bytes, without)
            if steps is not None and steps not in seen:
                seen.add(steps)
                lines.append((name, replace(self, steps=steps)))
        width = max((len(name) for name, _ in lines), default=0)
        shown = [f"  {name:<{width}}  {self._compared(other)}" for name, other in lines]
        return "\n".join([str(self), *(["Rejected:", *shown] if shown else ["No other way was found."])])

    def _compared(self, other: Plan) -> str:
        over = f" (over the bound of {self.max_bytes:,.0f})" if other.peak_bytes > self.max_bytes else ""
        counts = f"{_count(other)}, {other.bytes:,} bytes, peak {other.peak_bytes:,}{over}"
        return f"{_time(other.cost):>7}, {counts}: {', '.join(map(_name, other.steps))}"


def _count(plan: Plan) -> str:
    return f"{plan.collectives} collective{'' if plan.collectives == 1 else 's'}"


def _name(step: Step) -> str:
    return step.kind + (f" over {','.join(step.axes)}" if step.axes else "")


def _time(cost: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if cost >= size:
            return f"{cost / size:.3g} {unit}"
    return f"{cost / 1e-6:.3g} µs"


def _seconds(step: Step) -> float:
    """Estimated seconds of a step; a transfer goes over the slowest links of either mesh."""
    if step.kind in LOCAL or not step.communicates:
        return LOCAL_SECONDS if step.kind in LOCAL else 0.0
    link = route(step.before.mesh, step.axes)
    if step.kind == "transfer":
        every = [link for layout in (step.before, step.after) for link in links(layout.mesh).values()]
        link = Link(max(link.latency for link in every), max(link.per_byte for link in every))
    return seconds(step.kind, link, step.bytes)


def plan(have: Layout, want: Layout, max_bytes: int | None = None, without: Iterable[str] = ()) -> Plan:
    """The cheapest way from one layout of a tensor to another: on one mesh, or from one mesh to another.

    No layout on the way takes more than `max_bytes` on a rank (as a rule, what the larger of the two takes), and no step is of
    a kind in `without`.

    >>> from shardwise import Mesh, Partial, Replicate, layout
    >>> mesh = Mesh(("a", "b"), (2, 2), range(4), "cpu", "simulated")
    >>> have, want = (layout((8, 4), mesh, [p, p]) for p in (Partial(), Replicate()))
    >>> print(plan(have, want))
    f32[8, 4 | sum@a, sum@b] → f32[8, 4]: 1 collective, 192 bytes received (at least 192: 1.00), peak 128 bytes, 20 µs
      all_reduce over a,b  → f32[8, 4]  192 bytes
    """
    if type(without) is not tuple:
        without = several(without, "plan: without", f"several of {', '.join(LAUNCHES)}")
    try:
        start, goal = have.concrete, want.concrete
    except AttributeError:  # looked at only here, since every move comes this way
        for name, layout in (("have", have), ("want", want)):
            instance(layout, Layout, f"plan: {name}", "a Layout, such as x.layout or sw.layout(...)")
        raise
    return _plan(start, goal, max_bytes, without)


@memo("plans", limit=4096)
def _plan(have: Layout, want: Layout, max_bytes: int | None, without: tuple[str, ...]) -> Plan:
    _check(have, want, max_bytes, without)
    start, goal = _lifted(have, want)
    cap = max(have.nbytes, want.nbytes) if max_bytes is None else max_bytes
    lenient, on_one = max_bytes is None, start.mesh is goal.mesh
    steps = _on_one_mesh(start, goal, cap, lenient, without) if on_one else _across(start, goal, cap)
    prove(steps, start, goal)
    return Plan(have, want, steps, cap)


def _lifted(have: Layout, want: Layout) -> tuple[Layout, Layout]:
    """Both on the root mesh if they are on different sub-meshes of it: replicated over the axes they do not name."""
    root = have.mesh.root
    if have.mesh is want.mesh or root is not want.mesh.root:
        return have, want
    return have.replace(mesh=root), want.replace(mesh=root)


def _check(have: Layout, want: Layout, max_bytes: int | None, without: tuple[str, ...]) -> None:
    optional(integer, max_bytes, "plan: max_bytes", 0)
    for kind in without:
        choice(kind, "plan: without", LAUNCHES)
    if have.shape != want.shape or have.dtype != want.dtype:
        raise LayoutError(f"redistribute changes where a tensor lies, not its shape or dtype: {have} to {want}")
    for one, other in ((have.mesh.world, want.mesh.world), (have.mesh.device, want.mesh.device)):
        if one != other:
            raise PlanError(
                f"redistribute from mesh {have.mesh} of {have.mesh.size()} ranks ({one}) to mesh {want.mesh} of "
                f"{want.mesh.size()} ranks ({other}): no communication joins them; "
                "make both meshes in one world, on one kind of device"
            )
    needed = max(have.nbytes, want.nbytes)
    if max_bytes is not None and max_bytes < needed:
        raise PlanError(
            f"redistribute {have} → {want} with max_bytes={max_bytes:,}: a rank holds {have.nbytes:,} bytes before and "
            f"{want.nbytes:,} after, so every plan needs at least {needed:,}"
        )


def _on_one_mesh(have: Layout, want: Layout, cap: int, lenient: bool, without: tuple[str, ...]) -> tuple[Step, ...]:
    steps = search(have, want, cap, without)
    freely = search(have, want, math.inf, without) if steps is None else None
    steps = freely if lenient and steps is None else steps
    if steps is None:
        least = max(step.after.nbytes for step in freely) if freely else 0
        needs = "no steps are left that lead there" if freely is None else f"the least is {least:,} bytes"
        made = "with the groups that were made (sw.Mesh.flatten makes more)" if have.mesh.explicit else ""
        raise PlanError(f"redistribute {have} → {want} within {cap:,} bytes a rank {made}: {needs}; allow more by max_bytes=")
    if have.mesh.explicit:
        _warn_of_missing_groups(steps, search(have, want, cap, without, True))
    return steps


_warned: set[tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = set()


def _warn_of_missing_groups(steps: tuple[Step, ...], better: tuple[Step, ...] | None) -> None:
    """Once for each shape of mesh and missing group, say which call would make the plan cheaper."""
    saved = 0.0 if better is None else sum(map(_seconds, steps)) - sum(map(_seconds, better))
    for step in better if better and saved > 0 else ():
        mesh = step.before.mesh.root
        key = mesh.axes, mesh.shape, step.axes
        if step.communicates and not mesh.usable(step.axes) and key not in _warned:
            _warned.add(key)
            makes = f"mesh.flatten({', '.join(map(repr, step.axes))}) makes it, and {step} would save {_time(saved)}"
            warnings.warn(f"mesh {mesh} has no group over {', '.join(step.axes)}; {makes}", UserWarning, stacklevel=4)


def _across(have: Layout, want: Layout, cap: int) -> tuple[Step, ...]:
    """Reduce what is partial (and scatter it where that is cheaper), transfer, and leave partial what the target does."""
    landed = want.reduced()
    found = []
    for middle in _reduced_ways(have):
        before = () if middle is have else search(have, middle, max(cap, have.nbytes))
        if before is not None:
            found.append((*before, Step("transfer", (), middle, landed)))
    steps = min(found, key=lambda steps: sum(map(_seconds, steps)))
    after = () if landed is want else search(landed, want, max(cap, want.nbytes))
    return (*steps, *(after or ()))


def _reduced_ways(have: Layout) -> list[Layout]:
    """The layouts to transfer from: nothing partial, and the axes of what was replicated, or used to shard a dim further."""
    axes = tuple(axis for axis, _ in have.partials)
    if not axes:
        return [have]
    ways = [have.reduced()]
    for dim, factors in enumerate(have.dims):
        if len(factors) == 1:
            parts = [have.mesh.axis_sizes[axis] for axis in axes]
            sizes = tuple(shard for size in factors[0].sizes for shard in default_sizes(size, parts))
            further = Factor(factors[0].size, (*factors[0].axes, *axes), sizes)
            ways.append(have.replace(dims=[*have.dims[:dim], (further,), *have.dims[dim + 1 :]], partials=()))
    return ways
