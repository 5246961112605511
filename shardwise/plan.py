"""plan(have, want): the steps that turn one layout into another on the same mesh. Pure, cached, bounded.

Each step names the layouts before and after it; running one is `redistribute`'s work. The order is: reduce what is pending, cut
what can be cut without communication, then gather, swap or exchange, then split what the target leaves pending.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cost import LATENCY, PER_BYTE
from .errors import LayoutError
from .layout import Dim, Factor, Layout
from .memo import memo


@dataclass(frozen=True, slots=True)
class Step:
    """One move between two layouts over some axes.

    kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange" (each one collective over `axes`), or the
    local "take" (keep my shard), "split" (leave a value pending: the first rank keeps it).
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout = field(repr=False)
    after: Layout = field(repr=False)
    dim: int = -1
    target: int = -1

    @property
    def communicates(self) -> bool:
        """Whether data crosses ranks."""
        return self.kind not in ("take", "split") and self.ranks > 1

    @property
    def ranks(self) -> int:
        """The number of ranks of one group."""
        total = 1
        for axis in self.axes:
            total *= self.before.mesh.shape[axis]
        return total

    @property
    def bytes(self) -> int:
        """Bytes that the worst rank receives."""
        have, n = self.before.nbytes, self.ranks
        received = {
            "all_reduce": 2 * have * (n - 1) // n,
            "reduce_scatter": have * (n - 1) // n,
            "all_gather": have * (n - 1),
            "all_to_all": have * (n - 1) // n,
            "exchange": self.after.nbytes,
        }
        return received.get(self.kind, 0)

    def __str__(self) -> str:
        over = f" over {','.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{over}: {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another."""

    have: Layout
    want: Layout
    steps: tuple[Step, ...]

    @property
    def collectives(self) -> int:
        """The number of steps that communicate."""
        return sum(step.communicates for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes that the worst rank receives."""
        return sum(step.bytes for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any step's input or output takes on a rank."""
        return max((max(s.before.nbytes, s.after.nbytes) for s in self.steps), default=self.have.nbytes)

    @property
    def cost(self) -> float:
        """Estimated seconds."""
        return sum(LATENCY * s.communicates + s.bytes * PER_BYTE for s in self.steps)

    def __str__(self) -> str:
        head = f"{self.have} → {self.want}: {self.collectives} collectives, {self.bytes} bytes received"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


@memo("plans", limit=4096)
def plan(have: Layout, want: Layout) -> Plan:
    """The steps from `have` to `want`: two layouts of one tensor on one mesh.

    >>> from shardwise import Mesh, Partial, Replicate, layout
    >>> mesh = Mesh(("a", "b"), (2, 2), range(4), "cpu", "simulated")
    >>> have, want = (layout((8, 4), mesh, [p, p]) for p in (Partial(), Replicate()))
    >>> print(plan(have, want))
    f32[8, 4 | sum@a, sum@b] → f32[8, 4]: 1 collectives, 192 bytes received
      all_reduce over a,b: f32[8, 4 | sum@a, sum@b] → f32[8, 4]
    """
    _check(have, want)
    steps: list[Step] = []
    now = have
    for stage in (_reduce, _take, _move):
        for step in stage(now, want):
            steps.append(step)
            now = step.after
    missing = [item for item in want.partials if item not in now.partials]
    if missing:
        steps.append(Step("split", tuple(axis for axis, _ in missing), now, now.replace(partials=want.partials)))
    return Plan(have, want, tuple(steps))


def _check(have: Layout, want: Layout) -> None:
    if have.mesh is not want.mesh:
        raise LayoutError(f"redistribute from mesh {have.mesh} to mesh {want.mesh}: both layouts must be on one mesh")
    if have.shape != want.shape or have.dtype != want.dtype:
        raise LayoutError(f"redistribute changes where a tensor lies, not its shape or dtype: {have} to {want}")


def _reduce(now: Layout, want: Layout) -> list[Step]:
    """Reduce-scatter where the target cuts evenly by a pending axis, then all-reduce the rest at once."""
    steps: list[Step] = []
    pending = dict(item for item in now.partials if item not in want.partials)
    for dim in range(now.ndim):
        axes = _scatter_axes(now, want, dim, pending)
        if axes:
            after = now.replace(
                dims=[want.dims[i] if i == dim else d for i, d in enumerate(now.dims)],
                partials=[item for item in now.partials if item[0] not in axes],
            )
            steps.append(Step("reduce_scatter", axes, now, after, dim))
            now, pending = after, {axis: kind for axis, kind in pending.items() if axis not in axes}
    if pending:
        after = now.replace(partials=[item for item in now.partials if item[0] not in pending])
        steps.append(Step("all_reduce", now.mesh.sorted_axes(pending), now, after))
    return steps


def _scatter_axes(now: Layout, want: Layout, dim: int, pending: dict[str, str]) -> tuple[str, ...]:
    added = _added(now.dims[dim], want.dims[dim])
    if not added or not set(added) <= pending.keys() or added != now.mesh.sorted_axes(added):
        return ()
    factor = want.dims[dim][0]
    return added if min(factor.sizes) == max(factor.sizes) > 0 else ()


def _added(have: Dim, want: Dim) -> tuple[str, ...]:
    """The axes by which `want` cuts each shard of `have` further, or () where it does not do just that."""
    if len(have) > 1 or len(want) > 1:
        return ()
    before, after = have[0], want[0]
    if after.axes[: len(before.axes)] != before.axes or len(after.axes) == len(before.axes):
        return ()
    step = len(after.sizes) // len(before.sizes)
    totals = tuple(sum(after.sizes[i : i + step]) for i in range(0, len(after.sizes), step))
    return after.axes[len(before.axes) :] if totals == before.sizes else ()


def _take(now: Layout, want: Layout) -> list[Step]:
    """Cut further, without communication, every dim that the target cuts by axes that replicate now."""
    dims = list(now.dims)
    used = set(now.states)
    for i, (have_dim, want_dim) in enumerate(zip(now.dims, want.dims, strict=True)):
        axes = {axis for factor in want_dim for axis in factor.axes}
        uncut = not any(factor.axes for factor in have_dim)
        added = _added(have_dim, want_dim)
        if (uncut and axes and not axes & used) or (added and not set(added) & used):
            dims[i] = want_dim
    after = now.replace(dims=dims)
    return [] if after is now else [Step("take", (), now, after)]


def _move(now: Layout, want: Layout) -> list[Step]:
    """All-to-all where one even axis changes its dim; else all-gather dim by dim where that suffices; else exchange."""
    target = now.replace(dims=want.dims)
    if target is now:
        return []
    differ = [i for i in range(now.ndim) if now.dims[i] != want.dims[i]]
    swap = _swap(now, target, differ)
    if swap:
        return [swap]
    if all(_added(want.dims[i], now.dims[i]) for i in differ):
        return _gathers(now, want, differ)
    axes = {axis for i in differ for axis in now.axes_of(i)}
    return [Step("exchange", now.mesh.sorted_axes(axes), now, target)]


def _gathers(now: Layout, want: Layout, differ: list[int]) -> list[Step]:
    steps = []
    for i in differ:
        after = now.replace(dims=[*now.dims[:i], want.dims[i], *now.dims[i + 1 :]])
        steps.append(Step("all_gather", _added(want.dims[i], now.dims[i]), now, after, i))
        now = after
    return steps


def _swap(now: Layout, target: Layout, differ: list[int]) -> Step | None:
    """One axis, minor-most and even on one dim, becomes minor-most and even on another."""
    if len(differ) != 2:
        return None
    for source, goal in (differ, differ[::-1]):
        left, gained = _added(target.dims[source], now.dims[source]), _added(now.dims[goal], target.dims[goal])
        if left and left == gained and left == now.mesh.sorted_axes(left) and _even(now.dims[source], target.dims[goal]):
            return Step("all_to_all", left, now, target, source, goal)
    return None


def _even(*dims: Dim) -> bool:
    factors: list[Factor] = [factor for dim in dims for factor in dim]
    return all(min(f.sizes) == max(f.sizes) > 0 for f in factors)
