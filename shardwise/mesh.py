"""Mesh: named axes over ranks. Frozen and interned: equal meshes are one object. Knows no process group.

A *place* is a position in the root mesh's list of ranks; what a rank holds is a function of its place.

>>> mesh = Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated")
>>> mesh["tp"], mesh.coordinate(3), mesh.size
(Mesh(tp=2), (1, 1), 4)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from .errors import MeshError

_meshes: dict[tuple[Any, ...], Mesh] = {}


class Mesh:
    """Named axes over ranks; a sub-mesh (`mesh["tp"]`) keeps its root and names some of its axes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    device: str
    world: str
    root: Mesh

    def __new__(
        cls,
        axes: Iterable[str],
        sizes: Iterable[int],
        ranks: Iterable[int],
        device: str,
        world: str,
        of: Mesh | None = None,
    ) -> Mesh:
        content = (tuple(axes), tuple(int(n) for n in sizes), tuple(int(r) for r in ranks), device, world, of)
        if content not in _meshes:
            _check(content[0], content[1], content[2] if of is None else None)
            self = super().__new__(cls)
            self.axes, self.sizes, self.ranks, self.device, self.world = content[:5]
            self.root = self if of is None else of
            _meshes[content] = self
        return _meshes[content]

    @staticmethod
    def from_torch(device_mesh: Any) -> Mesh:
        """The same axes over the same ranks as a torch `DeviceMesh`; a slice of one keeps its root."""
        if isinstance(device_mesh, Mesh):
            return device_mesh
        if not hasattr(device_mesh, "mesh_dim_names"):
            raise MeshError(f"a mesh is a shardwise.Mesh or a torch DeviceMesh, got {type(device_mesh).__name__}")
        root = device_mesh._get_root_mesh() if hasattr(device_mesh, "_get_root_mesh") else device_mesh
        names = device_mesh.mesh_dim_names
        if root is not device_mesh and names and set(names) <= set(root.mesh_dim_names or ()):
            return Mesh.from_torch(root)[tuple(names)]
        grid = device_mesh.mesh
        names = names or tuple(f"dim{i}" for i in range(grid.ndim))
        return Mesh(names, grid.shape, grid.flatten().tolist(), device_mesh.device_type, "processes")

    @cached_property
    def shape(self) -> dict[str, int]:
        """Size of each axis by name, in order."""
        return dict(zip(self.axes, self.sizes, strict=True))

    @cached_property
    def size(self) -> int:
        """The number of ranks one tensor on this mesh is spread over."""
        return math.prod(self.sizes)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.axes)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of axes, sizes, ranks and device: the same in every process."""
        content = (self.root.axes, self.root.sizes, self.root.ranks, self.device, self.axes)
        return hashlib.blake2b(repr(content).encode(), digest_size=6).hexdigest()

    def alias(self, axes: tuple[str, ...]) -> str:
        """The name, equal on every rank, of the process group over `axes`."""
        return f"sw:{self.root.fingerprint}:{','.join(axes)}"

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            self.size_of(name)
        if names == self.root.axes:
            return self.root
        sizes = (self.shape[name] for name in names)
        return Mesh(names, sizes, self.ranks, self.device, self.world, self.root)

    def size_of(self, axis: str) -> int:
        """The size of one axis."""
        try:
            return self.shape[axis]
        except KeyError:
            raise MeshError(f"mesh {self} has no axis {axis!r}; its axes are {', '.join(self.axes)}") from None

    def place(self, rank: int) -> int | None:
        """Where `rank` stands in the root's list of ranks, or None if it does not take part."""
        return self._places.get(rank)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of `rank` along this mesh's axes, or None if it does not take part."""
        place = self.place(rank)
        return None if place is None else self.coordinates[place]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """For each place of the root, the coordinate along this mesh's axes."""
        keep = [self.root.axes.index(axis) for axis in self.axes]
        every = product(*(range(n) for n in self.root.sizes))
        return tuple(tuple(point[i] for i in keep) for point in every)

    def peers(self, place: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The places that differ from `place` along `axes` only, the first of `axes` varying slowest."""
        return _peers(self.root, place, axes)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of places over `axes`."""
        return tuple(dict.fromkeys(_peers(self.root, place, axes) for place in range(len(self.ranks))))

    def sorted_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes in the order of the root mesh."""
        return tuple(sorted(set(axes), key=self.root.axes.index))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{a}={n}' for a, n in self.shape.items())})"

    def __str__(self) -> str:
        return repr(self)[len("Mesh") :]

    def __reduce__(self) -> tuple[Any, ...]:
        of = None if self.root is self else self.root
        return Mesh, (self.axes, self.sizes, self.ranks, self.device, self.world, of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self


@lru_cache(maxsize=16384)
def _peers(root: Mesh, place: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    here, moving = root.coordinates[place], [root.axes.index(axis) for axis in axes]
    found = []
    for point in product(*(range(root.sizes[i]) for i in moving)):
        there = list(here)
        for i, value in zip(moving, point, strict=True):
            there[i] = value
        found.append(_ravel(there, root.sizes))
    return tuple(found)


def _ravel(point: list[int], sizes: tuple[int, ...]) -> int:
    place = 0
    for value, size in zip(point, sizes, strict=True):
        place = place * size + value
    return place


def _check(axes: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...] | None) -> None:
    if not axes:
        raise MeshError("a mesh has at least one axis, e.g. sw.init_mesh(dp=2)")
    if len(set(axes)) != len(axes):
        raise MeshError(f"axis names must differ, got {axes}")
    if len(axes) != len(sizes) or any(n < 1 for n in sizes):
        raise MeshError(f"each axis has one positive size, got axes {axes} and sizes {sizes}")
    if ranks is not None and (len(ranks) != math.prod(sizes) or len(set(ranks)) != len(ranks)):
        raise MeshError(f"a mesh of sizes {sizes} takes {math.prod(sizes)} different ranks, got {len(ranks)}")
