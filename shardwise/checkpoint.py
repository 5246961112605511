"""What `torch.distributed.checkpoint` asks of a DTensor: which boxes of the global tensor lie in this process, and where.

Reads a local value and its layout, gives torch's own descriptions of chunks. Knows nothing of files: torch writes and reads
them, each box by one of the ranks that hold it, so a checkpoint can be loaded in any other layout and by any number of ranks.
"""

from __future__ import annotations

import importlib
import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .comm import door
from .errors import OperatorError
from .layout import Layout, PerRank
from .memo import memo

#: A shard in more separate boxes than this is refused: each would be an entry of its own in the checkpoint's metadata.
_MOST_BOXES = 1024


class Box(NamedTuple):
    """A block of consecutive indices along every dim, and where it starts in what its rank holds."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]


@memo("boxes", limit=1024)
def boxes(layout: Layout, place: int) -> tuple[Box, ...]:
    """The boxes of the global tensor that the rank at a place of the root mesh holds; none where it holds no elements.

    >>> from .layout import Factor, Mesh, make_layout, whole
    >>> mesh = Mesh(("tp",), (2,), range(2), "cpu", "simulated")
    >>> strided = Layout.of(mesh, [[whole(2), Factor(4, ("tp",), (2, 2))]])
    >>> boxes(strided, 1)
    (Box(offset=(2,), sizes=(2,), start=(0,)), Box(offset=(6,), sizes=(2,), start=(2,)))
    """
    runs = [layout.runs(dim, place) for dim in range(layout.ndim)]
    count = math.prod(map(len, runs))
    if count > _MOST_BOXES:
        raise OperatorError(
            f"torch.distributed.checkpoint: a rank's shard of {layout} lies in {count} separate boxes of the tensor, of which "
            f"at most {_MOST_BOXES} are stored; redistribute it to plain Shard placements first"
        )
    found = []
    for block in product(*(_with_starts(each) for each in runs)):
        found.append(Box(*(tuple(column) for column in zip(*block, strict=True))) if block else Box((), (), ()))
    return tuple(found)


def _with_starts(runs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Offset, size and local start of each run."""
    found, start = [], 0
    for first, stop in runs:
        found.append((first, stop - first, start))
        start += stop - first
    return found


def held(local: Tensor, layout: Layout) -> list[tuple[Box, Tensor]]:
    """The boxes that lie in this process, each with the local tensor that it lies in: a rank's own, or all simulated ranks'."""
    if layout.partials:
        pending = " and ".join(f"a {kind} over {axis}" for axis, kind in layout.partials)
        raise OperatorError(
            f"torch.distributed.checkpoint: {layout} is pending {pending}, so no rank holds its values; store "
            "x.redistribute(placements=x.layout.reduced()), and load into a tensor with Shard and Replicate placements only"
        )
    mesh, found = layout.mesh, list[tuple[Box, Tensor]]()
    if door(mesh).place(mesh) < 0:
        return found

    def collect(piece: Tensor, place: int) -> None:
        found.extend((box, piece) for box in boxes(layout, place))

    door(mesh).each(collect, mesh, local, PerRank(lambda place: place))
    if not layout.shape.numel():  # no rank holds an element, and the checkpoint must still know the tensor
        whole = Box((0,) * layout.ndim, tuple(layout.shape), (0,) * layout.ndim)
        found.append((whole, torch.empty(layout.shape, dtype=layout.dtype, device=layout.device)))
    return found


def write_items(local: Tensor, layout: Layout, name: str) -> list[Any]:
    """What this process can write of a tensor; torch picks one writer of each box that several processes hold."""
    metadata, planner = _modules()
    first = {box.offset: (box, piece) for box, piece in reversed(held(local, layout))}
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(name, torch.Size(box.offset)),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(
                chunk=_chunk(box),
                properties=metadata.TensorProperties.create_from_tensor(piece),
                size=layout.shape,
            ),
        )
        for box, piece in first.values()
    ]


def chunk_list(local: Tensor, layout: Layout) -> list[Any]:
    """What this process wants to read of a tensor: every box that it holds."""
    return [_chunk(box) for box, _ in held(local, layout)]


def shard_of(local: Tensor, layout: Layout, index: Any) -> Tensor:
    """The box that torch asks for, as a view of the local tensor: by its position in `chunk_list`, else by its offset."""
    found = held(local, layout)
    hint = index.index
    if hint is None or hint >= len(found) or found[hint][0].offset != tuple(index.offset):
        hint = next((i for i, (box, _) in enumerate(found) if box.offset == tuple(index.offset)), None)
    if hint is None:
        raise OperatorError(
            f"torch.distributed.checkpoint asks for the shard of {layout} at {list(index.offset)} of {index.fqn!r}; this rank "
            f"holds those at {[list(box.offset) for box, _ in found]}"
        )
    box, view = found[hint]
    for dim, (start, size) in enumerate(zip(box.start, box.sizes, strict=True)):
        view = view.narrow(dim, start, size)
    return view


def _chunk(box: Box) -> Any:
    metadata, _ = _modules()
    return metadata.ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.sizes))


def _modules() -> tuple[Any, Any]:
    """torch's descriptions: imported by whoever stores checkpoints, and a sixth of a second to import for whoever does not."""
    return tuple(importlib.import_module(f"torch.distributed.checkpoint.{name}") for name in ("metadata", "planner"))  # type: ignore[return-value]
