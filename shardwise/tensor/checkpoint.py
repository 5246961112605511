"""Storing a DTensor: what `torch.distributed.checkpoint`, pickle and readers of memory by address get. Knows nothing of files.

`torch.distributed.checkpoint` asks which boxes of the global tensor lie in this process, and where: read from a local value and
its layout, given as torch's own descriptions of chunks. torch writes and reads the files, each box by one of the ranks that
hold it, so a checkpoint can be loaded in any other layout and by any number of ranks. A pickle belongs to the rank that made
it, and those who write a tensor's memory by its address are refused.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.caches import memo
from ..comm import Bundle, transport
from ..errors import OperatorError, WorldError
from ..layouts.layout import Layout, PerRank

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

    >>> from ..layouts.from_placements import make_layout
    >>> from ..layouts.layout import Factor, Mesh, whole
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
    blocks = product(*map(_with_starts, runs))
    return tuple(Box(*zip(*block, strict=True)) if block else Box((), (), ()) for block in blocks)


def _with_starts(runs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Offset, size and local start of each run."""
    sizes = [stop - first for first, stop in runs]
    return [(first, size, sum(sizes[:i])) for i, ((first, _), size) in enumerate(zip(runs, sizes, strict=True))]


def held(local: Tensor, layout: Layout) -> list[tuple[Box, Tensor]]:
    """The boxes that lie in this process, each with the local tensor that it lies in: a rank's own, or all simulated ranks'."""
    if layout.partials:
        partials = " and ".join(f"Partial({kind}) over {axis}" for axis, kind in layout.partials)
        raise OperatorError(
            f"torch.distributed.checkpoint: {layout} is {partials}, so no rank holds its values; store "
            "x.redistribute(placements=x.layout.reduced()), and load into a tensor with Shard and Replicate placements only"
        )
    mesh, found = layout.mesh, list[tuple[Box, Tensor]]()
    if transport(mesh).place(mesh) < 0:
        return found

    def collect(shard: Tensor, place: int) -> None:
        _check_shard(shard, layout, place)
        found.extend((box, shard) for box in boxes(layout, place))

    transport(mesh).each(collect, mesh, local, PerRank(lambda place: place))
    if not layout.shape.numel():  # no rank holds an element, and the checkpoint must still know the tensor
        whole = Box((0,) * layout.ndim, tuple(layout.shape), (0,) * layout.ndim)
        found.append((whole, torch.empty(layout.shape, dtype=layout.dtype, device=layout.device)))
    return found


def write_items(local: Tensor, layout: Layout, name: str) -> list[Any]:
    """What this process can write of a tensor; torch picks one writer of each box that several processes hold."""
    metadata, planner = _module("metadata"), _module("planner")
    first = {box.offset: (box, shard) for box, shard in reversed(held(local, layout))}

    def item(box: Box, shard: Tensor) -> Any:
        properties = metadata.TensorProperties.create_from_tensor(shard)
        data = planner.TensorWriteData(chunk=_chunk(box), properties=properties, size=layout.shape)
        index = metadata.MetadataIndex(name, torch.Size(box.offset))
        return planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data)

    return [item(box, shard) for box, shard in first.values()]


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
    return _module("metadata").ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.sizes))


def _module(name: str) -> Any:
    """torch's descriptions: imported by whoever stores checkpoints, and a sixth of a second to import for whoever does not."""
    return importlib.import_module(f"torch.distributed.checkpoint.{name}")


# ── pickles and addresses ─────────────────────────────────────────────────────────────────────────────────────────────


def check_loaded(local: Tensor, layout: Layout, place: int) -> None:
    """Refuse what a pickle holds unless it is what this process holds of the tensor."""
    _check_place(layout, place)
    shards = local.shards if isinstance(local, Bundle) else (local,)
    places = range(len(layout.mesh.ranks)) if layout.mesh.world == "simulated" else (place,)
    if len(shards) != len(places):
        raise WorldError(
            f"loading {layout} on the mesh {layout.mesh}: it lies in {len(places)} shards, given are {len(shards)}"
        )
    for at, shard in zip(places, shards, strict=True):
        _check_shard(shard, layout, at)


def _check_place(layout: Layout, place: int) -> None:
    """Refuse another rank's shard. A rank may take another's place where both hold the same of the tensor."""
    mesh, job = layout.mesh, dist.is_initialized()
    if mesh.world == "simulated" or (not job and not layout.states):
        return
    if job and max(mesh.ranks) < dist.get_world_size() and _hold_the_same(layout, transport(mesh).place(mesh), place):
        return
    here = f"rank {dist.get_rank()} of {dist.get_world_size()}" if job else "a process without a job"
    held = "nothing" if place < 0 else f"what rank {mesh.ranks[place]} held"
    raise WorldError(
        f"loading {layout} on the mesh {mesh} of {len(mesh.ranks)} ranks: the file has {held} of it, and this is {here}; load "
        "it on the rank that saved it, in a job with such a mesh. For other jobs save whole tensors (x.full_tensor() on every "
        "rank, then torch.save on one), or use torch.distributed.checkpoint, which stores the shards of all ranks"
    )


def _hold_the_same(layout: Layout, own: int, place: int) -> bool:
    """Whether two places of a mesh hold the same of a tensor: they differ along axes that replicate it at most."""
    mesh, root = layout.mesh, layout.mesh.root
    alike = [i for i, axis in enumerate(root.axes) if axis in layout.states or axis not in mesh.axes]
    points = root.coordinates
    return own == place or (min(own, place) >= 0 and all(points[own][i] == points[place][i] for i in alike))


def _check_shard(shard: Tensor, layout: Layout, place: int) -> None:
    """Refuse a local tensor that is none of a layout: of a pickle that was changed, or of a promise that does not hold."""
    shape = layout.local_shape(max(place, 0))
    if tuple(shard.shape) != shape or shard.dtype != layout.dtype:
        raise OperatorError(
            f"{layout}: the rank at place {place} of mesh {layout.mesh} holds {layout.dtype} {list(shape)} of it, and here is "
            f"a tensor {shard.dtype} {list(shard.shape)}; give from_local the shards of that layout, or run_check=True"
        )


def refuser(name: str) -> Callable[..., NoReturn]:
    """A method that reads or writes a tensor by its address, as safetensors does: refused."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise OperatorError(
            f"{name}: the DTensor {self._layout} has no memory of its own, its shards lie on {self._layout.mesh.size()} ranks. "
            "To store it whole (safetensors, save_pretrained), take x.full_tensor() on every rank and write it on one: "
            "save_file({name: x.full_tensor()}, path), model.save_pretrained(path, state_dict=whole); to load it, "
            "model.load_state_dict(load_file(path)). torch.distributed.checkpoint stores the shards of all ranks, and "
            "x.to_local() is this rank's"
        )

    refused.__doc__ = "Refused: the memory of a DTensor is its ranks'."
    return refused


def for_torch(name: str) -> Callable[[Any], Any]:
    """A method that gives a tensor's memory to torch's own code, which asks whether it is shared; refused to others."""
    given, refused = getattr(Tensor, name), refuser(name)

    def method(self: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return given(self) if asker.partition(".")[0] in ("torch", "shardwise") else refused(self)

    method.__doc__ = refused.__doc__
    return method
