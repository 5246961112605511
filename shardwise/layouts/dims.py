"""How the placements of mesh axes shard one dim, and which placements say how a dim is sharded.

Reads sizes and placements, gives factors, and back: what `shards_of` says of a dim, `dim_of` makes of it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import LayoutError
from .factor import Dim, Factor, Part, chunks, factors_of, parts_of, read_part, sharded, whole
from .mesh import Mesh
from .placement import Shard, StridedShard

#: The axes that shard a dim, each with its placement, in the order of the placements.
Shards = Sequence[tuple[str, Shard]]


def dim_of(size: int, shards: Shards, mesh: Mesh) -> list[Factor]:
    """The factors of a dim of a size that placements shard.

    >>> from .factor import canonical
    >>> mesh = Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated")
    >>> canonical(dim_of(8, [("dp", StridedShard(0, split_factor=2)), ("tp", Shard(0))], mesh))
    (Factor(size=8, axes=('tp', 'dp'), sizes=(2, 2, 2, 2)),)
    """
    strided = [shard for _, shard in shards if isinstance(shard, StridedShard)]
    if any(shard.parts for shard in strided):
        return _from_parts(size, shards, mesh)
    return _split(size, shards, mesh) if strided else [_nested(size, shards, mesh)]


def shards_of(index: int, dim: Dim, mesh: Mesh) -> dict[str, Shard]:
    """The placement of each axis that shards a dim, which is the tensor's dim number `index`."""
    parts, axes = parts_of(dim, mesh), [axis for factor in dim for axis in factor.axes]
    if len(parts) == 1 and axes == sorted(axes, key=mesh.axes.index):
        sizes = parts[0].sizes
        if sizes is None:
            return dict.fromkeys(axes, Shard(index))
        step = len(sizes) // mesh.axis_sizes[axes[0]]
        first = Shard(index, tuple(sum(sizes[i : i + step]) for i in range(0, len(sizes), step)))
        placed = {axis: Shard(index) for axis in axes} | {axes[0]: first}
        if _nested(dim[0].size, tuple(placed.items()), mesh).sizes == sizes:
            return placed
    if any(min(factor.sizes) != max(factor.sizes) for factor in dim):  # no other size is sharded like this
        parts = tuple(Part(f.axes, f.sizes if f.axes else None, f.size) for f in dim)
    return dict.fromkeys(axes, StridedShard(index, "*".join(part.text for part in parts)))


def size_of(local: int, shards: Shards, mesh: Mesh) -> int:
    """The size of a dim of which a rank has `local`, where all have as much or the placements say how much.

    >>> size_of(3, [("tp", Shard(0))], Mesh(("tp",), (2,), range(2), "cpu", "simulated"))
    6
    """
    for _, shard in shards:
        if isinstance(shard, StridedShard) and shard.parts:
            sizes = [part.size if part.sizes is None else sum(part.sizes) for part in map(read_part, shard.parts.split("*"))]
            return math.prod(n for n in sizes if n) if None not in sizes else local * _ranks(shards, mesh)
        if shard.sizes is not None:
            return sum(shard.sizes)
    return local * _ranks(shards, mesh)


def _ranks(shards: Shards, mesh: Mesh) -> int:
    return math.prod(mesh.axis_sizes[axis] for axis, _ in shards)


def _nested(size: int, shards: Shards, mesh: Mesh) -> Factor:
    """Axis after axis, the first major."""
    sizes: tuple[int, ...] = (size,)
    for position, (axis, shard) in enumerate(shards):
        if shard.sizes is None:
            sizes = tuple(part for n in sizes for part in chunks(n, mesh.axis_sizes[axis]))
        elif position:
            raise LayoutError(f"explicit sizes on axis {axis!r}: only the first axis on a dim can have them")
        elif len(shard.sizes) != mesh.axis_sizes[axis] or sum(shard.sizes) != size or min(shard.sizes) < 0:
            raise LayoutError(
                f"{shard} on axis {axis!r} needs {mesh.axis_sizes[axis]} sizes that add up to {size}, "
                f"got {len(shard.sizes)} that add up to {sum(shard.sizes)}"
            )
        else:
            sizes = shard.sizes
    return Factor(size, tuple(axis for axis, _ in shards), sizes)


def _from_parts(size: int, shards: Shards, mesh: Mesh) -> list[Factor]:
    """As the parts say, which every axis on the dim has to carry."""
    first = next(shard for _, shard in shards if isinstance(shard, StridedShard))
    parts = [read_part(text) for text in first.parts.split("*")]
    axes = [axis for part in parts for axis in part.axes]
    if any(shard != first for _, shard in shards) or sorted(axes) != sorted(axis for axis, _ in shards):
        raise LayoutError(
            f"{first} says how axes {', '.join(axes)} shard dim {first.dim} together, and stands on each of them; got "
            f"{', '.join(f'{axis}: {shard}' for axis, shard in shards)}; take all of `x.placements`, or `x.layout`"
        )
    rest = math.prod(part.size for part in parts[1:] if part.size is not None)
    factors = factors_of(parts, size, mesh) if rest and size % rest == 0 else []
    if not factors or not all(_fits(*pair, mesh) for pair in zip(parts, factors, strict=True)):
        raise LayoutError(
            f"{first} describes a dim of another size than {size}; the placements of one tensor fit tensors of its shape: use "
            f"Shard({first.dim}), or give a layout"
        )
    return factors


def _fits(part: Part, factor: Factor, mesh: Mesh) -> bool:
    ranks = math.prod(mesh.axis_sizes[axis] for axis in part.axes)
    return part.size in (None, factor.size) and sum(factor.sizes) == factor.size and len(factor.sizes) == ranks


def _split(size: int, shards: Shards, mesh: Mesh) -> list[Factor]:
    """Axis after axis, each on what a rank has so far: the factors that nothing shards yet."""
    dim = [whole(size)]
    for position, (axis, shard) in enumerate(shards):
        skip = shard.split_factor if isinstance(shard, StridedShard) else 1
        dim = _shard_behind(dim, skip, sharded(mesh.axis_sizes[axis], (axis,), mesh), position == len(shards) - 1)
        if not dim:
            raise LayoutError(
                f"{shard} on axis {axis!r}: a dim of {size} does not fall into {skip} equal stretches for each of "
                f"{mesh.axis_sizes[axis]} ranks; give the layout of a tensor that is sharded as you want (`x.layout`)"
            )
    return dim


def _shard_behind(dim: list[Factor], skip: int, by: Factor, last: bool) -> list[Factor]:
    """The factors with one more sharding: of what nothing shards yet, behind the first `skip`; none if that does not fit."""
    for place, factor in enumerate(dim):
        size = factor.size
        if factor.axes or (skip > 1 and skip % size == 0):
            skip = skip if factor.axes else skip // size
            continue
        rows, (rest, odd) = size // skip, divmod(size // skip, by.size)
        if size % skip or (odd and not last):
            return []
        inner = [Factor(rows, by.axes, tuple(chunks(rows, by.size)))] if odd else [by, whole(rest)]
        return [*dim[:place], whole(skip), *inner, *dim[place + 1 :]]
    return []
