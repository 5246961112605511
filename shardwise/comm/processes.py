"""`Processes`: the transport to a job of processes, on torch.distributed process groups of any backend.

A group goes by an alias that is the same on every rank (`mesh.alias(axes)`); each rank makes only the groups it is in, with
the mesh or when they are first used. The collectives trace, and nothing that they leave in a graph depends on the rank. A rank
that is not in a mesh holds shapes (`Absent`) and communicates nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.groups import AsyncTensor
from .._torch.tensors import collectives, dispatch_modes
from ..base.process_groups import group_over
from ..base.settings import Setting
from ..errors import OperatorError, WorldError
from ..layouts.layout import PerRank
from ..layouts.mesh import Mesh, index_of
from .absent import Absent, absent, refuse
from .agreement import agree
from .aliases import forget, register
from .delivery import Message, copied, deliver
from .encoding import combine, encoding, packed, unpacked
from .failures import guarded, in_job, joined, report
from .host_collectives import direct_all_gather, direct_all_reduce, direct_reduce_scatter, is_eager
from .messages import Batch
from .source_lines import caller
from .tracing import current, mark_specific, varies
from .transport import Assumed, Counts, Fact, alike, check_chunks

_all_reduce = collectives.all_reduce.default
_all_gather = collectives.all_gather_into_tensor.default
_reduce_scatter = collectives.reduce_scatter_tensor.default
_all_to_all = collectives.all_to_all_single.default
_broadcast = collectives.broadcast.default
_wait = collectives.wait_tensor.default

#: Whether collectives are only started here: what they give waits for itself where it is first used.
deferred: Setting[bool] = Setting("deferred", False)


def _finished(x: Tensor) -> Tensor:
    if deferred.get() and type(x) is Tensor:
        return AsyncTensor(x)
    return _wait(x)


#: What to do where ranks would draw different random numbers.
_SEEDS = "seed alike on every rank (torch.manual_seed, or the generator that is given), and draw alike"
#: Shapes travel in a vector of one length, so that ranks that disagree on the number of dims can still say so.
_MOST_DIMS = 64
#: Names of dtypes and devices, in the same order in every process of a job; the last stands for one that is not there.
_NAMES = (
    *sorted({str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)}),
    *("cpu", "cuda", "hpu", "meta", "mps", "xla", "xpu", "another one"),
)


# ── the rank as a value ───────────────────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::rank_number", "(int[] table, Device device) -> Tensor")


@torch.library.impl("shardwise::rank_number", "CompositeExplicitAutograd")
def _rank_number(table: list[int], device: torch.device) -> Tensor:
    return torch.full((), table[dist.get_rank()], dtype=torch.int64, device=device)


torch.library.register_fake("shardwise::rank_number", lambda table, device: torch.empty((), dtype=torch.int64, device=device))


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Group(NamedTuple):
    """A process group by its alias, and its size (1: none is needed, 0: this rank is outside). If its ranks are `hosts`, they
    send straight to each other. `process` leads to it and does not keep it: whoever ends the job ends its groups."""

    alias: str
    size: int
    hosts: bool = False
    process: Callable[[], Any] = lambda: None


@dataclass(slots=True)
class Seat:
    """Where this rank stands in a root mesh (-1: nowhere), its groups by axes, those that have met, whether all are made."""

    place: int
    groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    met: set[tuple[str, ...]] = field(default_factory=set)
    ready: bool = False


class Processes:
    """The transport to the running torch.distributed job."""

    holds_all = False

    def __init__(self) -> None:
        self._job: Callable[[], Any] = lambda: None
        self._seats: WeakKeyDictionary[Mesh, Seat] = WeakKeyDictionary()  # by roots: a mesh that nobody holds is forgotten
        self._joining = threading.RLock()
        self._assumed: dict[str, list[Assumed]] = {}
        self._checked: set[tuple[str, str]] = set()

    def prepare(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group of this rank over `axes`, made if it is not there yet; collective over the group."""
        seat = self._seat(mesh)
        found = seat.groups.get(axes)
        return self._make(mesh.root, axes, seat) if found is None else found

    @guarded
    def ready(self, mesh: Mesh) -> None:
        """Make every group that a plan on the mesh may use; collective over the mesh."""
        seat = self._seat(mesh)
        if seat.place < 0 or (seat.ready and not mesh.explicit):
            return
        axes = [axis for axis, n in mesh.root.axis_sizes.items() if n > 1]
        for count in range(1, len(axes) + 1):
            for chosen in combinations(axes, count):
                if mesh.usable(chosen):
                    self.prepare(mesh, chosen)
        seat.ready = True

    def traced(self, x: Tensor) -> bool:
        """Whether the tensor is not an ordinary one, or something records what is done to it."""
        return not is_eager(x) and not isinstance(x, Absent)

    def _join(self, job: Any, mesh: Mesh) -> None:
        """Forget the groups of a job that was left, so that they are made anew for this one."""
        if job is None:
            raise WorldError(
                f"mesh {mesh} lives in a torch.distributed job, and none is running; call "
                "torch.distributed.init_process_group() first, or make the mesh inside sw.simulate(n)"
            )
        with self._joining:
            if self._job() is job:
                return  # another thread was quicker
            for group in [group for seat in list(self._seats.values()) for group in seat.groups.values()]:
                forget(group.alias)
            self._seats.clear()
            self._assumed.clear()
            self._checked.clear()
            self._job = weakref.ref(job)
        if in_job():
            joined()

    def _seat(self, mesh: Mesh) -> Seat:
        job = dist.group.WORLD
        if job is None or self._job() is not job:
            self._join(job, mesh)
        found = self._seats.get(mesh.root)
        if found is None:
            place = mesh.root.place(dist.get_rank())
            with self._joining:
                found = self._seats.setdefault(mesh.root, Seat(-1 if place is None else place))
        return found

    def _make(self, root: Mesh, axes: tuple[str, ...], seat: Seat) -> Group:
        places = root.peers(seat.place, axes) if seat.place >= 0 else ()
        group = Group(root.alias(axes), len(places))
        if group.size > 1:
            made = group_over(tuple(root.ranks[place] for place in places), root)
            hosts = root.device == "cpu" and dist.get_backend(made) == "gloo"
            group = group._replace(hosts=hosts, process=weakref.ref(made))
            register(group.alias, made)
        return seat.groups.setdefault(axes, group)

    def place(self, mesh: Mesh) -> int:
        """Where this rank stands in the mesh."""
        return self._seat(mesh).place

    # ── collectives ───────────────────────────────────────────────────────────────────────────────────────────────────

    @guarded
    def all_reduce(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce over the group."""
        alias, size, hosts, process = self.prepare(mesh, axes)
        if size == 0:
            return Absent(x.shape, x.dtype, mesh)
        if size == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        if hosts and is_eager(x) and not deferred.get():
            return direct_all_reduce(x, kind, process())
        how = encoding(kind, x.dtype)
        if how is None:
            return combine(self.all_gather(x[None], mesh, axes).unbind(), kind)
        return how.decode(_finished(_all_reduce(packed(how.encode(x)), how.kind, alias)))

    @guarded
    def all_gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Concatenate the group's tensors along dim 0."""
        alias, size, hosts, process = self.prepare(mesh, axes)
        if size == 0:
            return Absent((len(mesh.peers(0, axes)) * x.shape[0], *x.shape[1:]), x.dtype, mesh)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return x.new_empty((size * x.shape[0], *x.shape[1:]))
        if hosts and is_eager(x) and not deferred.get():
            return direct_all_gather(x, process())
        return unpacked(_finished(_all_gather(packed(x), size, alias)), x.dtype)

    @guarded
    def reduce_scatter(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce over the group and keep this rank's chunk of dim 0."""
        alias, size, hosts, process = self.prepare(mesh, axes)
        ranks = size or len(mesh.peers(0, axes))
        check_chunks(x.shape[0], ranks, axes)
        if size == 0:
            return Absent((x.shape[0] // ranks, *x.shape[1:]), x.dtype, mesh)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return x.new_empty((x.shape[0] // size, *x.shape[1:]))
        if hosts and is_eager(x) and not deferred.get():
            return direct_reduce_scatter(x, kind, process())
        how = encoding(kind, x.dtype)
        if how is None:
            even = (x.numel() // size,) * size
            return combine(self.all_to_all(x.flatten(), even, even, mesh, axes).view(size, -1, *x.shape[1:]).unbind(), kind)
        return how.decode(_finished(_reduce_scatter(packed(how.encode(x)), how.kind, size, alias)))

    @guarded
    def all_to_all(self, x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Send and receive so many elements to and from each of the group."""
        alias, size, *_ = self.prepare(mesh, axes)
        if size == 0:
            return Absent((sum(_here(receive, 0)),), x.dtype, mesh)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        place = self.place(mesh)
        if current() is not None and varies((receive, send), len(mesh.ranks)):
            mark_specific((receive, send))
        coming, going = list(_here(receive, place)), list(_here(send, place))
        return unpacked(_finished(_all_to_all(packed(x), coming, going, alias)), x.dtype)

    @guarded
    def exchange(self, sent: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """Begin to send and to receive; every tensor that is received is registered with its work."""
        mesh, place = batch.mesh, self.place(batch.mesh)
        shapes = [batch.shape(index, max(place, 0)) for index in range(len(batch.shapes))]
        if place < 0:
            return [Absent(shape, kind, mesh) for shape, kind in zip(shapes, batch.dtypes, strict=True)]
        group, peers = self._group_of(batch), mesh.peers(place, batch.axes)
        outs = [torch.zeros(shape, dtype=kind, device=mesh.device) for shape, kind in zip(shapes, batch.dtypes, strict=True)]
        own = [packed(x.detach()) if batch.lent else copied(x.detach()) for x in sent]
        going = [Message(own[index], peers.index(goal)) for index, goal in batch.going(place)]
        coming = [Message(outs[index], peers.index(source)) for index, source in batch.coming(place)]
        deliver(going, coming, outs, group)
        return outs

    def _group_of(self, batch: Batch) -> Any:
        """The process group that carries a batch. Where its ranks must all meet before some of them send, they do so once."""
        group = self.prepare(batch.mesh, batch.axes)
        made = group.process() if group.size > 1 else group_over((dist.get_rank(),), batch.mesh.root)
        met = self._seat(batch.mesh).met
        if batch.mesh.device != "cpu" and batch.axes not in met and not batch.alone:
            met.add(batch.axes)
            made.allreduce([torch.zeros(1, device=batch.mesh.device)]).wait()
        return made

    @guarded
    def broadcast(self, x: Tensor, mesh: Mesh, source: int = 0) -> Tensor:
        """The value of the source."""
        axes = mesh.sorted_axes(mesh.axes)
        alias, size, *_ = self.prepare(mesh, axes)
        if size == 0:
            return Absent(x.shape, x.dtype, mesh)
        if size == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        return unpacked(_wait(_broadcast(packed(x), index_of(mesh, (source,) * mesh.ndim, axes), alias)), x.dtype)

    # ── what does not communicate ─────────────────────────────────────────────────────────────────────────────────────

    def each(self, function: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """Call the function with this rank's arguments."""
        place = self.place(mesh)
        if place < 0:  # as shapes at the first place; a device to make tensors on is one without memory
            given = [torch.device("meta") if isinstance(value, torch.device) else value for value in absent(args, mesh)]
            return absent(function(*_here(given, 0)), mesh)
        if current() is not None and varies(args, len(mesh.ranks)):
            mark_specific(args)
        try:
            return function(*_here(args, place))
        except Exception as error:
            self.report(error, mesh, getattr(function, "__name__", "a kernel"))
            raise

    def number(self, value: PerRank, mesh: Mesh) -> Tensor:
        """This rank's number, looked up when the operator runs: by rank alone, among those of the job up to the mesh's last."""
        if self.place(mesh) < 0:
            return Absent((), torch.int64, mesh)
        places = [mesh.root.place(rank) for rank in range(max(mesh.root.ranks) + 1)]
        table = [0 if place is None else value.at(place) for place in places]
        return torch.ops.shardwise.rank_number(table, torch.device(mesh.device))

    def replicate(self, tensor: Tensor, mesh: Mesh) -> Tensor:
        """The tensor itself."""
        return self.own(tensor, mesh, PerRank(lambda place: tensor.shape))

    def plain(self, x: Tensor) -> Tensor:
        """The tensor itself."""
        if isinstance(x, Absent):
            refuse(x.mesh, "its values were asked for")
        return x

    def own(self, x: Tensor, mesh: Mesh, shape: PerRank) -> Tensor:
        """The tensor itself."""
        if self.place(mesh) < 0:
            return Absent(shape.at(0), x.dtype, mesh)
        return self.plain(x)

    def agree(self, fact: str, mesh: Mesh, due: bool) -> None:
        """Compare through the job's store."""
        if due and in_job() and self.place(mesh) >= 0 and len(mesh.root.ranks) > 1:
            agree(fact, mesh.root.ranks, f"random numbers on mesh {mesh.root}", _SEEDS)

    def report(self, error: Exception, mesh: Mesh, where: str, alone: bool = False) -> None:
        """Tell the ranks of the mesh, unless something is only traced."""
        if in_job() and self.place(mesh) >= 0 and current() is None and not dispatch_modes():
            report(error, where, mesh.root.ranks, alone)

    def reseat(self, x: Tensor, have: Mesh, want: Mesh, shape: PerRank) -> Tensor:
        """The tensor itself where this rank is in both meshes."""
        place = self.place(want)
        if place < 0:
            return Absent(shape.at(0), x.dtype, want)
        if self.place(have) < 0:
            return torch.empty(shape.at(place), dtype=x.dtype, device=x.device)
        return x

    def shapes(self, x: Tensor, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Gather every rank's shape, and what else has to agree."""
        if x.ndim > _MOST_DIMS:
            raise OperatorError(f"a local tensor has at most {_MOST_DIMS} dims, got {x.ndim}")
        if self.place(mesh) < 0:
            return ()
        fact = Fact.of(x)
        words = [_NAMES.index(name) if name in _NAMES else -1 for name in (fact.dtype, fact.device)]
        row = [*words, int(fact.requires_grad), x.ndim, *x.shape, *(0,) * (_MOST_DIMS - x.ndim)]
        rows = self.all_gather(torch.tensor([row]).to(mesh.device), mesh, mesh.root.axes).tolist()
        facts = [Fact(tuple(shape[:n]), _NAMES[kind], _NAMES[on], bool(grad)) for kind, on, grad, n, *shape in rows]
        return alike(facts, mesh.root)

    def assume(self, x: Tensor, mesh: Mesh, shape: PerRank) -> None:
        """Note it, unless this line of the program was checked before."""
        line = str(caller())
        if (mesh.root.text, line) not in self._checked and self.place(mesh) >= 0 and not self.traced(x):
            self._checked.add((mesh.root.text, line))
            given = torch.empty(x.shape, dtype=x.dtype, device="meta")
            self._assumed.setdefault(mesh.root.text, []).append(Assumed(line, given, shape))

    def assumed(self, mesh: Mesh) -> list[Assumed]:
        """What was noted."""
        return self._assumed.pop(mesh.root.text, []) if self._assumed else []


def _here(value: Any, place: int) -> Any:
    """`value` with every PerRank in it (through lists, tuples and dictionaries) replaced by that of the place."""
    if isinstance(value, PerRank):
        return value.at(place)
    kind = type(value)
    if kind is dict:
        return {name: _here(item, place) for name, item in value.items()}
    return kind([_here(item, place) for item in value]) if kind is tuple or kind is list else value
