"""`distribute_tensor`, `distribute_module`: plain tensors, and those of a module, spread over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiler import Function
from .._torch.tensors import is_transforming
from ..base.argument_checks import a_function, a_module, a_tensor, optional
from ..comm import transport
from ..comm.interception import watched
from ..layouts.from_placements import Placements, make_layout
from ..layouts.layout import Layout, contiguous_stride, dense_stride, whole
from ..layouts.mesh import Mesh, chosen
from ..layouts.text import written
from ..propagation.table import LIBRARY
from ..redistribution.run import move
from .dtensor import DTensor, resolved
from .placements_given import fitting, source_rank
from .wrapping import wrap


def distribute_tensor(
    tensor: Tensor,
    device_mesh: Mesh | Any = None,
    placements: Placements | Layout | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A tensor, spread over a mesh: by placements, one per axis, or by axis name (axes not named replicate).

    The values of one rank count, so ranks that differ come to agree: of the one at coordinate `src_data_rank` of every axis.
    `src_data_rank=None` trusts that they are equal. A leaf gives a leaf; the gradient of another flows back to it.

    >>> import shardwise as sw
    >>> distribute_tensor(torch.arange(6.0), sw.init_mesh(tp=2), {"tp": sw.Shard(0)})
    DTensor(f32[6@tp], mesh=(tp=2))
    """
    a_tensor(tensor, "distribute_tensor: tensor")
    on = chosen(device_mesh)
    if isinstance(tensor, DTensor):
        return tensor.redistribute(on, placements)
    source = source_rank(src_data_rank, on)
    if torch.compiler.is_compiling():
        return torch.ops.shardwise.distribute(tensor, on.write(), written(placements), source, LIBRARY.key())
    return distribute(tensor, on, placements, source)


def distribute(tensor: Tensor, on: Mesh, placements: Any, source: int | None) -> DTensor:
    """A plain tensor, spread over a mesh."""
    if isinstance(placements, Layout):
        layout = fitting(placements, tensor.shape, tensor.dtype, on, "distribute_tensor")
    else:
        placements, stride = {} if placements is None else placements, dense_stride(tensor.shape, tensor.stride())
        layout = make_layout(tensor.shape, on, placements, tensor.dtype, stride)
    if is_transforming() or (tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled()):
        return _Distribute.apply(tensor, layout, source)
    return _distributed(tensor, layout, source).requires_grad_(tensor.requires_grad)


def _distributed(tensor: Tensor, layout: Layout, source: int | None) -> DTensor:
    mesh = layout.mesh
    world = transport(mesh, "distribute_tensor")
    whole = world.replicate(tensor.detach(), mesh)
    local = world.each(lambda x: resolved(x).clone(memory_format=torch.contiguous_format), mesh, whole)
    if source is not None:
        local = watched("distribute_tensor", ("broadcast", mesh), local, partial(world.broadcast, local, mesh, source))
    local = move(local, layout.replicated(), layout)
    if layout.stride != contiguous_stride(layout.shape):
        local = world.each(_ordered, mesh, local, layout.stride)
    return wrap(DTensor, local, layout)


class _Distribute(Function):
    """Also under transforms of `torch.func`, which want what is kept apart from `forward`."""

    @staticmethod
    def forward(tensor: Tensor, layout: Layout, source: int | None) -> DTensor:
        return _distributed(tensor, layout, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.layout, ctx.source = inputs

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Collect.apply(grad, ctx.layout), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _Distribute.apply(tangent, ctx.layout, ctx.source)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: Tensor, layout: Layout, source: int | None) -> Any:
        return _Distribute.apply(tensor.movedim(in_dims[0], 0), _batch(layout, info), source), 0


class _Collect(Function):
    """The way back: the whole of a gradient."""

    @staticmethod
    def forward(grad: Any, layout: Layout) -> Tensor:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout = inputs[1].reduced()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Distribute.apply(grad, ctx.layout, None), None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _Collect.apply(tangent, ctx.layout)

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Any, layout: Layout) -> Any:
        return _Collect.apply(grad.movedim(in_dims[0], 0), _batch(layout, info)), 0


def _batch(layout: Layout, info: Any) -> Layout:
    """The layout of many tensors of one layout, one behind the other."""
    return Layout.of(layout.mesh, [(whole(info.batch_size),), *layout.dims], layout.partials, layout.dtype)


def _ordered(x: Tensor, like: tuple[int, ...]) -> Tensor:
    """The tensor with its dims in memory in the order of a stride."""
    stride = dense_stride(x.shape, like)
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


# ── modules ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def distribute_module(
    module: nn.Module,
    device_mesh: Mesh | Any = None,
    partition_fn: Callable[[str, nn.Module, Mesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
) -> nn.Module:
    """A module whose parameters and buffers are DTensors, in place: `partition_fn(name, submodule, mesh)` distributes those it
    wants to, the rest is replicated. `input_fn(module, inputs, mesh)` makes of a call's inputs, `output_fn(module, outputs,
    mesh)` of its outputs, what is given on.

    >>> import shardwise as sw
    >>> distribute_module(nn.Linear(4, 2), sw.init_mesh(tp=2)).weight
    Parameter(f32[2, 4], mesh=(tp=2))
    """
    a_module(module, "distribute_module: module")
    for word, given in (("partition_fn", partition_fn), ("input_fn", input_fn), ("output_fn", output_fn)):
        optional(a_function, given, f"distribute_module: {word}")
    mesh = chosen(device_mesh)
    for name, each in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, each, mesh)
        _replicate(each, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda called, inputs: input_fn(called, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda called, inputs, outputs: output_fn(called, outputs, mesh))
    return module


def _replicate(module: nn.Module, mesh: Mesh) -> None:
    """Replicate the parameters and buffers of one module that are not distributed yet."""
    for name, held in list(module.named_parameters(recurse=False)):
        if not isinstance(held, DTensor):
            whole = distribute_tensor(held.detach(), mesh)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=held.requires_grad))
    for name, kept in list(module.named_buffers(recurse=False)):
        if not isinstance(kept, DTensor):
            module._buffers[name] = distribute_tensor(kept, mesh)
