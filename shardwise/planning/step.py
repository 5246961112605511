"""Step: one move between two layouts. A noun; running one is `redistribute`'s work, choosing them is `search`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..layouts.layout import Layout
from .bounds import missing

#: Steps in which no data crosses ranks.
LOCAL = frozenset({"take", "split", "embed", "scale"})


@dataclass(frozen=True, slots=True)
class Step:
    """One move from the layout `before` to the layout `after`, over the ranks along `axes` (in the order of the root mesh).

    One collective each, in every group over `axes`:
    all_reduce      what is partial over `axes` is reduced
    reduce_scatter  the same, and `axes` then sharded dims (each at the minor end)
    all_gather      `axes` sharded dims (each at the minor end), and then no longer do
    all_to_all      `axes` sharded dims at their minor ends before and after, other dims or in another order, into equal shards
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

    @property
    def communicates(self) -> bool:
        """Whether data crosses ranks."""
        return self.kind not in LOCAL and (self.ranks > 1 if self.axes else self.bytes > 0)

    @property
    def ranks(self) -> int:
        """The number of ranks of one group."""
        return math.prod([self.before.mesh.axis_sizes[axis] for axis in self.axes])

    @property
    def bytes(self) -> int:
        """Bytes that the worst rank receives; uneven shards are gathered and scattered at the size of the largest."""
        n = self.ranks
        match self.kind:
            case "all_reduce":
                return 2 * self.before.nbytes * (n - 1) // n
            case "all_gather":
                return self.before.nbytes * (n - 1)
            case "reduce_scatter":
                return self.after.nbytes * (n - 1)
            case "all_to_all":
                return self.before.nbytes * (n - 1) // n
            case "permute" | "exchange" | "transfer":
                return missing(self.before, self.after)
        return 0

    def __str__(self) -> str:
        over = f" over {','.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{over}: {self.before} → {self.after}"
