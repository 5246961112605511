"""How a DTensor is made around a local tensor, and how a plain tensor or one on another mesh becomes a local tensor.

`cls` is the tensor subclass; its instances carry `_local` and `_layout`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch.compiler import untraced
from .._torch.symbols import known, rebuilt, unseen
from .._torch.tensors import make_wrapper
from ..comm import transport
from ..comm.tracing import mark_specific
from ..layouts.from_placements import make_layout
from ..layouts.layout import Layout, SymbolicLayout, contiguous_stride
from ..layouts.mesh import Mesh
from ..layouts.text import form_of
from ..redistribution.run import move


@untraced
def wrap(cls: Any, local: Tensor, layout: Layout) -> Any:
    """A DTensor around a local value."""
    if isinstance(layout, SymbolicLayout):
        return _wrap_symbolic(cls, local, layout)
    device = local.device if local.is_meta else layout.device
    self = make_wrapper(cls, layout.shape, layout.stride, None, None, layout.dtype, torch.strided, device)
    self._local, self._layout = local, layout
    if not layout.even and not transport(layout.mesh).holds_all:
        mark_specific(layout)
    return self


def maker(cls: Any, layout: Layout) -> Any:
    """Makes a wrapper, of a local value that is not on meta, that shows the sizes of a layout; quicker where torch may work the
    strides out."""
    strides = None if layout.stride == contiguous_stride(layout.shape) else layout.stride
    return partial(make_wrapper, cls, layout.shape, strides, None, None, layout.dtype, torch.strided, layout.device)


def _wrap_symbolic(cls: Any, local: Tensor, layout: Layout) -> Any:
    """The same for symbolic sizes: they are made of those of the local value, so that a tracer knows them."""
    form = form_of(layout)
    held = [n * form.parts(dim) if form.parts(dim) > 1 else n for dim, n in enumerate(local.shape)]
    shape = [made if isinstance(size, SymInt) else size for size, made in zip(layout.shape, held, strict=True)]
    stride = [rebuilt(step, (*shape, *local.shape, *contiguous_stride(shape))) for step in layout.stride]
    with unseen():
        shape, stride = [known(n) for n in shape], [known(n) for n in stride]
        device = local.device if local.is_meta else layout.device
        self = make_wrapper(cls, shape, stride, None, None, layout.dtype, torch.strided, device)
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


def replicated_on(mesh: Mesh, tensor: Tensor) -> Layout:
    """The layout of a plain tensor that every rank of a mesh holds."""
    return make_layout(tensor.shape, mesh, {}, tensor.dtype, tensor.stride())


def local_on(cls: Any, tensor: Any, mesh: Mesh) -> tuple[Tensor, Layout]:
    """A tensor's local value and layout on a mesh; a plain tensor is taken as replicated."""
    if not isinstance(tensor, cls):
        return transport(mesh).replicate(tensor.resolve_conj().resolve_neg(), mesh), replicated_on(mesh, tensor)
    layout = tensor._layout
    if layout.mesh is mesh:
        return tensor._local, layout
    inside = layout.without(axis for axis in layout.mesh.axes if axis not in mesh.axes)
    return move(tensor._local, layout, inside), inside.replace(mesh=mesh)
