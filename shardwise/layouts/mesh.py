"""Mesh: named axes over ranks. Frozen and interned: equal meshes are one object. Makes no process group.

A *place* is a position in the root mesh's list of ranks; what a rank holds is a function of its place.

>>> mesh = Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated")
>>> mesh["tp"], mesh.coordinate(3), mesh.size()
(Mesh(tp=2), (1, 1), 4)
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from typing import Any, cast
from urllib.parse import quote as _quote
from urllib.parse import unquote
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.compiler import OpaqueBaseMeta, constant_type
from .._torch.groups import current_device_mesh
from .._torch.patches import install_patches
from ..base.argument_checks import a_device, a_text, choice, instance, integer, integers, optional, refuse, several, shown
from ..base.caches import CHOICES, cache_clear, intern, memo
from ..base.process_groups import group_over
from ..base.settings import Setting
from ..errors import MeshError

_meshes: WeakValueDictionary[tuple[Any, ...], Mesh] = WeakValueDictionary()
#: The mesh whose `with` block this is in.
_current: Setting[Mesh | None] = Setting("mesh", None, reaches_threads=True)
#: The values of `groups=`, by whether groups over several axes must be made explicitly.
_GROUPS = ("auto", "explicit")
#: More ranks than any job has: a number of ranks above this is a mistake, and counting them would take long.
MOST_RANKS = 2**20


def root_meshes() -> tuple[Mesh, ...]:
    """The meshes of this process that someone holds, without their sub-meshes."""
    held = [found() for found in _meshes.valuerefs()]  # at once: another thread may make one meanwhile
    return tuple(mesh for mesh in held if mesh is not None and mesh.root is mesh)


def group_named(alias: str) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of processes, and its axes, whose group goes by the name that `Mesh.alias` gives."""
    _, fingerprint, names = alias.split(":", 2)
    mesh = next(mesh for mesh in root_meshes() if mesh.fingerprint == fingerprint and mesh.world == "processes")
    return mesh, tuple(names.split(","))


def chosen(mesh: Mesh | Any = None) -> Mesh:
    """The mesh that is meant: the given one, or the current one (`with mesh:`).

    >>> with Mesh(("tp",), (2,), range(2), "cpu", "simulated"):
    ...     chosen()
    Mesh(tp=2)
    """
    given = _current.get() or current_device_mesh() if mesh is None else mesh
    if given is None:
        raise MeshError("no mesh is given and none is current; give one, or enter one (`with mesh:`)")
    return Mesh.from_torch(given)


def index_of(mesh: Mesh, point: Sequence[int], axes: tuple[str, ...]) -> int:
    """Where the rank at a coordinate of a mesh stands in its group over `axes`, which are those of the mesh."""
    index = 0
    for axis in axes:
        index = index * mesh.axis_sizes[axis] + point[mesh.axes.index(axis)]
    return index


def quote(name: str) -> str:
    """A name with nothing in it that texts use as punctuation."""
    return _quote(name, safe="")


class Mesh(metaclass=OpaqueBaseMeta):
    """Named axes over ranks; a sub-mesh (`mesh["tp"]`) keeps its root and names some of its axes.

    axis_sizes  the size of each axis by name, in order; `ndim` is the number of axes
    slow        the axes whose links are slow, as between machines
    explicit    whether a group over several axes may be used only after `flatten` made it known: communicators cost memory
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    axis_sizes: dict[str, int]
    ndim: int
    _size: int
    ranks: tuple[int, ...]
    device: str
    world: str
    root: Mesh
    slow: tuple[str, ...]
    explicit: bool
    # The one fact of a root that changes. It is no part of its identity: a group that becomes known makes other plans possible
    # and no layout another, so tensors made before and after stay on one mesh. Like the groups, it belongs to one process.
    _flattened: set[frozenset[str]]
    _groups_of: dict[tuple[int, tuple[str, ...]], tuple[int, ...]]

    def __new__(  # noqa: PLR0913  a mesh is these facts
        cls,
        axes: Iterable[str],
        sizes: Iterable[int],
        ranks: Iterable[int],
        device: str,
        world: str,
        of: Mesh | None = None,
        slow: str | Iterable[str] = (),
        groups: str = "auto",
    ) -> Mesh:
        names, sizes, ranks = _counted(axes, sizes, ranks) if of is None else (tuple(axes), tuple(sizes), tuple(ranks))
        optional(instance, of, Mesh, "Mesh: of", "the Mesh that this is a part of")
        slow = _slow_axes(names, slow) if of is None else tuple(axis for axis in names if axis in of.slow)
        explicit = _is_explicit(groups) if of is None else of.explicit
        content = (names, sizes, ranks, a_device(device, "Mesh: device"), world, of, slow, explicit)
        found = _meshes.get(content) if choice(world, "Mesh: world", ("processes", "simulated")) else None
        if found is not None:
            return found
        _check(content[0], content[1], content[2] if of is None else None)
        if of is not None and (of.root is not of or not set(names) <= set(of.axes)):
            refuse("Mesh: of", f"a whole mesh with the axes {', '.join(names)}", of)
        return intern(_meshes, content, lambda: cls._build(*content))

    @classmethod
    def _build(cls, *content: Any) -> Mesh:
        install_patches("tensors")
        self = super().__new__(cls)
        self.axes, self.shape, self.ranks, self.device, self.world, of, self.slow, self.explicit = content
        self.root = self if of is None else of  # a cycle, so that meshes end when these are collected
        self._flattened, self._groups_of = set(), {}
        self.axis_sizes, self.ndim = dict(zip(self.axes, self.shape, strict=True)), len(self.axes)
        self._size = math.prod(self.shape)
        return self

    @staticmethod
    def from_torch(device_mesh: Any) -> Mesh:
        """The same axes over the same ranks as a torch `DeviceMesh`; a slice of one keeps its root."""
        if isinstance(device_mesh, Mesh):
            return device_mesh
        if not hasattr(device_mesh, "mesh_dim_names"):
            raise MeshError(f"a mesh (mesh=, device_mesh=) is a shardwise.Mesh or a torch DeviceMesh, got {shown(device_mesh)}")
        root = device_mesh._get_root_mesh() if hasattr(device_mesh, "_get_root_mesh") else device_mesh
        names = device_mesh.mesh_dim_names
        if root is not device_mesh and names and set(names) <= set(root.mesh_dim_names or ()):
            return Mesh.from_torch(root)[tuple(names)]
        grid = device_mesh.mesh
        names = names or tuple(f"dim{i}" for i in range(grid.ndim))
        return Mesh(names, grid.shape, grid.flatten().tolist(), device_mesh.device_type, "processes")

    @staticmethod
    def read(text: str) -> Mesh:
        """The mesh that a `text` tells.

        >>> mesh = Mesh(("dp", "tp"), (2, 2), (3, 2, 1, 0), "cpu", "simulated")["tp"]
        >>> Mesh.read(mesh.text) is mesh
        True
        """
        return _read(a_text(text, "Mesh.read: text", "what mesh.text gives"))

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks one tensor on this mesh is spread over, or the size of one axis, by name or by position.

        >>> mesh = Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated")
        >>> mesh.size(), mesh.size("tp"), mesh.size(0)
        (8, 4, 2)
        """
        return self._size if mesh_dim is None else self.axis_sizes[self._axis(mesh_dim)]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The names of the axes, as on a `DeviceMesh`."""
        return self.axes

    @property
    def device_type(self) -> str:
        """The kind of device, as on a `DeviceMesh`."""
        return self.device.partition(":")[0]

    @property
    def mesh(self) -> Tensor:
        """The ranks as a tensor of the mesh's shape; of a sub-mesh, those that this rank belongs to.

        >>> Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated").mesh
        tensor([[0, 1],
                [2, 3]])
        """
        place = 0 if self.root is self else self.here()
        return torch.tensor([self.ranks[peer] for peer in self.peers(place, self.axes)]).view(self.shape)

    def here(self) -> int:
        """Where this process stands in the root's list of ranks; a simulated mesh has all of its ranks in this process."""
        if self.world == "simulated" and len(self.ranks) > 1:
            raise MeshError(
                f"mesh {self} is simulated: its {len(self.ranks)} ranks are in this process, and none of them is the one that "
                "asks; write what every rank does alike, or sw.each_rank(function, …) for what ranks do with local tensors"
            )
        place = self.place(self.get_rank())
        if place is None:
            raise MeshError(f"rank {self.get_rank()} is not one of the {len(self.ranks)} ranks of mesh {self}")
        return place

    def get_rank(self) -> int:
        """The rank of this process in its job."""
        if self.world == "simulated" and len(self.ranks) > 1:
            self.here()
        return dist.get_rank() if self.world != "simulated" else self.ranks[0]

    def to_torch(self) -> Any:
        """A torch `DeviceMesh` of the same axes over the same ranks, for functions of torch that make its own DTensors.
        Collective over the job: torch makes its groups there."""
        if self.world == "simulated":
            raise MeshError(f"mesh {self} is simulated, and torch's meshes are of processes; start it with torchrun")
        if self.root is not self:
            return self.root.to_torch()[self.axes]
        return DeviceMesh(self.device_type, self.mesh, mesh_dim_names=self.axes)

    def _refuse_peer(self, asker: str) -> None:
        """Refuse to serve code of torch that makes its own DTensors on this mesh: they do not work with any mesh but theirs."""
        if asker.startswith(("torch.distributed.tensor", "torch.distributed.fsdp")):
            raise MeshError(
                f"{asker} makes DTensors of torch's own, which need a DeviceMesh, got {self!r}: give it mesh.to_torch(), or "
                "shard the module with Shardwise (sw.distribute_module, sw.distribute_tensor for each parameter)"
            )

    def get_coordinate(self) -> tuple[int, ...] | None:
        """The coordinate of this process along this mesh's axes, or None if it does not take part."""
        self._refuse_peer(sys._getframe(1).f_globals.get("__name__", ""))
        return self.coordinate(self.get_rank())

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The coordinate of this process along one axis, by name or position; a mesh of one axis need not say which."""
        at = self.axes.index(self._axis(mesh_dim))  # first: what is wrong with the argument is said before where this runs
        return self.coordinates[self.here()][at]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The process group over one axis that this process is in, while the mesh is held; the first use is collective."""
        self._refuse_peer(sys._getframe(1).f_globals.get("__name__", ""))
        axis = self._axis(mesh_dim)
        if self.world == "simulated":
            raise MeshError(f"mesh {self} is simulated: there is no process group over axis {axis!r}; start it with torchrun")
        return group_over(tuple(self.ranks[peer] for peer in self.peers(self.here(), (axis,))), self.root)

    def get_all_groups(self) -> list[Any]:
        """The process groups over each axis that this process is in."""
        return [self.get_group(axis) for axis in self.axes]

    def _axis(self, mesh_dim: int | str | None) -> str:
        """The axis that a name, a position or (of a mesh of one axis) nothing means."""
        if type(mesh_dim) is int and -self.ndim <= mesh_dim < self.ndim:
            return self.axes[mesh_dim]
        if mesh_dim not in self.axes if isinstance(mesh_dim, str) else mesh_dim is not None or self.ndim > 1:
            raise MeshError(
                f"mesh_dim: mesh {self} has the axes {', '.join(self.axes)}, or 0 to {self.ndim - 1}; got {shown(mesh_dim)}"
            )
        return self.named(cast("str | None", mesh_dim))

    def _flatten(self, mesh_dim_name: str | None = None) -> Mesh:
        """`flatten`, by the name and with the arguments that a `DeviceMesh` has."""
        flat = self.flatten()
        if mesh_dim_name not in (None, *flat.axes):
            raise MeshError(f"the axes of mesh {self} are called {flat.axes[0]!r} as one; got mesh_dim_name={mesh_dim_name!r}")
        return flat

    def __enter__(self) -> Mesh:
        """In the block, and in threads and tasks that it starts, this is the current mesh: meant where none is given."""
        _current.enter(self, sys._getframe(1))
        return self

    def __exit__(self, *_: object) -> None:
        _current.leave(self)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of axes, sizes, ranks and device: the same in every process."""
        content = (self.root.axes, self.root.shape, self.root.ranks, self.device, self.axes)
        return hashlib.blake2b(repr(content).encode(), digest_size=6).hexdigest()

    @cached_property
    def text(self) -> str:
        """This mesh as text that `Mesh.read` reads in any process; ranks in order are left out.

        >>> Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated", slow="dp")["tp"].text
        'cpu;simulated;dp=2,tp=2;;dp;auto;tp'
        """
        root = self.root
        axes = ",".join(f"{quote(axis)}={size}" for axis, size in root.axis_sizes.items())
        ranks = "" if root.ranks == tuple(range(len(root.ranks))) else ",".join(map(str, root.ranks))
        slow, kept = (",".join(map(quote, names)) for names in (root.slow, () if root is self else self.axes))
        return ";".join([root.device, root.world, axes, ranks, slow, _GROUPS[root.explicit], kept])

    def write(self) -> str:
        """The `text`; a traced program may call methods of constants, and not read all attributes."""
        return self.text

    def write_root(self) -> str:
        """The `text` of the root."""
        return self.root.text

    def named(self, axis: str | None) -> str:
        """The axis that is meant: the given one, or the only one there is.

        >>> Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated")["tp"].named(None)
        'tp'
        """
        if axis is None and len(self.axes) > 1:
            raise MeshError(f"mesh {self} has several axes; name one of them: axis={self.axes[0]!r}")
        axis = self.axes[0] if axis is None else axis
        self.size_of(axis)
        return axis

    def alias(self, axes: tuple[str, ...]) -> str:
        """The name, equal on every rank, of the process group over `axes`."""
        return f"sw:{self.root.fingerprint}:{','.join(self._several(axes))}"

    def _several(self, axes: Any) -> tuple[str, ...]:
        """Several axes of the root, checked."""
        names = several(axes, "axes", f"several of {', '.join(self.root.axes)}")
        for name in names:
            self.root.size_of(name)
        return names

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        names = (axes,) if isinstance(axes, str) else several(axes, "mesh[axes]", "the name of an axis, or several")
        sizes = [self.size_of(name) for name in names]
        if names == self.root.axes:
            return self.root
        return Mesh(names, sizes, self.ranks, self.device, self.world, self.root)

    def flatten(self, *axes: str) -> Mesh:
        """The given axes (none: all) as the one axis of a mesh, the first varying slowest; their group may be used from now on.

        >>> mesh = Mesh(("dp", "pp", "tp"), (2, 2, 2), range(8), "cpu", "simulated", groups="explicit")
        >>> flat = mesh.flatten("dp", "tp")
        >>> flat.axis_sizes, [flat.coordinate(rank) for rank in (0, 1, 4, 5)], mesh.usable(("dp", "tp"))
        ({'dp_tp': 4}, [(0,), (1,), (2,), (3,)], True)
        """
        names, root = self._several(axes) or self.axes, self.root
        if len(set(names)) != len(names):
            raise MeshError(f"flatten takes each axis once, got {', '.join(names)}")
        size = math.prod([self.size_of(name) for name in names])
        if len(names) == 1:
            return self[names]
        flat = "_".join(names)
        if flat in root.axes:
            raise MeshError(f"mesh {root} has an axis {flat!r}, which is what {', '.join(names)} are called as one; rename it")
        group = root._crossed(names)
        if root.explicit and len(group) > 1 and group not in root._flattened:
            root._flattened.add(group)
            cache_clear(*CHOICES)
        first = min(map(root.axes.index, names))  # so that neighbours, flattened in order, leave the ranks in order
        before, after = root.axes[:first], [axis for axis in root.axes[first:] if axis not in names]
        sizes = [{**root.axis_sizes, flat: size}[axis] for axis in (*before, flat, *after)]
        ranks = [root.ranks[place] for place in root.peers(0, (*before, *names, *after))]
        slow = [flat if axis in names else axis for axis in root.slow]
        return Mesh((*before, flat, *after), sizes, ranks, root.device, root.world, None, slow, _GROUPS[root.explicit])[flat]

    def at(self, coordinate: int) -> Mesh:
        """The ranks at a coordinate of this mesh's one axis, as a mesh of the root's other axes (of none: one of this axis).

        >>> mesh = Mesh(("pp", "tp"), (2, 2), range(4), "cpu", "simulated")
        >>> mesh["pp"].at(1), mesh["pp"].at(1).ranks
        (Mesh(tp=2), (2, 3))
        """
        root, axis = self.root, self.named(None)
        last = self.axis_sizes[axis] - 1
        if isinstance(coordinate, bool) or not isinstance(coordinate, int) or not 0 <= coordinate <= last:
            raise MeshError(f"axis {axis!r} of mesh {root} has coordinates 0 to {last}, got coordinate={shown(coordinate)}")
        sizes = {name: size for name, size in root.axis_sizes.items() if name != axis} or {axis: 1}
        ranks = [rank for rank, (at,) in zip(root.ranks, root[axis].coordinates, strict=True) if at == coordinate]
        slow = [name for name in root.slow if name in sizes]
        return Mesh(tuple(sizes), sizes.values(), ranks, root.device, root.world, None, slow, root.grouping)

    @property
    def grouping(self) -> str:
        """What `groups=` of a mesh like this one says."""
        return _GROUPS[self.explicit]

    def usable(self, axes: Iterable[str]) -> bool:
        """Whether a collective may run over these axes together: always, unless the mesh was made with `groups="explicit"`.

        >>> mesh = Mesh(("dp", "tp"), (2, 2), range(4), "cpu", "simulated", groups="explicit")
        >>> mesh.usable(("dp",)), mesh.usable(("dp", "tp"))
        (True, False)
        """
        axes = self._several(axes)
        if not self.explicit:
            return True
        group = self.root._crossed(axes)
        return len(group) < 2 or group in self.root._flattened

    def _crossed(self, axes: Iterable[str]) -> frozenset[str]:
        """The axes along which ranks differ at all: with or without the others, the group is the same."""
        return frozenset([axis for axis in axes if self.axis_sizes[axis] > 1])

    def size_of(self, axis: str) -> int:
        """The size of one axis."""
        try:
            return self.axis_sizes[axis]
        except (KeyError, TypeError):
            raise MeshError(f"mesh {self} has no axis {shown(axis)}; its axes are {', '.join(self.axes)}") from None

    def place(self, rank: int) -> int | None:
        """Where `rank` stands in the root's list of ranks, or None if it does not take part."""
        found = self._places.get(rank) if isinstance(rank, int) and not isinstance(rank, bool) else None
        if found is None:
            integer(rank, "rank", 0)
        return found

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
        every = product(*(range(n) for n in self.root.shape))
        return tuple(tuple(point[i] for i in keep) for point in every)

    def peers(self, place: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The places that differ from `place` along `axes` only, the first of `axes` varying slowest."""
        root = self.root
        try:
            found = root._groups_of.get((place, axes))
            return root._groups_of.setdefault((place, axes), _peers(root, place, axes)) if found is None else found
        except (IndexError, TypeError, ValueError):  # looked at only here, since every collective comes this way
            integer(place, "Mesh.peers: place", 0, len(self.ranks) - 1)
            return _peers(root, place, self._several(axes))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of places over `axes`."""
        axes = self._several(axes)
        return tuple(dict.fromkeys(self.peers(place, axes) for place in range(len(self.ranks))))

    def sorted_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes in the order of the root mesh."""
        return tuple(sorted(set(self._several(axes)), key=self.root.axes.index))

    def __repr__(self) -> str:
        facts = [f"{axis}={size}" for axis, size in self.axis_sizes.items()]
        facts += [f"slow={self.slow}"] if self.slow else []
        facts += [f"groups={_GROUPS[True]!r}"] if self.explicit else []
        return f"Mesh({', '.join(facts)})"

    def __str__(self) -> str:
        return repr(self)[len("Mesh") :]

    def __eq__(self, other: object) -> bool:
        """Equal meshes are one object; a `DeviceMesh` of the same axes over the same ranks is equal too."""
        return self is other or (type(other).__name__ == "DeviceMesh" and Mesh.from_torch(other) is self)

    __hash__ = object.__hash__

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """This mesh as code of a traced program, and what its names mean."""
        return f"Mesh.read({self.text!r})", {"Mesh": Mesh}

    def __reduce__(self) -> tuple[Any, ...]:
        of = None if self.root is self else self.root
        return Mesh, (self.axes, self.shape, self.ranks, self.device, self.world, of, self.slow, self.grouping)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self


constant_type(Mesh)


def _peers(root: Mesh, place: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(place, int) or place < 0 or not isinstance(axes, tuple):
        raise ValueError("the caller says what is wrong")
    here, moving = root.coordinates[place], [root.axes.index(axis) for axis in axes]
    found = []
    for point in product(*(range(root.shape[i]) for i in moving)):
        there = dict(enumerate(here)) | dict(zip(moving, point, strict=True))
        found.append(index_of(root, tuple(there.values()), root.axes))
    return tuple(found)


@memo("meshes read", limit=1024)
def _read(text: str) -> Mesh:
    try:
        device, world, axes, ranks, slow, groups, kept = (part.split(",") if part else [] for part in text.split(";"))
        sizes = {unquote(axis): int(size) for axis, _, size in (word.partition("=") for word in axes)}
        order = map(int, ranks) if ranks else range(min(math.prod(sizes.values()), MOST_RANKS + 1))
        rest = (device[0], world[0], None, tuple(map(unquote, slow)), groups[0])
    except (ValueError, IndexError):
        raise MeshError(f"Mesh.read: text is what mesh.text gives, got {shown(text)}") from None
    root = Mesh(tuple(sizes), sizes.values(), order, *rest)
    return root[tuple(map(unquote, kept))] if kept else root


def _counted(axes: Any, sizes: Any, ranks: Any) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Axes, sizes and ranks of a new mesh, as far as each can be judged alone."""
    names = several(list(axes) if isinstance(axes, dict) else axes, "Mesh: axes", "a list of names")
    for name in names:
        a_text(name, "Mesh: each of axes", "a name")
    counts = integers(sizes, "Mesh: sizes")
    if math.prod(counts) > MOST_RANKS:
        refuse("Mesh: sizes", f"of at most {MOST_RANKS:,} ranks together", counts)
    return names, counts, integers(ranks, "Mesh: ranks", 0)


def _check(axes: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...] | None) -> None:
    if not axes:
        raise MeshError("a mesh has at least one axis, e.g. sw.init_mesh(dp=2)")
    if len(set(axes)) != len(axes):
        raise MeshError(f"axis names must differ, got {axes}")
    if len(axes) != len(sizes) or any(n < 1 for n in sizes):
        raise MeshError(f"each axis has one positive size, got axes {axes} and sizes {sizes}")
    if ranks is not None and (len(ranks) != math.prod(sizes) or len(set(ranks)) != len(ranks)):
        raise MeshError(f"a mesh of sizes {sizes} takes {math.prod(sizes)} different ranks, got {len(ranks)}")


def _slow_axes(axes: tuple[str, ...], slow: str | Iterable[str]) -> tuple[str, ...]:
    """The slow axes in the mesh's order."""
    given = (slow,) if isinstance(slow, str) or not isinstance(slow, Iterable) else tuple(slow)
    unknown = [name for name in given if name not in axes]
    if unknown:
        known = ", ".join(axes) or "none"
        raise MeshError(f'slow names axes with slow links, e.g. slow=("dp",); the axes are {known}, got {shown(unknown[0])}')
    return tuple(axis for axis in axes if axis in given)


def _is_explicit(groups: str) -> bool:
    if not isinstance(groups, str) or groups not in _GROUPS:
        raise MeshError(
            f'groups is "auto" (those that plans need are made by themselves) or "explicit" (only those that mesh.flatten made '
            f"are used), got {shown(groups)}"
        )
    return groups == "explicit"
