"""A world of many ranks in this process: `Bundle`, one tensor per place, and `Simulated`, the transport made of bundles.

Reads meshes and tensors, gives bundles. Knows nothing of layouts, of operators' meaning or of process groups.

>>> import torch
>>> both = Bundle([torch.zeros(2), torch.ones(2)])
>>> (both + 1).shards[1]
tensor([2., 2.])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.compiler import untraced
from .._torch.tensors import OpOverload, make_wrapper, no_dispatch, no_torch_function, storage_of
from ..base.argument_checks import a_tensor, flag, integers, optional, several
from ..base.schema import schema_of
from ..errors import MeshError, WorldError
from ..layouts.layout import PerRank
from ..layouts.mesh import Mesh, index_of
from .encoding import combine
from .messages import Batch, describe, fits, pairs, refuse
from .transport import Assumed, Counts, Fact, Transport, alike, check_chunks, check_shards

# ── Bundle ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _everywhere(cls: type, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
    """Run an operator at every place."""
    if stands_back(cls, types):
        return NotImplemented
    kwargs = kwargs or {}
    places = _places((args, kwargs))
    if places > 1 and schema_of(func).written:
        _check_writes(func, args, kwargs)
    outs = [func(*at, **named) for at, named in zip(_by_place(args, places), _by_place(kwargs, places), strict=True)]
    return outputs(func, _bundled(outs, func), args, kwargs)


def stands_back(cls: type, types: Sequence[type]) -> bool:
    """Whether another wrapper (a DTensor around local values, say) knows better what to do with the local values beside it."""
    return any([hasattr(kind, "__tensor_flatten__") for kind in types if kind is not cls])


@untraced
class Bundle(torch.Tensor):
    """One tensor per place of a simulated mesh; every operator runs on each. Its shape is that of the first shard.

    >>> b = Bundle([torch.zeros(2), torch.ones(2)])
    >>> b.sum().shards
    (tensor(0.), tensor(2.))
    """

    shards: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls: type[Bundle], shards: Iterable[Tensor], requires_grad: bool = False, stride: Any = None) -> Bundle:
        flag(requires_grad, "Bundle: requires_grad")
        optional(integers, stride, "Bundle: stride", 0)
        tensors = several(shards, "Bundle: shards", "several tensors, one for each place")
        if not tensors:
            raise WorldError("a Bundle holds at least one shard, got shards=()")
        first = tensors[0]
        for shard in tensors:
            a_tensor(shard, "Bundle: each of shards")
            if isinstance(shard, Bundle) or shard.dtype != first.dtype or shard.device != first.device:
                kinds = " and ".join(f"{type(x).__name__} {x.dtype} on {x.device}" for x in (first, shard))
                raise WorldError(
                    f"the shards of a Bundle are plain tensors of one dtype, on one device, got {kinds}; convert them"
                )
        return _bundle(tensors, requires_grad, stride)

    __torch_function__ = no_torch_function
    __torch_dispatch__: Any = classmethod(_everywhere)

    def tolist(self) -> Any:
        """The value as Python numbers, if it is the same at every place."""
        return _agreed([shard.tolist() for shard in self.shards], "tolist")

    def _text(self, **_: Any) -> str:
        lines = [f"  {place}: {shard!r}".replace("\n", "\n     ") for place, shard in enumerate(self.shards)]
        tail = [f"  grad_fn={self.grad_fn}"] if self.grad_fn is not None else []
        return "\n".join(["Bundle(", *lines, *tail, ")"])

    __repr__: Any = _text

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Bundle, (list(self.shards), self.requires_grad)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("shard_"):
            return self.shards[int(name[len("shard_") :])]
        raise AttributeError(f"Bundle has no attribute {name!r}")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [f"shard_{place}" for place in range(len(self.shards))], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Bundle:
        shards = [inner[f"shard_{place}"] for place in range(len(inner))]
        if all(type(shard) is Tensor for shard in shards):  # a compiler computes once what is equal on several ranks
            shards = _apart(shards)
        return Bundle(shards, stride=stride)


def _bundle(shards: tuple[Tensor, ...], requires_grad: bool = False, stride: Any = None) -> Bundle:
    first = shards[0]
    strides = first.stride() if stride is None or first.numel() else stride  # strides of nothing mean nothing
    facts = first.storage_offset(), None, first.dtype, first.layout, first.device
    self: Bundle = make_wrapper(Bundle, first.shape, strides, *facts, requires_grad=requires_grad)
    self.shards = shards
    return self


torch.serialization.add_safe_globals([Bundle])


def _check_writes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to write what every place has into one ordinary tensor: one value after the other would land there."""
    given = schema_of(func).named(args, kwargs)
    for name in schema_of(func).written:
        x = given.get(name)
        if isinstance(x, Tensor) and not isinstance(x, Bundle):
            raise WorldError(
                f"{func} writes a Bundle, one value for each rank, into an ordinary tensor of shape {list(x.shape)}, "
                "which all simulated ranks share; give every rank its own: sw.Bundle([x.clone() for each rank])"
            )


def outputs(func: OpOverload, outs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator on wrappers gives, from the wrapped results that it gave on what they wrap: each written argument itself
    in the place of the wrapper made for it."""
    facts = schema_of(func)
    if facts.reshapes:
        with no_dispatch():  # the wrapper's own sizes and strides change with those of its shards
            func(*args, **kwargs)
    if not facts.written or not facts.returns:
        return outs
    given = facts.named(args, kwargs)
    several = outs if len(facts.returns) > 1 else (outs,)
    found = [out if name is None else given[name] for out, name in zip(several, facts.returns, strict=True)]
    return tuple(found) if len(found) > 1 else found[0]


# ── shards out of arguments, bundles out of results ───────────────────────────────────────────────────────────────────


def _by_place(value: Any, places: int) -> Sequence[Any]:
    """For each place `value`, with the place's own for every Bundle and PerRank in it (through lists, tuples and dicts)."""
    kind = type(value)
    if kind is tuple or kind is list:
        columns = [_by_place(item, places) for item in value]
        return [kind([column[place] for column in columns]) for place in range(places)]
    if kind is dict:
        rows = _by_place(list(value.values()), places)
        return [dict(zip(value, row, strict=True)) for row in rows]
    if isinstance(value, Bundle):
        return value.shards
    return [value.at(place) for place in range(places)] if isinstance(value, PerRank) else (value,) * places


def _places(value: Any) -> int:
    """The number of places of the bundles in `value`; 0 if there is none."""
    kind = type(value)
    if kind is not tuple and kind is not list and kind is not dict:
        return len(value.shards) if isinstance(value, Bundle) else 0
    found = {count for item in (value.values() if kind is dict else value) if (count := _places(item))}
    if len(found) > 1:
        raise WorldError(f"bundles of {sorted(found)} places in one operator; they come from meshes of different sizes")
    return found.pop() if found else 0


def _bundled(outs: list[Any], what: object) -> Any:
    """One result from the results at every place."""
    first = outs[0]
    if isinstance(first, Tensor):
        alike = len({(type(out), out.dtype, out.device) for out in outs}) == 1 and type(first) is Tensor
        return _bundle(tuple(outs)) if alike else Bundle(outs)
    if first is None:
        return None
    if isinstance(first, tuple | list):
        several = [_bundled([out[i] for out in outs], what) for i in range(len(first))]
        return tuple(several) if isinstance(first, tuple) else several
    return _agreed(outs, what)


def _agreed(values: list[Any], what: object) -> Any:
    first = values[0]
    for place, value in enumerate(values):
        if value != first and not (value != value and first != first):  # nan is like nan
            raise WorldError(
                f"{what} gives {first!r} at place 0 and {value!r} at place {place} of a simulated world: there is no "
                "one value to go on with. Look at `.shards`, or make it equal on every rank first (full_tensor())."
            )
    return first


# ── Simulated ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Simulated(Transport):
    """The transport to a world of bundles. All ranks are this process: there are no groups to make, and none to tell.

    >>> mesh = Mesh(("tp",), (2,), range(2), "cpu", "simulated")
    >>> Simulated().all_reduce(Bundle([torch.zeros(1), torch.ones(1)]), "sum", mesh, ("tp",)).shards
    (tensor([1.]), tensor([1.]))
    """

    holds_all = True

    def traced(self, x: Tensor) -> bool:
        """Never: all ranks are in this process, and what one of them knows is no secret of another."""
        return False

    def place(self, mesh: Mesh) -> int:
        """The first place: one process is all of them."""
        return 0

    def all_reduce(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce each group in its order; every place gets its own copy of one and the same result."""
        return _by_group(x, mesh, axes, lambda shards: [combine(shards, kind)] * len(shards))

    def all_gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Concatenate each group's shards along dim 0."""
        return _by_group(x, mesh, axes, lambda shards: [torch.cat(shards)] * len(shards))

    def reduce_scatter(self, x: Tensor, kind: str, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Reduce each group and deal out equal chunks of dim 0."""

        def deal(shards: list[Tensor]) -> list[Tensor]:
            check_chunks(len(shards[0]), len(shards), axes)
            return list(combine(shards, kind).tensor_split(len(shards)))

        return _by_group(x, mesh, axes, deal)

    def all_to_all(self, x: Tensor, send: Counts, receive: Counts, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Split each shard by `send`, and concatenate what each place receives."""
        shards, out = _shards(x, mesh), {}
        sends, receives = _by_place(send, len(shards)), _by_place(receive, len(shards))
        for group in mesh.groups(axes):
            chunks = [shards[place].split(list(sends[place])) for place in group]
            for index, place in enumerate(group):
                coming = [several[index] for several in chunks]
                counts = tuple(len(shard) for shard in coming)
                if counts != (expected := tuple(receives[place])):
                    raise WorldError(
                        f"all_to_all over axes {axes}: place {place} expects {expected} elements from places {group}, "
                        f"which send it {counts}"
                    )
                out[place] = torch.cat(coming)
        return Bundle(out[place] for place in range(len(shards)))

    def exchange(self, sent: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """Copy every message from the place that sends it to the one that receives it."""
        mesh, places = batch.mesh, range(len(batch.mesh.ranks))
        held = [_shards(x, mesh) for x in sent]
        out = [
            [torch.zeros(batch.shape(i, place), dtype=kind, device=mesh.device) for place in places]
            for i, kind in enumerate(batch.dtypes)
        ]
        for pair in pairs(batch):
            x = None if pair.sent is None else held[pair.sent][pair.sender]
            if x is None or pair.received is None or not fits(batch, pair, x):
                refuse(batch, pair, [describe(x.dtype, x.shape) for x in (shards[pair.sender] for shards in held)])
            out[pair.received][pair.receiver] = x.clone(memory_format=torch.contiguous_format)
        return [Bundle(shards) for shards in out]

    def broadcast(self, x: Tensor, mesh: Mesh, source: int = 0) -> Tensor:
        """The shard of the source, copied to every place of its group."""
        axes = mesh.sorted_axes(mesh.axes)
        place = index_of(mesh, (source,) * mesh.ndim, axes)
        return _by_group(x, mesh, axes, lambda shards: [shards[place]] * len(shards))

    def each(self, function: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """Call the function once for each place, with that place's arguments."""
        _check_places(_places(args), mesh)
        return _bundled([function(*at) for at in _by_place(args, len(mesh.ranks))], function)

    def number(self, value: PerRank, mesh: Mesh) -> Tensor:
        """One int64 per place."""
        return Bundle(torch.tensor(value.at(place), device=mesh.device) for place in range(len(mesh.ranks)))

    def replicate(self, tensor: Tensor, mesh: Mesh) -> Tensor:
        """The tensor itself at every place, shared."""
        return tensor if isinstance(tensor, Bundle) else Bundle([tensor.detach()] * len(mesh.ranks))

    def plain(self, x: Tensor) -> Tensor:
        """The first shard."""
        return x.shards[0] if isinstance(x, Bundle) else x

    def own(self, x: Tensor, mesh: Mesh, shape: PerRank) -> Tensor:
        """A shard for every rank. An ordinary tensor stands for what each made: the first keeps it, the others get copies."""
        shards = _shards(x, mesh)
        return x if isinstance(x, Bundle) and shared(shards) is None else Bundle(_apart(shards))

    def reseat(self, x: Tensor, have: Mesh, want: Mesh, shape: PerRank) -> Tensor:
        """The shards in the order of the other mesh's ranks."""
        held = dict(zip(have.ranks, _shards(x, have), strict=True))
        first = held[have.ranks[0]]
        seats = enumerate(want.ranks)
        return Bundle(held[rank] if rank in held else first.new_empty(shape.at(place)) for place, rank in seats)

    def shapes(self, x: Tensor, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """The shape of every shard."""
        return alike([Fact.of(shard) for shard in _shards(x, mesh)], mesh.root)

    def assume(self, x: Tensor, mesh: Mesh, shape: PerRank) -> None:
        """Look at every shard."""
        check_shards(self.shapes(x, mesh), shape, mesh.root)

    def assumed(self, mesh: Mesh) -> list[Assumed]:
        """Nothing: it is checked when it is assumed."""
        return []


def _shards(x: Tensor, mesh: Mesh) -> tuple[Tensor, ...]:
    if isinstance(x, Bundle):
        _check_places(len(x.shards), mesh)
        return x.shards
    return (x,) * len(mesh.ranks)


def shared(shards: Sequence[Tensor]) -> tuple[int, int] | None:
    """The first two places whose shards have memory in common, so that a write at one would be one at the other; or None.

    >>> x = torch.zeros(4)
    >>> shared([x[:2], x[2:]]), shared([x[:2], x[2:], x[1:3]])
    (None, (0, 2))
    """
    if len({storage_of(shard) for shard in shards}) == len(shards):
        return None
    return next(((i, j) for j, y in enumerate(shards) for i, x in enumerate(shards[:j]) if _overlap(x, y)), None)


def _apart(shards: Sequence[Tensor]) -> list[Tensor]:
    """The shards, with copies in place of those that have memory in common with one before them."""
    apart: list[Tensor] = []
    for shard in shards:
        apart.append(shard.clone() if any(_overlap(shard, other) for other in apart) else shard)
    return apart


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors lie in one storage and, from their first to their last element, have some of it in common."""
    if not x.numel() or not y.numel() or storage_of(x) != storage_of(y):
        return False
    starts = [int(each.storage_offset()) for each in (x, y)]
    lengths = [sum(int((n - 1) * step) for n, step in zip(each.shape, each.stride(), strict=True)) for each in (x, y)]
    return starts[0] <= starts[1] + lengths[1] and starts[1] <= starts[0] + lengths[0]


def _check_places(count: int, mesh: Mesh) -> None:
    if count not in (0, len(mesh.ranks)):
        raise MeshError(f"a bundle of {count} shards meets mesh {mesh.root} of {len(mesh.ranks)} ranks; use one mesh for both")


def _by_group(x: Tensor, mesh: Mesh, axes: tuple[str, ...], collective: Callable[[list[Tensor]], list[Tensor]]) -> Bundle:
    """Run a collective in each group; each place gets its own contiguous copy, so that no two places share memory."""
    shards, out = _shards(x, mesh), list(_shards(x, mesh))
    for group in mesh.groups(axes):
        results = collective([shards[place] for place in group])
        for place, result in zip(group, results, strict=True):
            out[place] = result.clone(memory_format=torch.contiguous_format)
    return Bundle(out)
