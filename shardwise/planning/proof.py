"""prove(steps, have, want): interprets steps on index sets and raises unless they denote the target. Pure.

It reads what each rank holds before and after a step, dim by dim, and asks whether the step's kind can bring that about:
whether what a rank ends with was its own, or in its group, or summed from all summands. It knows nothing of how steps are
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

from ..errors import PlanError
from ..layouts.factor import joined
from ..layouts.layout import Layout, Run, shard_runs
from .step import Step

Point = dict[str, int]


def prove(steps: tuple[Step, ...], have: Layout, want: Layout) -> None:
    """Raise unless the steps lead from `have` to `want`, each by what its kind does."""
    now = have
    for step in steps:
        if step.before is not now:
            raise PlanError(f"{step} does not start from {now}, where the step before ended; this is an error in the planner")
        if not _MEANING[step.kind](step):
            raise PlanError(f"{step} does not denote its target; this is an error in the planner")
        now = step.after
    if now is not want:
        raise PlanError(f"the steps from {have} end in {now}, not in {want}; this is an error in the planner")


# ── what ranks hold of one dim ────────────────────────────────────────────────────────────────────────────────────────


def _points(layout: Layout, axes: set[str]) -> Iterator[Point]:
    """The coordinates along some axes."""
    names = layout.mesh.sorted_axes(axes)
    for values in product(*(range(layout.mesh.axis_sizes[axis]) for axis in names)):
        yield dict(zip(names, values, strict=True))


def _held(layout: Layout, dim: int, at: Point) -> list[Run]:
    """What the ranks at a coordinate hold of a dim."""
    factors, sizes, shards = layout.dims[dim], layout.mesh.axis_sizes, []
    for factor in factors:
        index = 0
        for axis in factor.axes:
            index = index * sizes[axis] + at[axis]
        shards.append(index)
    return shard_runs(factors, shards)


def _inside(part: list[Run], of: list[Run]) -> bool:
    return all(any(start <= low and high <= stop for start, stop in of) for low, high in part)


def _pooled(layout: Layout, dim: int, axes: tuple[str, ...]) -> Callable[[Point], list[Run]]:
    """What each group over `axes` holds of a dim together; a shard that two of a group hold counts as an error."""
    sharding = set(layout.axes_of(dim))
    kept = layout.mesh.sorted_axes(sharding.difference(axes))
    found: dict[tuple[int, ...], list[Run]] = {}
    for at in _points(layout, sharding):
        found.setdefault(tuple([at[axis] for axis in kept]), []).extend(_held(layout, dim, at))
    for key, runs in found.items():
        runs.sort()
        if any(start < stop for (_, stop), (start, _) in pairwise(runs)):
            raise PlanError(f"{layout}: two ranks of a group over {axes} hold the same part of dim {dim}")
        found[key] = joined(runs)
    return lambda at: found[tuple(at[axis] for axis in kept)]


def _shrinks(step: Step, dim: int) -> bool:
    """Whether each rank ends with a part of what it held."""
    before, after = step.before, step.after
    axes = {*before.axes_of(dim), *after.axes_of(dim)}
    return all(_inside(_held(after, dim, at), _held(before, dim, at)) for at in _points(before, axes))


def _grows(step: Step, dim: int) -> bool:
    """Whether each rank ends with exactly what its group held together."""
    pooled = _pooled(step.before, dim, step.axes)
    axes = set(step.before.axes_of(dim)).difference(step.axes)
    is_kept = axes == set(step.after.axes_of(dim))
    return is_kept and all(_held(step.after, dim, at) == pooled(at) for at in _points(step.before, axes))


def _comes_from_group(step: Step, dim: int) -> bool:
    """Whether each rank ends with a part of what its group held together."""
    pooled = _pooled(step.before, dim, step.axes)
    axes = set(step.before.axes_of(dim)).difference(step.axes) | set(step.after.axes_of(dim))
    return all(_inside(_held(step.after, dim, at), pooled(at)) for at in _points(step.before, axes))


# ── what each kind of step does ───────────────────────────────────────────────────────────────────────────────────────


def _changed(step: Step) -> list[int]:
    return [i for i in range(step.before.ndim) if step.before.dims[i] != step.after.dims[i]]


def _every_dim(step: Step, holds: Callable[[Step, int], bool]) -> bool:
    """Whether something holds of every dim that a step shards otherwise."""
    return all(holds(step, dim) for dim in _changed(step))


def _partial_over(step: Step, gone: bool = False, come: bool = False) -> bool:
    """Whether exactly the step's axes stop or start being partial; if neither, that nothing partial changes."""
    before, after = dict(step.before.partials), dict(step.after.partials)
    changed = {axis for axis in {**before, **after} if before.get(axis) != after.get(axis)}
    if not gone and not come:
        return not changed and not any(axis in before for axis in step.axes)
    source, other = (before, after) if gone else (after, before)
    kinds = {source.get(axis) for axis in step.axes}
    is_of_step = changed == set(step.axes) and changed.isdisjoint(other)
    return is_of_step and (len(kinds) == 1 or kinds <= {"sum", "avg"})


def _reduce_scatter(step: Step) -> bool:
    before, after = ({axis for dim in _changed(step) for axis in end.axes_of(dim)} for end in (step.before, step.after))
    return after - before == set(step.axes) and _partial_over(step, gone=True) and _every_dim(step, _shrinks)


def _exchange(step: Step) -> bool:
    return _partial_over(step) and _every_dim(step, _comes_from_group)


def _all_to_all(step: Step) -> bool:
    """An exchange of equal shards: each dim only gains axes or only loses some, into shards of one size."""
    for i in _changed(step):
        one, other = sorted((step.before.dims[i], step.after.dims[i]), key=lambda dim: len(dim[0].axes))
        if len(one) + len(other) > 2 or other[0].axes[: len(one[0].axes)] != one[0].axes:
            return False
        if any(min(dim[0].sizes) != max(dim[0].sizes) for dim in (one, other)):
            return False
    return _exchange(step)


def _permute(step: Step) -> bool:
    """Each rank ends with a shard that some rank of its group held, and no shard is wanted by more ranks than held it."""
    pairs = zip(step.before.dims, step.after.dims, strict=True)
    sharding = {a for layout in (step.before, step.after) for i in _changed(step) for a in layout.axes_of(i)}
    same_sizes = all([f.sizes for f in one] == [f.sizes for f in other] for one, other in pairs)
    return _partial_over(step) and sharding == set(step.axes) and same_sizes


def _split(step: Step) -> bool:
    return not _changed(step) and _partial_over(step, come=True) and step.before.states.keys().isdisjoint(step.axes)


def _scale(step: Step) -> bool:
    before, after = dict(step.before.partials), dict(step.after.partials)
    changed = {axis for axis in before if before[axis] != after.get(axis)}
    kinds = {kind for axis in changed for kind in (before[axis], after.get(axis))}
    return not _changed(step) and changed == set(step.axes) and before.keys() == after.keys() and kinds <= {"sum", "avg"}


_MEANING: dict[str, Callable[[Step], bool]] = {
    "all_reduce": lambda step: not _changed(step) and _partial_over(step, gone=True),
    "reduce_scatter": _reduce_scatter,
    "all_gather": lambda step: _partial_over(step) and _every_dim(step, _grows),
    "all_to_all": _all_to_all,
    "permute": _permute,
    "exchange": _exchange,
    # every layout holds the whole tensor somewhere, so a move from one mesh to another may ask for any part of it
    "transfer": lambda step: not step.before.partials and not step.after.partials,
    "take": lambda step: step.before.partials == step.after.partials and _every_dim(step, _shrinks),
    "split": _split,
    "embed": lambda step: _partial_over(step, come=True) and _every_dim(step, _grows),
    "scale": _scale,
}
