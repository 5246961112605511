"""Layout: what every rank holds of a global tensor. Immutable, interned (equality is identity), one line when printed.

A dim is an ordered product of *factors*, almost always one. A factor is sharded by an ordered tuple of mesh axes (major to
minor) into one contiguous interval per shard. An axis that shards no dim replicates, or holds partial values (`Partial`).

>>> mesh = Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated")
>>> Layout.of(mesh, [[sharded(8, ["dp"], mesh)], [whole(16)]])
f32[8@dp, 16]
>>> Layout.of(mesh, [[Factor(10, ("tp",), (1, 2, 3, 4))], [whole(16)]], [("dp", "sum")])
f32[10@tp{1,2,3,4}, 16 | sum@dp]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import SymInt

from .._torch.compiler import OpaqueBaseMeta, constant_type
from .._torch.symbols import hint, known
from ..base.argument_checks import a_dtype, a_text, instance, integer, integers, optional, refuse, several, shown
from ..base.caches import intern
from ..errors import LayoutError, Unsettled
from .dims import shards_of
from .dtypes import DTYPES
from .factor import Dim, Factor, Run, canonical, factors_of, parts_of, read_parts, shard_runs, sharded, whole, write_parts
from .mesh import Mesh, index_of
from .placement import KINDS, Partial, Placement, Replicate

__all__ = ["Layout", "Number", "PerRank", "SymbolicLayout", "contiguous_stride", "dense_stride", "restore_layout"]
__all__ += ["Dim", "Factor", "Run", "canonical", "shard_runs", "sharded", "whole"]  # of `factor`

_REPLICATE = Replicate()
#: What a layout is made of.
_PARTS = {
    "mesh": "a Mesh",
    "dims": "for each dim a list of factors",
    "partials": "pairs of an axis and what is partial there, such as ('dp', 'sum')",
    "dtype": "a torch.dtype",
    "stride": "an integer for each dim",
}

#: Reductions that do not exist for some dtypes.
_NOT_OF: dict[str, Callable[[torch.dtype], bool]] = {
    **dict.fromkeys(("max", "min"), lambda dtype: dtype.is_complex),
    **dict.fromkeys(("band", "bor", "bxor"), lambda dtype: dtype.is_floating_point or dtype.is_complex),
}


class Layout(metaclass=OpaqueBaseMeta):
    """Mesh, shape, stride, dtype, and for each dim which axes shard it and how. Made by `make_layout` or `Layout.of`."""

    __slots__ = (*_PARTS, "__weakref__", "device", "even", "nbytes", "ndim", "shape", "states")
    mesh: Mesh
    dims: tuple[Dim, ...]
    partials: tuple[tuple[str, str], ...]
    shape: torch.Size
    ndim: int
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    #: axis → the dim it shards (int) or the kind that is partial (str); absent where it replicates
    states: dict[str, int | str]
    #: whether every rank holds a local tensor of the same shape
    even: bool
    #: bytes of the largest local shard
    nbytes: int

    @staticmethod
    def of(
        mesh: Mesh,
        dims: Iterable[Iterable[Factor]],
        partials: Iterable[tuple[str, str]] = (),
        dtype: torch.dtype = torch.float32,
        stride: Sequence[int] | None = None,
    ) -> Layout:
        """The interned layout of these parts; dims need not be canonical."""
        try:
            placed = tuple([canonical(dim) for dim in dims])
            shape = torch.Size([dim[0].size if len(dim) == 1 else math.prod(f.size for f in dim) for dim in placed])
            strides = contiguous_stride(shape) if stride is None else tuple(stride)
            kinds = tuple(sorted(partials, key=lambda item: mesh.axes.index(item[0])))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            _refuse_parts(mesh, dims, partials, dtype, stride)
            parts = ", ".join(f"{name} ({allowed})" for name, allowed in _PARTS.items())
            raise LayoutError(f"Layout.of: these parts make no layout, which has {parts}") from error
        content = (mesh, placed, kinds, dtype, strides)
        try:
            found = _layouts.get(content)
        except TypeError:  # a size is a symbol
            return _with_symbols(content)
        return found or intern(_layouts, content, lambda: _build(content, shape))

    def replace(self, **changes: Any) -> Layout:
        """This layout with some of mesh, dims, partials, dtype, stride changed."""
        if not changes.keys() <= _PARTS.keys():
            raise LayoutError(f"Layout.replace changes some of {', '.join(_PARTS)}, got {', '.join(changes)}")
        return Layout.of(**{name: changes.get(name, getattr(self, name)) for name in _PARTS})

    def without(self, axes: Iterable[str]) -> Layout:
        """This layout with `axes` replicated: shards by them and reductions over them gone."""
        known = self.mesh.root.axis_sizes.keys()
        gone = frozenset(axes) if isinstance(axes, frozenset | tuple | dict) else frozenset(self.mesh.sorted_axes(axes))
        if not gone <= known:
            self.mesh.sorted_axes(gone)  # which says what is not known
        if not gone & self.states.keys():
            return self
        dims = [[_without(f, gone, self.mesh) for f in dim] for dim in self.dims]
        return self.replace(dims=dims, partials=[(a, k) for a, k in self.partials if a not in gone])

    @property
    def concrete(self) -> Layout:
        """This layout; for one with symbolic sizes, the same at the sizes at hand."""
        return self

    def reduced(self) -> Layout:
        """This layout with nothing partial."""
        return self.replace(partials=()) if self.partials else self

    def replicated(self) -> Layout:
        """This layout with every axis replicated."""
        return self.without(self.states)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis, from which `make_layout` makes this layout (a `StridedShard` where `Shard` cannot)."""
        placed: dict[str, Placement] = {axis: Partial(kind) for axis, kind in self.partials}
        for index, dim in enumerate(self.dims):
            placed |= shards_of(index, dim, self.mesh)
        return tuple(placed.get(axis, _REPLICATE) for axis in self.mesh.axes)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that shard a dim, major to minor."""
        try:
            return tuple(axis for factor in self.dims[dim] for axis in factor.axes)
        except (IndexError, TypeError):
            _refuse_dim(dim, self.ndim)

    def local_shape(self, place: int) -> tuple[int, ...]:
        """The shape of what the rank at a place of the root mesh holds."""
        point = self._point(place)
        return tuple(math.prod(f.sizes[self.shard_at(f, point)] for f in dim) for dim in self.dims)

    def runs(self, dim: int, place: int) -> list[Run]:
        """The intervals of global indices of a dim that the rank at `place` holds, ascending."""
        point = self._point(place)
        try:
            return shard_runs(self.dims[dim], [self.shard_at(factor, point) for factor in self.dims[dim]])
        except (IndexError, TypeError):
            _refuse_dim(dim, self.ndim)

    def _point(self, place: int) -> tuple[int, ...]:
        """The coordinate of a place of the root mesh."""
        if type(place) is not int or not 0 <= place < len(self.mesh.ranks):
            integer(place, "Layout: place", 0, len(self.mesh.ranks) - 1)
        return self.mesh.coordinates[place]

    def offset(self, place: int) -> tuple[int, ...]:
        """The first global index of each dim that the rank at `place` holds (its size where it holds none)."""
        firsts = (self.runs(dim, place) for dim in range(self.ndim))
        return tuple(runs[0][0] if runs else size for runs, size in zip(firsts, self.shape, strict=True))

    def shard(self, factor: Factor, place: int) -> int:
        """Which shard of a factor the rank at `place` holds."""
        return self.shard_at(factor, self._point(place))

    def interval(self, factor: Factor, place: int) -> Run:
        """The indices of a factor that the rank at `place` holds: the first, and the one after the last."""
        return factor.interval(self.shard_at(factor, self._point(place)))

    def shard_at(self, factor: Factor, point: tuple[int, ...]) -> int:
        """Which shard of a factor the rank at a coordinate of the mesh holds."""
        return index_of(self.mesh, point, factor.axes)

    def held(self, dim: int) -> int:
        """The size of a dim in the largest local shard."""
        try:
            return math.prod(hint(max(f.sizes)) for f in self.dims[dim])
        except (IndexError, TypeError):
            _refuse_dim(dim, self.ndim)

    def __repr__(self) -> str:
        products = ["*".join(factor.describe(self.mesh) for factor in dim) for dim in self.dims]
        dims = ", ".join(text if len(dim) == 1 else f"({text})" for dim, text in zip(self.dims, products, strict=True))
        partials = ", ".join(f"{kind}@{axis}" for axis, kind in self.partials)
        return f"{DTYPES.get(self.dtype, str(self.dtype))}[{dims}{' | ' if partials else ''}{partials}]"

    def __eq__(self, other: object) -> bool:
        # torch's own Python code asks `x.layout == torch.strided` of every tensor (torch.norm does), and a DTensor is that.
        return self is other or other is torch.strided

    __hash__ = object.__hash__

    def write(self) -> str:
        """This layout as text that `Layout.read` reads in any process."""
        parts = write_parts(self.mesh, [parts_of(dim, self.mesh) for dim in self.dims], self.partials)
        shape, stride = (",".join(map(str, numbers)) for numbers in (self.shape, self.stride))
        return f"{parts} {str(self.dtype).removeprefix('torch.')} {shape} {stride}"

    @staticmethod
    def read(text: str) -> Layout:
        """The layout that a text tells.

        >>> mesh = Mesh(("tp",), (2,), range(2), "cpu", "simulated")
        >>> layout = Layout.of(mesh, [[Factor(9, ("tp",), (4, 5))], [whole(4)]])
        >>> Layout.read(layout.write()) is layout
        True
        """
        a_text(text, "Layout.read: text", "what layout.write() gives")
        try:
            words, dims, partials, dtype, shape, stride = text.split(" ")
            mesh, (parts, kinds) = Mesh.read(words), read_parts(dims, partials)
            sizes, steps = ([int(n) for n in numbers.split(",") if n] for numbers in (shape, stride))
            factors = [factors_of(dim, size, mesh) for dim, size in zip(parts, sizes, strict=True)]
            return Layout.of(mesh, factors, kinds, getattr(torch, dtype), steps)
        except (ArithmeticError, AttributeError, KeyError, ValueError):
            raise LayoutError(f"Layout.read: text is what layout.write() gives, got {shown(text)}") from None

    def specialised(self) -> Layout:
        """This layout: its sizes are numbers."""
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """This layout as code of a traced program, and what its names mean."""
        return f"Layout.read({self.write()!r})", {"Layout": Layout}

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_layout, (self.mesh, self.dims, self.partials, self.dtype, self.stride)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self


def _refuse_dim(dim: Any, ndim: int) -> NoReturn:
    integer(dim, "Layout: dim", -ndim, ndim - 1)
    refuse("Layout: dim", f"an integer from {-ndim} to {ndim - 1}", dim)


def _refuse_parts(mesh: Any, dims: Any, partials: Any, dtype: Any, stride: Any) -> None:
    """Say which part is none that a layout has, if one is."""
    instance(mesh, Mesh, "Layout.of: mesh", "a Mesh")
    a_dtype(dtype, "Layout.of: dtype")
    optional(integers, stride, "Layout.of: stride", 0)
    for pair in several(partials, "Layout.of: partials", _PARTS["partials"]):
        if not isinstance(pair, tuple) or len(pair) != 2 or pair[1] not in KINDS:
            refuse("Layout.of: one of partials", _PARTS["partials"], pair)
        mesh.size_of(pair[0])
    for dim in several(dims, "Layout.of: dims", _PARTS["dims"]):
        for factor in several(dim, "Layout.of: one of dims", _PARTS["dims"]):
            instance(factor, Factor, "Layout.of: one of dims", _PARTS["dims"])


def _with_symbols(content: tuple[Any, ...]) -> Layout:
    """The layout of these parts; symbols that torch knows to be numbers become numbers."""
    mesh, dims, partials, dtype, stride = content
    a_dtype(dtype, "layout: dtype")
    dims, stride = _mapped(known, dims, stride)
    sizes = [n for dim in dims for f in dim for n in (f.size, *f.sizes)]
    if not any(isinstance(n, SymInt) for n in (*sizes, *stride)):
        return Layout.of(mesh, dims, partials, dtype, stride)
    if any(isinstance(f.size, SymInt) and any(n != f.sizes[0] for n in f.sizes) for dim in dims for f in dim):
        raise Unsettled("uneven shards of a symbolic size depend on the rank: the size has to be specialised")
    shape = torch.Size([math.prod(f.size for f in dim) for dim in dims])
    return _build((mesh, dims, partials, dtype, stride), shape, SymbolicLayout)


def _mapped(number: Callable[[int], int], dims: tuple[Dim, ...], stride: tuple[int, ...]) -> tuple[Any, ...]:
    """Dims and stride with something else in place of each size."""
    every = tuple(tuple(Factor(number(f.size), f.axes, tuple(map(number, f.sizes))) for f in dim) for dim in dims)
    return every, tuple(map(number, stride))


class SymbolicLayout(Layout):
    """A layout in a program that is traced for all sizes: some sizes are symbols (`torch.SymInt`).

    Rules work with it as with any other. Comparing a symbol with a number makes torch add a guard: the program is then used
    only for sizes of which the comparison holds. It is not interned and has no hash, so that no cache keeps what belongs to one
    trace. What is chosen by its price is chosen for the sizes at hand (`concrete`).
    """

    __slots__ = ("_concrete",)

    def __hash__(self) -> int:
        raise Unsettled(f"{self!r} has no hash: what is kept by it would hold for sizes that are symbols of one trace")

    @property
    def concrete(self) -> Layout:
        """This layout at the sizes at hand."""
        if not hasattr(self, "_concrete"):
            dims, stride = _mapped(hint, self.dims, self.stride)
            self._concrete = self.replace(dims=dims, stride=stride)
        return self._concrete

    def write(self) -> str:
        """The text of this layout at the sizes at hand, and for no others."""
        return self.specialised().write()

    def specialised(self) -> Layout:
        """This layout with its symbols replaced by their current values; the traced program is then for these sizes only."""
        for size in (*(f.size for dim in self.dims for f in dim), *self.stride):
            int(size)  # torch guards on the value that it gives
        return self.concrete


def restore_layout(*parts: Any) -> Layout:
    """The layout of the parts that a pickle holds (a function of its own: a pickle names it without `getattr`)."""
    return Layout.of(*parts)


constant_type(Layout)
_layouts: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()


def _build(content: tuple[Any, ...], shape: torch.Size, cls: type[Layout] | None = None) -> Layout:
    self = object.__new__(cls or Layout)
    self.mesh, self.dims, self.partials, self.dtype, self.stride = content
    a_dtype(self.dtype, "layout: dtype")
    instance(self.mesh, Mesh, "Layout.of: mesh", "a Mesh")
    self.shape, self.ndim, self.device = shape, len(shape), torch.device(self.mesh.device)
    if self.device.type == "cuda" and self.device.index is None:  # autograd refuses a CUDA device without its index
        self.device = torch.device("cuda", torch.cuda.current_device())
    self.states = {axis: i for i, dim in enumerate(self.dims) for f in dim for axis in f.axes}
    self.even = all(min(f.sizes) == max(f.sizes) for dim in self.dims for f in dim)
    self.nbytes = math.prod([hint(max(f.sizes)) for dim in self.dims for f in dim]) * self.dtype.itemsize
    if len(self.stride) != len(shape) or not all(isinstance(n, int | SymInt) for n in self.stride):
        raise LayoutError(f"{self!r}: stride has a number for each of {len(shape)} dims, got {shown(self.stride)}")
    for axis, kind in self.partials:
        if kind in _NOT_OF and _NOT_OF[kind](self.dtype):
            raise LayoutError(f"{self!r}: {self.dtype} has no {kind}, and so no Partial({kind!r}) on axis {axis!r}")
        if axis in self.states:
            raise LayoutError(f"axis {axis!r} cannot both shard dim {self.states[axis]} and be Partial({kind})")
        self.states[axis] = kind
    kinds = {kind for _, kind in self.partials}
    if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
        raise LayoutError(
            f"{self!r}: a tensor cannot be partial {' and '.join(sorted(kinds))} at once, since their order would matter; "
            "only sum and avg mix. Redistribute one of the axes to Replicate() first"
        )
    return self


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """The stride of a tensor without gaps whose dims lie in memory in the order of another stride.

    >>> dense_stride((4, 6), (1, 2))
    (1, 4)
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(reversed(range(len(shape))), key=like.__getitem__):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _without(factor: Factor, gone: frozenset[str], mesh: Mesh) -> Factor:
    keep = [axis for axis in factor.axes if axis not in gone]
    if len(keep) == len(factor.axes):
        return factor
    if keep and factor.axes[: len(keep)] == tuple(keep):
        step = math.prod(mesh.axis_sizes[axis] for axis in factor.axes[len(keep) :])
        sizes = [sum(factor.sizes[i : i + step]) for i in range(0, len(factor.sizes), step)]
        return Factor(factor.size, tuple(keep), tuple(sizes))
    return sharded(factor.size, keep, mesh) if keep else whole(factor.size)


class PerRank:
    """A value that depends on the place in the root mesh, computed where it is needed.

    >>> PerRank(lambda place: place * 10).at(3)
    30
    """

    __slots__ = ("_function", "_known")

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._known: dict[int, Any] = {}

    def at(self, place: int) -> Any:
        """The value at a place of the root mesh."""
        if place not in self._known:
            self._known[place] = self._function(place)
        return self._known[place]


class Number(PerRank):
    """An int per place that reaches a kernel as a 0-d tensor, so that no rank's int enters a traced graph."""

    __slots__ = ()
