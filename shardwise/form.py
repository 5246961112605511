"""Form: a layout without its sizes, and both as text that every process reads the same.

What a traced program says of layouts. Sizes may be symbols there, and the text stands in graphs and in cache keys, so it holds
no rank, no address and no hash.

>>> from .layout import make_layout
>>> from .placement import Shard
>>> layout = make_layout((8, 16), Mesh(("dp", "tp"), (2, 4), range(8), "cpu", "simulated"), {"dp": Shard(0)})
>>> form = form_of(layout)
>>> form
[@dp, _]
>>> form.layout((12, 4), torch.float32), Form.read(form.text) is form
(f32[12@dp, 4], True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakValueDictionary

import torch
from torch import SymInt

from ._torch import quotient
from .layout import Factor, Layout, cut, default_sizes
from .memo import intern, memo
from .mesh import Mesh, quote


class Part(NamedTuple):
    """A factor without its size: the axes that cut it; the size of each shard where they are not the default chunks; its size
    where the dim has several factors (none for the first, which is what the others leave of the dim)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    size: int | None = None

    def factor(self, size: int, mesh: Mesh) -> Factor:
        """The factor of this part at a size."""
        return cut(size, self.axes, mesh) if self.sizes is None else Factor(size, self.axes, self.sizes)

    @property
    def text(self) -> str:
        """`_`, `8`, `@dp`, `8@tp+dp`, `@dp:2:3:4`."""
        size, axes = "" if self.size is None else str(self.size), "+".join(map(quote, self.axes))
        sizes = "" if self.sizes is None else "".join(f":{n}" for n in self.sizes)
        return f"{size}@{axes}{sizes}" if axes else size or "_"


def read_part(text: str) -> Part:
    """The part that a text tells.

    >>> read_part("8@tp+dp"), [read_part(text).text for text in ("_", "8", "@dp:2:3:4")]
    (Part(axes=('tp', 'dp'), sizes=None, size=8), ['_', '8', '@dp:2:3:4'])
    """
    size, _, cuts = text.partition("@")
    axes, *sizes = cuts.split(":")
    names = tuple(map(unquote, axes.split("+"))) if axes else ()
    return Part(names, tuple(map(int, sizes)) if sizes else None, int(size) if size.isdigit() else None)


class Form:
    """Mesh, parts of every dim, and what is pending: a layout without sizes, strides and dtype. Interned."""

    __slots__ = ("__weakref__", "dims", "mesh", "partials", "text")
    mesh: Mesh
    dims: tuple[tuple[Part, ...], ...]
    partials: tuple[tuple[str, str], ...]
    #: this form as text, the same in every process
    text: str

    @staticmethod
    def of(mesh: Mesh, dims: tuple[tuple[Part, ...], ...], partials: tuple[tuple[str, str], ...]) -> Form:
        """The one form of these parts."""
        content = (mesh, dims, partials)
        found = _forms.get(content)
        return intern(_forms, content, lambda: _build(*content)) if found is None else found

    @staticmethod
    @memo("forms read", limit=16384)
    def read(text: str) -> Form:
        """The form that a text tells."""
        mesh, dims, partials = text.split(" ")
        parts = [tuple(map(read_part, dim.split("*"))) for dim in dims[1:-1].split(",")] if dims != "[]" else []
        pending = [word.split("@") for word in partials.split(",") if word]
        return Form.of(Mesh.read(mesh), tuple(parts), tuple((unquote(axis), kind) for kind, axis in pending))

    def layout(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Layout:
        """The layout of this form at a shape."""
        return _layout(self, tuple(shape), dtype, None if stride is None else tuple(stride))

    def parts(self, dim: int) -> int:
        """Into how many shards a dim is cut."""
        return math.prod(self.mesh.axis_sizes[axis] for part in self.dims[dim] for axis in part.axes)

    def __repr__(self) -> str:
        dims = ", ".join("*".join(part.text for part in dim) for dim in self.dims)
        pending = ", ".join(f"{kind}@{axis}" for axis, kind in self.partials)
        return f"[{dims}{' | ' if pending else ''}{pending}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_form, (self.text,)


_forms: WeakValueDictionary[tuple[Any, ...], Form] = WeakValueDictionary()


def _build(mesh: Mesh, dims: tuple[tuple[Part, ...], ...], partials: tuple[tuple[str, str], ...]) -> Form:
    self = object.__new__(Form)
    self.mesh, self.dims, self.partials = mesh, dims, partials
    parts = ",".join("*".join(part.text for part in dim) for dim in dims)
    self.text = f"{mesh.text} [{parts}] {','.join(f'{kind}@{quote(axis)}' for axis, kind in partials)}"
    return self


def restore_form(text: str) -> Form:
    """The form that a pickle holds (a function of its own: a pickle names it)."""
    return Form.read(text)


def _parts(dim: tuple[Factor, ...], mesh: Mesh) -> tuple[Part, ...]:
    parts = []
    for position, factor in enumerate(dim):
        counts = [mesh.axis_sizes[axis] for axis in factor.axes]
        default = not factor.axes or isinstance(factor.size, SymInt) or factor.sizes == default_sizes(factor.size, counts)
        parts.append(Part(factor.axes, None if default else factor.sizes, int(factor.size) if position else None))
    return tuple(parts)


@memo("forms of layouts", limit=16384)
def form_of(layout: Layout) -> Form:
    """The form of a layout."""
    return Form.of(layout.mesh, tuple(_parts(dim, layout.mesh) for dim in layout.dims), layout.partials)


@memo("layouts of forms", limit=16384)
def _layout(form: Form, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None) -> Layout:
    dims = []
    for size, parts in zip(shape, form.dims, strict=True):
        rest = math.prod(part.size for part in parts if part.size is not None)
        first = parts[0].factor(quotient(size, rest) if rest > 1 else size, form.mesh)
        dims.append([first, *(part.factor(part.size, form.mesh) for part in parts[1:] if part.size is not None)])
    return Layout.of(form.mesh, dims, form.partials, dtype, stride)
