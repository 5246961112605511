"""Step: one collective or local move between two layouts. `search` chooses steps, `redistribution` runs them.

Steps are interned as long as someone holds them, and what is worked out for one is kept with it (`per_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..base.caches import intern
from ..layouts.layout import Layout
from .bounds import missing
from .cost import received

#: Steps in which no data crosses ranks.
LOCAL = frozenset({"take", "split", "embed", "scale"})
T = TypeVar("T")


@dataclass(frozen=True, init=False, eq=False)
class Step:
    """One move from the layout `before` to the layout `after`, over the ranks along `axes` (in the order of the root mesh).

    One collective each, in every group over `axes`:
    all_reduce      what is partial over `axes` is reduced
    reduce_scatter  the same, and `axes` then shard dims (each at the minor end)
    all_gather      `axes` shard dims before (each at the minor end), and none after
    all_to_all      `axes` shard dims at their minor ends before and after, other dims or in another order, into equal shards
    permute         every rank gives its whole shard to one rank, since the same shards lie elsewhere afterwards
    exchange        any layout to any other: every rank gets from each of its group what it lacks; `axes` shard `before`, so no
                    two of a group hold the same
    transfer        the same from one mesh to another; `axes` is empty

    Local:
    take            keep a part of what the rank holds
    split           replicated becomes partial: one rank keeps the value, or all do where the kind allows it
    embed           shard becomes partial: a rank's shard among identities
    scale           a partial sum becomes a partial average, or the reverse
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout = field(repr=False)
    after: Layout = field(repr=False)

    def __new__(cls, kind: str, axes: tuple[str, ...], before: Layout, after: Layout) -> Step:
        """The one step of these facts; one with symbolic sizes, which have no hash, is made anew."""
        content = (kind, axes, before, after)
        try:
            found = _steps.get(content)
        except TypeError:
            return _build(content)
        return found or intern(_steps, content, lambda: _build(content))

    def __reduce__(self) -> tuple[Any, ...]:
        return Step, (self.kind, self.axes, self.before, self.after)

    @cached_property
    def communicates(self) -> bool:
        """Whether data crosses ranks."""
        return self.kind not in LOCAL and (self.ranks > 1 if self.axes else self.bytes > 0)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks of one group."""
        return math.prod([self.before.mesh.axis_sizes[axis] for axis in self.axes])

    @cached_property
    def bytes(self) -> int:
        """Bytes that the worst rank receives; uneven shards are gathered and scattered at the size of the largest."""
        match self.kind:
            case "all_reduce" | "all_gather" | "all_to_all":
                return int(received(self.kind, self.before.nbytes, self.ranks))
            case "reduce_scatter":
                return int(received(self.kind, self.after.nbytes * self.ranks, self.ranks))
            case "permute" | "exchange" | "transfer":
                return missing(self.before, self.after)
        return 0

    def __str__(self) -> str:
        over = f" over {','.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{over}: {self.before} → {self.after}"


_steps: WeakValueDictionary[tuple[Any, ...], Step] = WeakValueDictionary()


def _build(content: tuple[Any, ...]) -> Step:
    step = object.__new__(Step)
    vars(step).update(zip(("kind", "axes", "before", "after"), content, strict=True))
    return step


def per_step(function: Callable[[Step], T]) -> Callable[[Step], T]:
    """Work out a pure function once for each step: what it gives is kept with the step, and ends with it.

    >>> from shardwise import Mesh, Replicate, Shard, layout
    >>> mesh = Mesh(("a",), (4,), range(4), "cpu", "simulated")
    >>> step = Step("all_gather", ("a",), layout((8,), mesh, [Shard(0)]), layout((8,), mesh, [Replicate()]))
    >>> @per_step
    ... def facts(step): return [step.kind]
    >>> facts(step) is facts(step)
    True
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def remembered(step: Step) -> T:
        facts = vars(step)
        if key not in facts:
            facts[key] = function(step)
        return facts[key]

    return remembered
