"""prove(steps, have, want): interprets steps on index sets and raises unless they denote the target. Pure.

It reads what each rank holds before and after a step, dim by dim, and asks whether the step's kind can bring that about:
whether what a rank ends with was its own, or in its group, or summed from all summands. It knows nothing of how steps are
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from ..errors import PlanError
from ..layouts.layout import Layout, Run, shard_runs
from .step import Step

Point = dict[str, int]


def prove(steps: tuple[Step, ...], have: Layout, want: Layout) -> None:
    """Raise unless the steps lead from `have` to `want`, each by what its kind does."""
    now = have
    for step in steps:
        if step.before is not now:
            raise PlanError(
                f"{step} does not start from {now}, where the step before it ended; this is an error in the planner"
            )
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


def _held(layout: Layout, dim: int) -> Callable[[Point], list[Run]]:
    """What the ranks at a coordinate hold of a dim."""
    factors, shape = layout.dims[dim], layout.mesh.axis_sizes

    def at_point(at: Point) -> list[Run]:
        shards = []
        for factor in factors:
            index = 0
            for axis in factor.axes:
                index = index * shape[axis] + at[axis]
            shards.append(index)
        return shard_runs(factors, shards)

    return at_point


def _inside(part: list[Run], of: list[Run]) -> bool:
    return all(any(start <= low and high <= stop for start, stop in of) for low, high in part)


def _pooled(layout: Layout, dim: int, axes: tuple[str, ...]) -> Callable[[Point], list[Run]]:
    """What each group over `axes` holds of a dim together; a shard that two of a group hold counts as an error."""
    sharding = set(layout.axes_of(dim))
    kept = layout.mesh.sorted_axes(sharding.difference(axes))
    found: dict[tuple[int, ...], list[Run]] = {}
    held = _held(layout, dim)
    for at in _points(layout, sharding):
        found.setdefault(tuple([at[axis] for axis in kept]), []).extend(held(at))
    for key, runs in found.items():
        merged: list[Run] = []
        for start, stop in sorted(runs):
            if merged and start < merged[-1][1]:
                raise PlanError(f"{layout}: two ranks of a group over {axes} hold the same part of dim {dim}")
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        found[key] = merged
    return lambda at: found[tuple(at[axis] for axis in kept)]


def _every_dim(step: Step, holds: Callable[[int], bool]) -> bool:
    """Whether something holds of every dim that a step shards otherwise."""
    return all(map(holds, _changed(step)))


def _shrinks(step: Step, dim: int) -> bool:
    """Whether each rank ends with a part of what it held."""
    before, after = step.before, step.after
    axes = {*before.axes_of(dim), *after.axes_of(dim)}
    ends, starts = _held(after, dim), _held(before, dim)
    return all(_inside(ends(at), starts(at)) for at in _points(before, axes))


def _grows(step: Step, dim: int) -> bool:
    """Whether each rank ends with exactly what its group held together."""
    pooled = _pooled(step.before, dim, step.axes)
    axes = set(step.before.axes_of(dim)).difference(step.axes)
    if axes != set(step.after.axes_of(dim)):
        return False
    held = _held(step.after, dim)
    return all(held(at) == pooled(at) for at in _points(step.before, axes))


def _comes_from_group(step: Step, dim: int) -> bool:
    """Whether each rank ends with a part of what its group held together."""
    pooled = _pooled(step.before, dim, step.axes)
    axes = set(step.before.axes_of(dim)).difference(step.axes) | set(step.after.axes_of(dim))
    held = _held(step.after, dim)
    return all(_inside(held(at), pooled(at)) for at in _points(step.before, axes))


# ── what each kind of step does ───────────────────────────────────────────────────────────────────────────────────────


def _partial_over(step: Step, gone: bool = False, come: bool = False) -> bool:
    """Whether exactly the step's axes stop or start being partial; if neither, that nothing partial changes."""
    before, after = dict(step.before.partials), dict(step.after.partials)
    changed = {axis for axis in {**before, **after} if before.get(axis) != after.get(axis)}
    if not gone and not come:
        return not changed and not any(axis in before for axis in step.axes)
    source = before if gone else after
    other = after if gone else before
    kinds = {source.get(axis) for axis in step.axes}
    return (
        changed == set(step.axes)
        and not any(axis in other for axis in changed)
        and (len(kinds) == 1 or kinds <= {"sum", "avg"})
    )


def _all_reduce(step: Step) -> bool:
    return not _changed(step) and _partial_over(step, gone=True)


def _reduce_scatter(step: Step) -> bool:
    added = {axis for dim in _changed(step) for axis in step.after.axes_of(dim)}
    added -= {axis for dim in _changed(step) for axis in step.before.axes_of(dim)}
    return added == set(step.axes) and _partial_over(step, gone=True) and _every_dim(step, lambda dim: _shrinks(step, dim))


def _all_gather(step: Step) -> bool:
    return _partial_over(step) and _every_dim(step, lambda dim: _grows(step, dim))


def _exchange(step: Step) -> bool:
    return _partial_over(step) and _every_dim(step, lambda dim: _comes_from_group(step, dim))


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
    if not _partial_over(step):
        return False
    pairs = zip(step.before.dims, step.after.dims, strict=True)
    sharding = {a for layout in (step.before, step.after) for i in _changed(step) for a in layout.axes_of(i)}
    return sharding == set(step.axes) and all([f.sizes for f in one] == [f.sizes for f in other] for one, other in pairs)


def _changed(step: Step) -> list[int]:
    return [i for i in range(step.before.ndim) if step.before.dims[i] != step.after.dims[i]]


def _take(step: Step) -> bool:
    return step.before.partials == step.after.partials and _every_dim(step, lambda dim: _shrinks(step, dim))


def _split(step: Step) -> bool:
    return not _changed(step) and _partial_over(step, come=True) and not any(axis in step.before.states for axis in step.axes)


def _embed(step: Step) -> bool:
    return _partial_over(step, come=True) and _every_dim(step, lambda dim: _grows(step, dim))


def _scale(step: Step) -> bool:
    before, after = dict(step.before.partials), dict(step.after.partials)
    changed = {axis for axis in before if before[axis] != after.get(axis)}
    kinds = {kind for axis in changed for kind in (before[axis], after.get(axis))}
    return not _changed(step) and changed == set(step.axes) and before.keys() == after.keys() and kinds <= {"sum", "avg"}


def _transfer(step: Step) -> bool:
    """Every layout holds the whole tensor somewhere, so a move from one mesh to another may ask for any part of it."""
    return not step.before.partials and not step.after.partials


_MEANING: dict[str, Callable[[Step], bool]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "exchange": _exchange,
    "transfer": _transfer,
    "take": _take,
    "split": _split,
    "embed": _embed,
    "scale": _scale,
}
