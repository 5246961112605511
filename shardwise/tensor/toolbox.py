"""`Tools`: what a program, which runs on DTensors in place of one operator, may use; and `wrap`, which makes a DTensor.

`cls` is the tensor subclass; its instances carry `_local` and `_layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Generator, SymInt, Tensor

from .._torch.tensors import known, make_wrapper, rebuilt, tracing_context, unseen, untraced
from ..comm import seen, transport
from ..comm.rank_specific import mark_specific
from ..comm.watch.log import watching
from ..errors import OperatorError
from ..layouts.layout import Layout, PerRank, SymbolicLayout, contiguous_stride, make_layout
from ..layouts.mesh import Mesh
from ..layouts.placement import Replicate
from ..layouts.text import form_of
from ..random.keys import next_key
from ..redistribution.run import move


@untraced
def wrap(cls: Any, local: Tensor, layout: Layout) -> Any:
    """A DTensor around a local value."""
    if isinstance(layout, SymbolicLayout):
        return _wrap_symbolic(cls, local, layout)
    self = make_wrapper(cls, layout.shape, layout.stride, None, None, layout.dtype, torch.strided, _device(local, layout))
    self._local, self._layout = local, layout
    if not layout.even and layout.mesh.world != "simulated":
        mark_specific(layout)
    return self


def _device(local: Tensor, layout: Layout) -> torch.device:
    """The device that a DTensor shows: its mesh's, but for one without data."""
    return local.device if local.is_meta else layout.device


def maker(cls: Any, layout: Layout) -> Any:
    """Makes a wrapper, of a local value that is not on meta, that shows the sizes of a layout; quicker where torch may work the
    strides out."""
    strides = None if layout.stride == contiguous_stride(layout.shape) else layout.stride
    return partial(make_wrapper, cls, layout.shape, strides, None, None, layout.dtype, torch.strided, layout.device)


def _wrap_symbolic(cls: Any, local: Tensor, layout: Layout) -> Any:
    """The same for symbolic sizes: they are told by those of the local value, so that a tracer knows them."""
    form = form_of(layout)
    held = [n * form.parts(dim) if form.parts(dim) > 1 else n for dim, n in enumerate(local.shape)]
    shape = [told if isinstance(size, SymInt) else size for size, told in zip(layout.shape, held, strict=True)]
    stride = [rebuilt(step, (*shape, *local.shape, *contiguous_stride(shape))) for step in layout.stride]
    with unseen():
        shape, stride = [known(n) for n in shape], [known(n) for n in stride]
        self = make_wrapper(cls, shape, stride, None, None, layout.dtype, torch.strided, _device(local, layout))
    self._local, self._layout = local, layout
    return self


def sever(x: Any, func: Any, args: Any, kwargs: Any, index: int) -> Any:
    """`x`, result number `index` of a view operator for which data had to move: a copy that follows what it is a view of."""
    out = wrap(type(x).Severed, x._local, x._layout)
    out.follow(args[0], partial(_again, func, args, kwargs, index))
    return out


def _again(func: Any, args: Any, kwargs: Any, index: int) -> Any:
    with torch.no_grad():
        outs = func(*args, **kwargs)
    return outs[index] if isinstance(outs, list | tuple) else outs


def copied_view(x: Any, memo: dict[int, Any]) -> Any:
    """The deep copy of what `sever` gave: the same view of a copy of what it is a view of."""
    if id(x) not in memo:
        func, args, kwargs, index = x._again.args
        memo[id(x)] = _again(func, *copy.deepcopy((args, kwargs), memo), index)
    return memo[id(x)]


def local_on(cls: Any, tensor: Any, mesh: Mesh) -> tuple[Tensor, Layout]:
    """A tensor's local value and layout on a mesh; a plain tensor is taken as replicated."""
    if not isinstance(tensor, cls):
        layout = make_layout(tensor.shape, mesh, [Replicate()] * mesh.ndim, tensor.dtype, tensor.stride())
        return transport(mesh).replicate(tensor.resolve_conj().resolve_neg(), mesh), layout
    layout = tensor._layout
    if layout.mesh is mesh:
        return tensor._local, layout
    inside = layout.without(axis for axis in layout.mesh.axes if axis not in mesh.axes)
    return move(tensor._local, layout, inside), inside.replace(mesh=mesh)


def key_on(mesh: Mesh, generator: Generator | None = None) -> tuple[int, int]:
    """The keys of one random call on a mesh, whose ranks compare, when torch was seeded, what these are made of."""
    return next_key(generator, mesh.root, partial(_agree, mesh.root))


def _agree(mesh: Mesh, made_of: str, due: bool) -> None:
    if due or watching.get() is not None:
        transport(mesh, "random numbers").agree(made_of, mesh, due)


def _key_now(after: Tensor | None, mesh: str) -> Tensor:
    return torch.tensor(key_on(seen(Mesh.read(mesh))))


torch.library.impl("shardwise::random_key", "CompositeExplicitAutograd", _key_now)


class Tools:
    """What a program, which runs on DTensors in place of one operator, may use beside ordinary torch operators."""

    __slots__ = ("cls", "operator")

    def __init__(self, cls: Any, operator: str = "") -> None:
        self.cls, self.operator = cls, operator

    def is_distributed(self, value: Any) -> bool:
        """Whether a value is a DTensor."""
        return isinstance(value, self.cls)

    def layout(self, x: Any) -> Layout:
        """The layout of a DTensor."""
        return x._layout

    def local(self, x: Any) -> Tensor:
        """The local value of a DTensor."""
        return x._local

    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """A DTensor around a local value."""
        return wrap(self.cls, local, layout)

    def move(self, x: Any, layout: Layout, operator: str = "") -> Any:
        """The same tensor in another layout."""
        return wrap(self.cls, move(x._local, x._layout, layout, operator or self.operator), layout)

    def distribute(self, tensor: Tensor, layout: Layout) -> Any:
        """A plain tensor, equal on every rank, in a layout."""
        world, whole = transport(layout.mesh), layout.replicated()
        local = world.replicate(tensor, layout.mesh)
        if layout is whole:
            local = world.each(torch.clone, layout.mesh, local)  # ranks of one process must not share what they write to
        return wrap(self.cls, move(local, whole, layout), layout)

    def replicated(self, x: Any, mesh: Mesh, operator: str = "") -> Any:
        """A DTensor, or a plain tensor, whole on every rank."""
        local, layout = local_on(self.cls, x, mesh)
        return wrap(self.cls, move(local, layout, layout.replicated(), operator), layout.replicated())

    def plain(self, x: Any, operator: str = "") -> Tensor:
        """The whole value as an ordinary tensor, on every rank."""
        layout = x._layout
        return transport(layout.mesh).plain(move(x._local, layout, layout.replicated(), operator))

    def become(self, x: Any, value: Any) -> None:
        """Make `x` show the data of another DTensor, and its shape and layout, in place."""
        torch.Tensor.data.__set__(x, value)  # type: ignore[attr-defined]  # the sizes that the wrapper itself shows
        x._local, x._layout = value._local, value._layout

    def key(self, mesh: Mesh, generator: Generator | None = None) -> tuple[int, int]:
        """The keys of one random call on a mesh."""
        return key_on(mesh, generator)

    def each(self, kernel: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """A function of local tensors on every rank; DTensors among the arguments give their locals."""
        locals_ = [a._local if isinstance(a, self.cls) else a for a in args]
        return transport(mesh).each(kernel, mesh, *locals_)

    def look(self, check: Callable[[Tensor], None], x: Any) -> None:
        """Have every rank look at what it holds of a tensor, where there are values to look at: not in a trace, nor on a rank
        outside the mesh; and no device that runs ahead is waited for."""
        if tracing_context() is not None or x.device.type != "cpu":
            return
        if not self.is_distributed(x):
            check(x)
        elif transport(x._layout.mesh).place(x._layout.mesh) >= 0:
            self.each(check, x._layout.mesh, x)

    def number(self, value: PerRank, mesh: Mesh) -> Tensor:
        """A number of each rank, as a local 0-d tensor."""
        return transport(mesh).number(value, mesh)

    def offset(self, layout: Layout, dim: int) -> Tensor:
        """The first global index of a dim on each rank, as a local 0-d tensor."""
        return transport(layout.mesh).number(PerRank(lambda place: layout.offset(place)[dim]), layout.mesh)

    def mesh(self, *values: Any) -> Mesh:
        """The mesh of the first DTensor among some arguments (lists included)."""
        for value in values:
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, self.cls):
                    return item._layout.mesh
        raise OperatorError("an operator without a DTensor reached Shardwise; this is a fault of Shardwise")


#: dtypes of indices; uint8 is one of masks.
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def as_int(index: Any) -> Any:
    """An index that stands for an integer as one: a 0-d tensor of integers, or a number of another library."""
    if isinstance(index, Tensor):
        is_int = not index.ndim and index.dtype in INTEGERS and tracing_context() is None
    else:
        is_int = isinstance(index, Integral) and not isinstance(index, bool)
    return int(index) if is_int else index


def written_at(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """`index` and `value` to write to a DTensor. An integer would select from a dim: where that is sharded, a slice of one
    keeps the dim, and with it a view to write through."""
    several = tuple(map(as_int, index)) if isinstance(index, tuple) else (as_int(index),)
    if not all(i is Ellipsis or type(i) in (int, slice) for i in several) or several.count(Ellipsis) > 1:
        return index, value
    full = by_dim(several, x.shape)
    cut = [dim for dim, i in enumerate(full[: x.ndim]) if type(i) is int and x._layout.axes_of(dim)]
    if isinstance(value, Tensor) and value.ndim:
        value = with_dims(value, full, cut)
    return tuple(slice(i, i + 1 or None) if dim in cut else i for dim, i in enumerate(full)), value


def by_dim(index: tuple[Any, ...], shape: Sequence[int]) -> list[Any]:
    """For each dim what an index of integers, slices and one ellipsis says of it. Integers that are no index of their dim are
    refused: as a slice one would select nothing.

    >>> by_dim((..., 1), (2, 3))
    [slice(None, None, None), 1]
    """
    missing = len(shape) - sum(i is not Ellipsis for i in index)
    full = [i for j in index for i in ([slice(None)] * missing if j is Ellipsis else [j])]
    full += [slice(None)] * (len(shape) - len(full))
    for dim, (i, size) in enumerate(zip(full, shape, strict=False)):
        if type(i) is int and not -size <= i < size:
            raise IndexError(f"index {i} is out of bounds for dimension {dim} with size {size}")
    return full


def with_dims(value: Tensor, index: Sequence[Any], dims: Sequence[int]) -> Tensor:
    """`value` with a dim of size 1 for each of `dims`, where an integer of the index (an entry for each dim) became a slice."""
    for dim in reversed(dims):
        behind = sum(type(i) is not int for i in index[dim + 1 :])
        if value.ndim >= behind:
            inserted = sum(other > dim for other in dims)
            value = value.unsqueeze(value.ndim - behind - inserted)
    return value
