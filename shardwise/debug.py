"""`CommDebugMode`, `visualize_sharding`: as in `torch.distributed.tensor.debug`, on the log of `trace_comm` and on layouts."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch

from .base.argument_checks import flag, instance
from .comm import Log, trace_comm, transport
from .errors import OperatorError
from .layouts.layout import Layout
from .tensor.dtensor import DTensor

__all__ = ["CommDebugMode", "visualize_sharding"]

_functional = torch.ops.c10d_functional
#: By which operator torch counts a collective of ours; messages between two ranks go by our own word.
_OPERATORS: dict[str, Any] = {
    "all_reduce": _functional.all_reduce,
    "all_gather": _functional.all_gather_into_tensor,
    "reduce_scatter": _functional.reduce_scatter_tensor,
    "all_to_all": _functional.all_to_all_single,
    "broadcast": _functional.broadcast,
    "shapes": _functional.all_gather_into_tensor,
}


class CommDebugMode:
    """Counts the collectives of a `with` block, by the operators that torch counts them by.

    >>> import shardwise as sw
    >>> x = sw.ones(4, 4, mesh=sw.init_mesh(tp=2), placements=[sw.Shard(0)])
    >>> with CommDebugMode() as mode:
    ...     y = x.full_tensor()
    >>> mode.get_total_counts(), mode.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
    (1, 1)
    """

    def __init__(self) -> None:
        #: The collectives of the last block: what each was, of how many bytes, for which operator, from which line.
        self.log = Log()
        self._blocks: list[ExitStack] = []

    @property
    def comm_counts(self) -> Counter[Any]:
        """How often each operator was called; 0 for those that were not."""
        return Counter(_OPERATORS.get(record.kind, record.kind) for record in self.log.records)

    def get_comm_counts(self) -> Counter[Any]:
        """How often each operator was called; 0 for those that were not."""
        return self.comm_counts

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return len(self.log.records)

    def generate_comm_debug_tracing_table(self) -> str:
        """The collectives as a table: kind, axes, bytes, operator and line of each."""
        return str(self.log)

    def __enter__(self) -> CommDebugMode:
        self._blocks.append(ExitStack())
        self.log = self._blocks[-1].enter_context(trace_comm())
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.pop().close()

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds what of a tensor of one or two dims; on processes the first rank of the mesh prints. There is one
    picture, in plain text, with `use_rich` or without.

    >>> import shardwise as sw
    >>> visualize_sharding(sw.ones(4, 6, mesh=sw.init_mesh(dp=2, tp=2), placements=[sw.Shard(0), sw.Shard(1)]))
             Col 0-2  Col 3-5
    Row 0-1  cpu:0    cpu:1
    Row 2-3  cpu:2    cpu:3
    """
    instance(dtensor, DTensor, "visualize_sharding: dtensor", "a DTensor")
    flag(use_rich, "visualize_sharding: use_rich")
    instance(header, str, "visualize_sharding: header", "a text")
    layout: Layout = dtensor._layout
    if not 1 <= layout.ndim <= 2:
        raise OperatorError(f"visualize_sharding draws tensors of one or two dims, got {layout}; take a slice of it")
    if dtensor.numel() and transport(layout.mesh).place(layout.mesh) == 0:
        print("\n".join([*([header] if header else []), *_picture(layout)]))


def _picture(layout: Layout) -> list[str]:
    """A line for each different set of rows, with the ranks that hold them of each set of columns."""
    cells: dict[str, dict[str, list[str]]] = {}
    columns: dict[str, None] = {}
    for place, rank in enumerate(layout.mesh.root.ranks):
        held = [layout.runs(dim, place) for dim in range(layout.ndim)]
        if not all(held):
            continue
        row, column = _label("Row", held[0]), _label("Col", held[1] if layout.ndim > 1 else [(0, 1)])
        columns[column] = None
        cells.setdefault(row, {}).setdefault(column, []).append(f"{layout.mesh.device_type}:{rank}")
    order = sorted(columns, key=_first)
    table = [["", *order]]
    table += [[row, *(", ".join(cells[row].get(column, [])) for column in order)] for row in sorted(cells, key=_first)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _label(word: str, runs: list[tuple[int, int]]) -> str:
    return f"{word} " + "+".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in runs)


def _first(label: str) -> int:
    return int(label.split(" ")[1].split("+")[0].split("-")[0])
