"""`batch`, `send`, `recv`, `wait`: tensors that ranks send to one another in one launch, forward and backward.

A traced program holds one operator for a batch, with its routes as text, and one wait for each received tensor; the backward is
the batch reversed. Where nothing is traced, a received tensor waits when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.compiler import Function, keep_alive
from .._torch.groups import AsyncTensor
from .._torch.tensors import collectives
from ..base.argument_checks import a_dtype, a_tensor, flag, instance, integer, integers, refuse, several, shown, sizes
from ..comm import Bundle, PerRank, seen, transport
from ..comm.delivery import finish
from ..comm.failures import guarded
from ..comm.interception import watched, watchers
from ..comm.messages import Batch, Shape, check_matched, check_shapes
from ..comm.tracing import current, mark_specific, refuse_unequal, steering, varies
from ..errors import MeshError, OperatorError
from ..layouts.mesh import Mesh
from ..propagation.table import LIBRARY
from ..tensor.dtensor import DTensor

wait_tensor = collectives.wait_tensor.default

#: Sent to nobody: what a batch that requires grad, and sends nothing that does, has its gradient for.
_ANCHOR = torch.empty(0, requires_grad=True)
_NOBODY = "nobody"

# ── sends and receives ──────────────────────────────────────────────────────────────────────────────────────────────────


class Peer(NamedTuple):
    """Whom a rank sends to or receives from: a route as text, on the mesh of a text (none: the whole job)."""

    mesh: str
    route: str


class Send(NamedTuple):
    """A tensor to send."""

    x: Tensor
    to: Peer


class Receive(NamedTuple):
    """A tensor to receive."""

    shape: Any
    dtype: torch.dtype
    source: Peer
    requires_grad: bool = False


def peer(
    mesh: Mesh,
    axis: str | None = None,
    *,
    shift: int | None = None,
    permutation: Sequence[int] | None = None,
    wrap: bool = True,
) -> Peer:
    """The rank that stands `shift` further along an axis of a mesh, or at the coordinate that a permutation says.

    With `wrap=False` the ends of the axis have no neighbour; a permutation says -1 for none.

    >>> import shardwise as sw
    >>> peer(sw.init_mesh(dp=2, pp=4), "pp", shift=1).route
    'shift +1 wrap pp'
    """
    mesh = Mesh.from_torch(mesh)
    flag(wrap, "p2p.peer: wrap")
    if (shift is None) == (permutation is None):
        raise MeshError(f"a peer is told by shift= or by permutation=, got {shown(shift)} and {shown(permutation)}")
    if permutation is None:
        by = integer(shift, "p2p.peer: shift")
        return Peer(mesh.write_root(), f"shift {by:+d} {'wrap' if wrap else 'end'} {mesh.named(axis)}")
    numbers = ",".join([str(number) for number in integers(permutation, "p2p.peer: permutation", -1)])
    return Peer(mesh.write_root(), f"table {numbers} {mesh.named(axis)}")


def send(x: Tensor, to: int | Mapping[int, int] | Peer | None = None, **along: Any) -> Send:
    """A tensor to send: to a rank, to a rank for each rank that sends (`{0: 1, 2: 3}`), or along an axis (see `peer`).

    >>> import shardwise as sw
    >>> mesh = sw.init_mesh(pp=4)
    >>> send(torch.ones(2), mesh=mesh, axis="pp", shift=1).to.route, send(torch.ones(2), to={0: 3}, mesh=mesh).to.route
    ('shift +1 wrap pp', 'ranks 0>3')
    """
    if isinstance(x, DTensor):
        along, x = {"mesh": x.mesh, **along}, x.to_local()
    return Send(a_tensor(x, "p2p.send: x"), _peer(to, "p2p.send: to", along))


def recv(
    shape: Sequence[int] | Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    source: int | Mapping[int, int] | Peer | None = None,
    *,
    requires_grad: bool = False,
    **along: Any,
) -> Receive:
    """A tensor to receive: from a rank, from a rank for each one that receives (`{1: 0, 3: 2}`), or along an axis (see `peer`).

    Its shape is one for all ranks, or a list of shapes, one for each rank of the mesh. A rank that nobody sends to gets zeros.
    It requires grad where a tensor does that is sent in the same batch, and where `requires_grad` says so: a rank that only
    receives cannot know by itself that the sender waits for a gradient.

    >>> import shardwise as sw
    >>> recv((2,), torch.float32, mesh=sw.init_mesh(pp=4), axis="pp", shift=-1).source.route
    'shift -1 wrap pp'
    """
    sender = _peer(source, "p2p.recv: source", along)
    flag(requires_grad, "p2p.recv: requires_grad")
    what = "p2p.recv: shape"
    given = several(shape, what, "the shape of a tensor, or a list of shapes, one for each rank of the mesh")
    each = [sizes(one, what) for one in given] if given and isinstance(given[0], Sequence) else sizes(given, what)
    return Receive(each, a_dtype(dtype, "p2p.recv: dtype"), sender, requires_grad)


def _peer(given: Any, what: str, along: dict[str, Any]) -> Peer:
    if given is None:
        return peer(**along)
    if isinstance(given, Peer):
        return given
    mesh = along.get("mesh")
    text = "" if mesh is None else Mesh.from_torch(mesh).write_root()
    if isinstance(given, Mapping):
        pairs = [f"{integer(one, what, 0)}>{integer(other, what, 0)}" for one, other in given.items()]
        return Peer(text, f"ranks {','.join(pairs)}")
    if isinstance(given, bool) or not isinstance(given, int):
        refuse(what, "a rank, a rank for each rank, such as {0: 1}, or what p2p.peer gives", given)
    return Peer(text, f"rank {integer(given, what, 0)}")


def batch(ops: Iterable[Send | Receive]) -> tuple[Tensor, ...]:
    """Send and receive together; what is received, in the order of the receives.

    The n-th tensor that one rank sends to another is the n-th that this one receives from it. Every rank of the mesh takes part
    unless ranks are named by number alone (`to=3`): then those that send or receive. What comes waits when it is first used, or
    by `wait`. The backward sends gradients the other way.

    >>> import shardwise as sw
    >>> mesh = sw.init_mesh(pp=3)
    >>> x = sw.Bundle([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    >>> y, = batch([send(x, mesh=mesh, shift=1, wrap=False), recv((1,), mesh=mesh, shift=-1, wrap=False)])
    >>> y.shards
    (tensor([0.]), tensor([1.]), tensor([2.]))
    """
    ops = [
        instance(op, (Send, Receive), "p2p.batch: one of ops", "what p2p.send or p2p.recv gives")
        for op in several(ops, "p2p.batch: ops", "several of what p2p.send and p2p.recv give")
    ]
    sends, receives = [op for op in ops if isinstance(op, Send)], [op for op in ops if isinstance(op, Receive)]
    if any([op.requires_grad for op in receives]) and not any([op.x.requires_grad for op in sends]):
        sends.append(Send(_ANCHOR, Peer(receives[0].source.mesh, _NOBODY)))
    mesh = _mesh_of([op.to for op in sends] + [op.source for op in receives])
    goals, sources = [op.to.route for op in sends], [op.source.route for op in receives]
    fields = _fields(mesh, goals, sources, [op.dtype for op in receives], [op.shape for op in receives])
    sent = [op.x for op in sends]
    if torch.compiler.is_compiling():
        return tuple(torch.ops.shardwise.p2p(sent, *fields, LIBRARY.key()))[: len(receives)]
    read = _read(sent, fields)
    if all(type(x) is Tensor for x in sent):
        check_shapes(read, sent, max(transport(read.mesh).place(read.mesh), 0))
    return tuple(exchange(sent, read))


def wait(*tensors: Tensor) -> Any:
    """Tensors that were received, when they are there; without any, everything that was sent by batches that only send.

    >>> wait(torch.ones(2))
    tensor([1., 1.])
    """
    if not tensors:
        return finish()
    for x in tensors:
        a_tensor(x, "p2p.wait: each of *tensors")
    found = tuple(_Arrived.apply(x) if isinstance(x, AsyncTensor) else x for x in tensors)
    return found if len(found) > 1 else found[0]


def _mesh_of(peers: Sequence[Peer]) -> str:
    """The one mesh that a batch is on."""
    if not peers:
        raise OperatorError("p2p.batch takes at least one send or receive, got ops without any")
    for one in peers:
        if one.mesh != peers[0].mesh:
            raise MeshError(
                f"the messages of a batch are on one mesh, got {one.mesh or 'the whole job'} and "
                f"{peers[0].mesh or 'the whole job'}; give each send and receive the same mesh="
            )
    return peers[0].mesh


# ── a batch as arguments of an operator ───────────────────────────────────────────────────────────────────────────────


def _fields(mesh: str, goals: Any, sources: Any, dtypes: Any, shapes: Sequence[Any]) -> tuple[Any, ...]:
    """A batch as arguments of the operators below, after the sent tensors: dtypes as text, since torch 2.11 makes numbers of a
    list of them; shapes as the number of dims of each (-1 - n: n dims, and each place has its own) and the sizes of all."""
    own = [len(shape) > 0 and isinstance(shape[0], Sequence) for shape in shapes]
    each = [list(shape) if places else [shape] for places, shape in zip(own, shapes, strict=True)]
    dims = [-1 - len(several[0]) if places else len(several[0]) for places, several in zip(own, each, strict=True)]
    sizes = [size for several in each for shape in several for size in shape]
    return mesh, list(goals), list(sources), [str(kind) for kind in dtypes], dims, sizes


def _read(sent: Sequence[Tensor], fields: Sequence[Any]) -> Batch:
    """The batch that such arguments tell."""
    mesh, goals, sources, dtypes, dims, sizes = fields
    on = seen(Mesh.read(mesh)) if mesh else _whole_job(sent)
    shapes, rest = list[Shape](), iter(sizes)
    for count in dims:
        width, places = (count, 1) if count >= 0 else (-1 - count, len(on.ranks))
        each = [tuple(islice(rest, width)) for _ in range(places)]
        shapes.append(each[0] if count >= 0 else PerRank(each.__getitem__))
    kinds = (getattr(torch, kind.removeprefix("torch.")) for kind in dtypes)
    return Batch(on, tuple(goals), tuple(sources), tuple(shapes), tuple(kinds))


def _whole_job(sent: Sequence[Tensor]) -> Mesh:
    """All ranks there are, as a mesh of one axis."""
    bundles = [len(x.shards) for x in sent if isinstance(x, Bundle)]
    if not bundles and not dist.is_initialized():
        raise MeshError("ranks by number need a mesh= in a simulated world: which ranks there are is not known here")
    count = bundles[0] if bundles else dist.get_world_size()
    device = "cuda" if not bundles and "nccl" in dist.get_backend_config() else "cpu"
    return Mesh(("rank",), (count,), range(count), device, "simulated" if bundles else "processes")


# ── autograd, and the two ways to run ─────────────────────────────────────────────────────────────────────────────────


def exchange(sent: Sequence[Tensor], messages: Batch) -> list[Tensor]:
    """What is received of a batch, differentiable."""
    if len(sent) != len(messages.goals):
        raise OperatorError(f"a batch of {len(messages.goals)} sends got {len(sent)} tensors")
    check_matched(messages, sent)
    world = transport(messages.mesh)
    if any(x.requires_grad and x.numel() and world.replicate(x, messages.mesh) is not x for x in sent):
        raise OperatorError(
            "p2p.batch: a plain tensor that requires grad in a simulated world, where each rank has its own: send what a "
            "DTensor's to_local() gives, or a Bundle"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in sent):
        return list(_Exchange.apply(messages, *sent))
    return run(sent, messages)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, messages: Batch, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.messages, ctx.like = messages, [like(x) for x in sent]
        outs = run(sent, messages)
        ctx.mark_non_differentiable(*(out for out in outs if not _flows(out.dtype)))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        messages: Batch = ctx.messages
        back = [i for i, kind in enumerate(messages.dtypes) if _flows(kind)]
        forth = [i for i, (_, kind) in enumerate(ctx.like) if _flows(kind)]
        shapes, kinds = zip(*(ctx.like[i] for i in forth), strict=True)
        goals, sources = (tuple(texts[i] for i in kept) for texts, kept in ((messages.sources, back), (messages.goals, forth)))
        reverse = Batch(messages.mesh, goals, sources, tuple(shapes), tuple(kinds))
        given = [_zeros(messages, i) if (grad := grads[i]) is None else wait(grad) for i in back]
        found: list[Tensor | None] = [None] * len(ctx.like)
        for i, grad in zip(forth, exchange(given, reverse), strict=True):
            found[i] = None if messages.goals[i] == _NOBODY else wait(grad)
        return None, *found


def _flows(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex


def like(x: Tensor) -> tuple[Shape, torch.dtype]:
    """The shape, at every place, and the dtype of a local value."""
    if isinstance(x, Bundle):
        shapes = [tuple(shard.shape) for shard in x.shards]
        return (shapes[0] if len(set(shapes)) == 1 else PerRank(shapes.__getitem__)), x.dtype
    return tuple(x.shape), x.dtype


def _zeros(messages: Batch, index: int) -> Tensor:
    """The gradient of a received tensor that nobody used."""
    on, kind = messages.mesh, messages.dtypes[index]
    shape = PerRank(lambda place: messages.shape(index, place))
    device = torch.device(on.device)
    return transport(on).each(lambda size, device: torch.zeros(size, dtype=kind, device=device), on, shape, device)


def run(sent: Sequence[Tensor], messages: Batch) -> list[Tensor]:
    """What is received of a batch, perhaps on its way still; below autograd."""
    sent = [wait(x) for x in sent]
    world = transport(messages.mesh, "p2p")
    if world.traced(sent[0] if sent else torch.empty(0)):
        return [wait_tensor(out) for out in _leave(sent, messages)][: len(messages.sources)]
    if watchers.now:
        key = (messages.mesh, messages.goals, messages.sources)
        return watched("p2p", key, tuple(sent), lambda: [wait_tensor(out) for out in world.exchange(sent, messages)])
    return [AsyncTensor(out) if type(out) is Tensor else out for out in world.exchange(sent, messages)]


class _Arrived(Function):
    """A tensor that has arrived, in place of one that may be on its way."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return guarded(x.trigger_wait)().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ── a batch as operators of a traced program ──────────────────────────────────────────────────────────────────────────

_ARGUMENTS = "Tensor[] sent, str mesh, str[] goals, str[] sources, str[] dtypes, int[] dims, SymInt[] sizes"
torch.library.define("shardwise::p2p", f"({_ARGUMENTS}, str library) -> Tensor[]")
torch.library.define("shardwise::messages", f"({_ARGUMENTS}) -> Tensor[]")


def _composed(sent: list[Tensor], *fields: Any) -> list[Tensor]:
    """A batch in a function of the user's: made of the operators below, forward and backward, when it is traced further."""
    batch = _read(sent, fields[:-1])
    transport(batch.mesh).ready(batch.mesh)
    return exchange(sent, batch) or [torch.empty(0, device=batch.mesh.device)]


def _leave(sent: Sequence[Tensor], messages: Batch) -> list[Tensor]:
    """Leave a batch in the program that is traced."""
    current()  # torch is patched for a trace that communicates
    place = max(transport(messages.mesh).place(messages.mesh), 0)
    if varies(messages.shapes, len(messages.mesh.ranks)):
        mark_specific(messages.shapes)
    if messages.alone and steering.get().only_alike:
        refuse_unequal(messages.shapes)
    shapes = [messages.shape(index, place) for index in range(len(messages.shapes))]
    fields = _fields(messages.mesh.text, messages.goals, messages.sources, messages.dtypes, shapes)
    return torch.ops.shardwise.messages(list(sent), *fields)


def _begin(sent: list[Tensor], *fields: Any) -> list[Tensor]:
    batch = _read(sent, fields)
    # A batch that only sends gives something to wait for, so that no compiler leaves it out.
    return transport(batch.mesh).exchange(sent, batch) or [torch.empty(0, device=batch.mesh.device)]


def _begin_fake(sent: list[Tensor], *fields: Any) -> list[Tensor]:
    batch = _read(sent, fields)
    device = batch.mesh.device
    made = [torch.empty(batch.shape(index, 0), dtype=kind, device=device) for index, kind in enumerate(batch.dtypes)]
    return made or [torch.empty(0, device=device)]


torch.library.impl("shardwise::p2p", "CompositeImplicitAutograd", _composed)
torch.library.impl("shardwise::messages", "CompositeExplicitAutograd", _begin)
torch.library.register_fake("shardwise::messages", _begin_fake)
keep_alive(torch.ops.shardwise.messages.default)
