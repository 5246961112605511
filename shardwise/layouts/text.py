"""Form: a layout without its sizes, and both as text that every process reads the same.

What a traced program says of layouts. Sizes may be symbols there, and the text stands in graphs and in cache keys, so it holds
no rank, no address and no hash.

>>> from .from_placements import make_layout
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..base.caches import intern, memo
from .factor import Part, factors_of, parts_of, read_parts, write_parts
from .from_placements import Placements
from .layout import Layout
from .mesh import Mesh
from .placement import read_placement


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Form:
    """Mesh, parts of every dim, and what is partial: a layout without sizes, strides and dtype. Interned."""

    mesh: Mesh
    dims: tuple[tuple[Part, ...], ...]
    partials: tuple[tuple[str, str], ...]
    #: this form as text, the same in every process
    text: str

    @staticmethod
    def of(mesh: Mesh, dims: tuple[tuple[Part, ...], ...], partials: tuple[tuple[str, str], ...]) -> Form:
        """The one form of these parts."""
        content = (mesh, dims, partials)
        return _forms.get(content) or intern(_forms, content, lambda: Form(*content, write_parts(*content)))

    @staticmethod
    @memo("forms read", limit=16384)
    def read(text: str) -> Form:
        """The form that a text tells."""
        mesh, dims, partials = text.split(" ")
        return Form.of(Mesh.read(mesh), *read_parts(dims, partials))

    def layout(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Layout:
        """The layout of this form at a shape."""
        return _layout(self, tuple(shape), dtype, None if stride is None else tuple(stride))

    def parts(self, dim: int) -> int:
        """Into how many shards a dim is sharded."""
        return math.prod(self.mesh.axis_sizes[axis] for part in self.dims[dim] for axis in part.axes)

    def __repr__(self) -> str:
        dims = ", ".join("*".join(part.text for part in dim) for dim in self.dims)
        partials = ", ".join(f"{kind}@{axis}" for axis, kind in self.partials)
        return f"[{dims}{' | ' if partials else ''}{partials}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_form, (self.text,)


_forms: WeakValueDictionary[tuple[Any, ...], Form] = WeakValueDictionary()


def restore_form(text: str) -> Form:
    """The form that a pickle holds (a function of its own: a pickle names it)."""
    return Form.read(text)


@memo("forms of layouts", limit=16384)
def form_of(layout: Layout) -> Form:
    """The form of a layout."""
    return Form.of(layout.mesh, tuple(parts_of(dim, layout.mesh) for dim in layout.dims), layout.partials)


@memo("layouts of forms", limit=16384)
def _layout(form: Form, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None) -> Layout:
    dims = [factors_of(parts, size, form.mesh) for size, parts in zip(shape, form.dims, strict=True)]
    return Layout.of(form.mesh, dims, form.partials, dtype, stride)


def written(placements: Placements | Layout | None) -> str:
    """What a user wants as text, also while a function of the user's is traced: then a graph can hold it.

    >>> from .placement import Replicate, Shard
    >>> written({"tp": Shard(0)}), written([Shard(0), Replicate()])
    ('tp=S:0', 'S:0 R')
    """
    if placements is None or isinstance(placements, Layout):
        return "" if placements is None else placements.write()
    if isinstance(placements, Mapping):
        return " ".join([f"{axis}={placement.write()}" for axis, placement in placements.items()]) or "="
    return " ".join([placement.write() for placement in placements])


def as_read(text: str) -> Any:
    """The placements, or the layout, that `written` wrote.

    >>> as_read("tp=S:0"), as_read("S:0 R"), as_read("")
    ({'tp': Shard(0)}, (Shard(0), Replicate()), None)
    """
    if not text or ";" in text:
        return Layout.read(text) if text else None
    words = text.split()
    if "=" in text:
        return {axis: read_placement(word) for axis, _, word in (word.rpartition("=") for word in words) if axis}
    return tuple(read_placement(word) for word in words)
