"""`Processes`: the door to a job of processes, on torch.distributed process groups of any backend.

A group goes by an alias that is the same on every rank (`mesh.alias(axes)`); each rank makes only the groups it is in,
when they are first used. The collectives trace, and nothing that they leave in a graph depends on the rank.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import collectives, register_group, unregister_group
from ..errors import MeshError, OperatorError, WorldError
from ..layout import PerRank
from ..mesh import Mesh
from .door import Counts, check_chunks, same_ndim
from .wire import combine, packed, unpacked, wire

_all_reduce = collectives.all_reduce.default
_all_gather = collectives.all_gather_into_tensor.default
_reduce_scatter = collectives.reduce_scatter_tensor.default
_all_to_all = collectives.all_to_all_single.default
_broadcast = collectives.broadcast.default
_wait = collectives.wait_tensor.default

#: torch before 2.13 sorts the ranks of every group.
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
#: Shapes travel in a vector of one length, so that ranks that disagree on the number of dims can still say so.
_MOST_DIMS = 64


# ── the rank as a value ───────────────────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::rank_number", "(int[] table, Device device) -> Tensor")


@torch.library.impl("shardwise::rank_number", "CompositeExplicitAutograd")
def _rank_number(table: list[int], device: torch.device) -> Tensor:
    return torch.full((), table[dist.get_rank()], dtype=torch.int64, device=device)


def _rank_number_fake(table: list[int], device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


torch.library.register_fake("shardwise::rank_number", _rank_number_fake)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Group(NamedTuple):
    """A process group by the name it goes by, and its size; one rank alone needs no group."""

    alias: str
    size: int


class Processes:
    """The door to the running torch.distributed job."""

    def __init__(self) -> None:
        self._job: Callable[[], Any] = lambda: None
        self._groups: dict[tuple[Mesh, tuple[str, ...]], Group] = {}
        self._places: dict[Mesh, int] = {}
        # Groups belong to torch, which drops them when the job is left.
        self._by_ranks: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()

    def prepare(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group of this rank over `axes`, made if it is not there yet; collective over the group.

        A graph loaded from a compile cache names groups that nothing has made in this process: prepare them first.
        """
        job = dist.group.WORLD
        if job is None or self._job() is not job:
            self._join(job, mesh)
        found = self._groups.get((mesh.root, axes))
        return self._make(mesh.root, axes) if found is None else found

    def _join(self, job: Any, mesh: Mesh) -> None:
        """Forget the groups of a job that was left, so that they are made anew for this one."""
        if job is None:
            raise WorldError(
                f"mesh {mesh} lives in a torch.distributed job, and none is running; call "
                "torch.distributed.init_process_group() first, or make the mesh inside sw.simulate(n)"
            )
        for group in self._groups.values():
            unregister_group(group.alias)
        self._groups.clear()
        self._places.clear()
        self._by_ranks.clear()
        self._job = weakref.ref(job)

    def _make(self, root: Mesh, axes: tuple[str, ...]) -> Group:
        places = root.peers(self._place(root), axes)
        group = Group(root.alias(axes), len(places))
        if group.size > 1:
            _check_order(root, axes)
            made = self._group_over(tuple(root.ranks[place] for place in places))
            unregister_group(group.alias)  # another door of this process may have registered it
            register_group(group.alias, made)
        self._groups[root, axes] = group
        return group

    def _group_over(self, ranks: tuple[int, ...]) -> Any:
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        if ranks not in self._by_ranks:
            options: dict[str, Any] = {"sort_ranks": False} if _KEEPS_ORDER else {}
            self._by_ranks[ranks] = dist.new_group(list(ranks), use_local_synchronization=True, **options)
        return self._by_ranks[ranks]

    def _place(self, mesh: Mesh) -> int:
        """Where this rank stands in the mesh."""
        job = dist.group.WORLD
        if job is None or self._job() is not job:
            self._join(job, mesh)
        root = mesh.root
        if root not in self._places:
            place = root.place(dist.get_rank())
            if place is None:
                raise MeshError(
                    f"rank {dist.get_rank()} is none of the {len(root.ranks)} ranks of mesh {root}, and only they may "
                    "use it; guard the code with `if mesh.coordinate(rank) is not None`"
                )
            self._places[root] = place
        return self._places[root]

    # ── collectives ───────────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce over the group."""
        alias, size = self.prepare(mesh, axes)
        if size == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        how = wire(kind, x.dtype)
        if how is None:
            return self._gathered(x, kind, mesh, axes)
        return how.decode(_wait(_all_reduce(packed(how.encode(x)), how.kind, alias)))

    def all_gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Concatenate the group's tensors along dim 0."""
        alias, size = self.prepare(mesh, axes)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return x.new_empty((size * x.shape[0], *x.shape[1:]))
        return unpacked(_wait(_all_gather(packed(x), size, alias)), x.dtype)

    def reduce_scatter(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce over the group and keep this rank's chunk of dim 0."""
        alias, size = self.prepare(mesh, axes)
        check_chunks(x.shape[0], size, axes)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return x.new_empty((x.shape[0] // size, *x.shape[1:]))
        how = wire(kind, x.dtype)
        if how is None:
            return combine(self._exchanged_chunks(x, mesh, axes), kind)
        return how.decode(_wait(_reduce_scatter(packed(how.encode(x)), how.kind, size, alias)))

    def all_to_all(self, x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Send and receive so many elements to and from each of the group."""
        alias, size = self.prepare(mesh, axes)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        place = self._place(mesh)
        coming, going = list(_here(receive, place)), list(_here(send, place))
        return unpacked(_wait(_all_to_all(packed(x), coming, going, alias)), x.dtype)

    def broadcast(self, x: Tensor, mesh: Mesh) -> Tensor:
        """The first place's value."""
        alias, size = self.prepare(mesh, mesh.root.axes)
        if size == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        return unpacked(_wait(_broadcast(packed(x), 0, alias)), x.dtype)

    def _gathered(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce by `kind` what the group holds, for a reduction that no backend does."""
        return combine(self.all_gather(x[None], mesh, axes).unbind(), kind)

    def _exchanged_chunks(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Tensor, ...]:
        """This rank's chunk of dim 0 of each of the group."""
        size = self.prepare(mesh, axes).size
        even = (x.numel() // size,) * size
        return self.all_to_all(x.flatten(), even, even, mesh, axes).view(size, -1, *x.shape[1:]).unbind()

    # ── what does not communicate ─────────────────────────────────────────────────────────────────────────────────────

    def each(self, function: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """Call the function with this rank's arguments."""
        return function(*_here(args, self._place(mesh)))

    def number(self, value: PerRank, mesh: Mesh) -> Tensor:
        """This rank's number, looked up by rank when the operator runs."""
        self._place(mesh)
        return torch.ops.shardwise.rank_number(_table(value, mesh.root), torch.device(mesh.device))

    def replicate(self, tensor: Tensor, mesh: Mesh) -> Tensor:
        """The tensor itself."""
        return tensor

    def plain(self, x: Tensor) -> Tensor:
        """The tensor itself."""
        return x

    def shapes(self, x: Tensor, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Gather every rank's shape."""
        if x.ndim > _MOST_DIMS:
            raise OperatorError(f"a local tensor has at most {_MOST_DIMS} dims, got {x.ndim}")
        mine = torch.zeros((1, 1 + _MOST_DIMS), dtype=torch.int64)
        mine[0, : x.ndim + 1] = torch.tensor([x.ndim, *x.shape])
        rows = self.all_gather(mine.to(mesh.device), mesh, mesh.root.axes).tolist()
        return same_ndim(tuple(tuple(row[1 : 1 + row[0]]) for row in rows))


def _check_order(root: Mesh, axes: tuple[str, ...]) -> None:
    """Refuse, on every rank of the mesh alike, groups in an order that this torch cannot give them."""
    if not _KEEPS_ORDER and list(root.ranks) != sorted(root.ranks):
        for places in root.groups(axes):
            ranks = [root.ranks[place] for place in places]
            if ranks != sorted(ranks):
                raise MeshError(
                    f"mesh {root} has a group over axes {axes} of ranks {ranks} in this order, which torch before 2.13 "
                    "cannot make; use a mesh of ascending ranks"
                )


def _here(value: Any, place: int) -> Any:
    """`value` with every PerRank in it (through lists and tuples) replaced by that of the place."""
    if isinstance(value, PerRank):
        return value.at(place)
    kind = type(value)
    return kind([_here(item, place) for item in value]) if kind is tuple or kind is list else value


def _table(value: PerRank, root: Mesh) -> list[int]:
    """One number for each rank of the job up to the mesh's last, so that the rank alone finds its own."""
    table = [0] * (max(root.ranks) + 1)
    for place, rank in enumerate(root.ranks):
        table[rank] = value.at(place)
    return table
