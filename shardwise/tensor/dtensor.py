"""DTensor: one global tensor whose shards live on many ranks, and the ways in and out of it."""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch.compiler import LOOKS_FOR_VIEWS, READS_ATTRIBUTES, TAKES_BRANCHES, Function, untraced
from .._torch.groups import AsyncTensor
from .._torch.replacements import HOOKS
from .._torch.tensors import base_of, is_batched, no_torch_function, reader
from ..base.argument_checks import a_dtype, flag, integer, optional
from ..base.caches import memo
from ..comm import transport
from ..comm.processes import deferred
from ..comm.tracing import current
from ..errors import LayoutError, OperatorError, Unsettled
from ..layouts.from_placements import Placements, make_layout
from ..layouts.layout import Factor, Layout, PerRank, dense_stride, restore_layout
from ..layouts.mesh import Mesh, chosen
from ..layouts.placement import Placement
from ..layouts.text import Form, form_of, written
from ..propagation.table import LIBRARY, library_key
from ..redistribution.run import move
from .assignment import written_at
from .checkpoint import check_loaded, chunk_list, for_torch, refuser, shard_of, write_items
from .dispatch import dispatch
from .placements_given import local_layout, target
from .toolbox import Toolbox
from .wrapping import copied_view, maker, wrap

#: torch's own attribute, which the class below puts a property in front of.
_requires_grad: Any = torch.Tensor.requires_grad


@untraced
class DTensor(torch.Tensor):
    """A tensor that is spread over the ranks of a mesh, and means what the whole tensor means on one device.

    Made by `distribute_tensor`, `DTensor.from_local` or a factory such as `shardwise.zeros`, never by calling the class.

    >>> import shardwise as sw
    >>> x = sw.ones(8, 16, mesh=sw.init_mesh(dp=2, tp=4), placements={"dp": sw.Shard(0)})
    >>> x, x.sum().item()
    (DTensor(f32[8@dp, 16], mesh=(dp=2, tp=4)), 128.0)
    """

    __slots__ = ("_aligned", "_layout", "_local")  # quicker to set than entries of the instance's dictionary
    _local: Tensor
    _layout: Layout
    #: whether this is a view on one device but not here, since data had to move
    severed = False
    #: the class of such views
    Severed: Any = None
    __torch_function__ = no_torch_function

    __torch_dispatch__: Any = classmethod(dispatch)

    # ── in and out ────────────────────────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def from_local(  # noqa: PLR0913  torch's keywords
        local_tensor: Tensor,
        device_mesh: Mesh | Any = None,
        placements: Placements | Layout | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | Layout | None = None,
    ) -> DTensor:
        """The global tensor of which each rank gives its local tensor; no mesh means the current one, no placements replicated.

        Nothing is communicated: the local tensors are taken as equal in shape, or as the chunks of `shape`, or as the
        placements say. With `run_check` the ranks compare shapes, dtypes and requires_grad; shapes may then differ. What a
        rank outside the mesh gives is left out, and it has to know `shape`. `grad_placements` are those of the gradient.

        >>> import shardwise as sw
        >>> mesh = sw.init_mesh(tp=2)
        >>> DTensor.from_local(torch.ones(2, 3), mesh, [sw.Shard(1)])
        DTensor(f32[2, 6@tp], mesh=(tp=2))
        >>> DTensor.from_local(sw.Bundle([torch.ones(2, 3), torch.ones(2, 4)]), mesh, [sw.Shard(1)], run_check=True)
        DTensor(f32[2, 7@tp{3,4}], mesh=(tp=2))
        """
        mesh = chosen(device_mesh)
        if torch.compiler.is_compiling():
            facts = (mesh.write(), written(placements), shape, stride, run_check, written(grad_placements), LIBRARY.key())
            return torch.ops.shardwise.from_local(local_tensor, *facts)
        layout = local_layout(local_tensor, mesh, placements, run_check, shape, stride)
        if grad_placements is not None:
            grad_placements = make_layout(layout.shape, mesh, grad_placements, layout.dtype, layout.stride)
        return from_shards(local_tensor, layout, grad_placements)

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """What this rank holds (in a simulated world: the bundle of what each rank holds; on a rank that is not in the mesh: a
        shape without data)."""
        layout = None if grad_placements is None else make_layout(self.shape, self.mesh, grad_placements, self.dtype)
        if self.requires_grad and torch.is_grad_enabled():
            return _ToLocal.apply(self, layout or self._layout.reduced())
        return self._local

    _local_tensor = property(lambda self: self._local, doc="What this rank holds, as `torch.distributed.tensor` names it.")

    def redistribute(
        self,
        device_mesh: Mesh | Any = None,
        placements: Placements | Layout | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        max_bytes: int | None = None,
    ) -> DTensor:
        """The same tensor in another layout, on its mesh or on another one; no placements means all replicated.

        It is communicated, and given, in `forward_dtype`, its gradient communicated in `backward_dtype`. With `async_op` the
        last collective is started, and waited for where the result is first used. No layout on the way takes more than
        `max_bytes` on a rank; as a rule, what the larger of the two takes.

        >>> import shardwise as sw
        >>> mesh = sw.init_mesh(tp=4)
        >>> x = sw.ones(4, 4, mesh=mesh, placements=[sw.Shard(0)]).redistribute(placements=[sw.Shard(1)])
        >>> x, x.redistribute(sw.init_mesh(tp=2, ranks=[2, 3]), [sw.Shard(0)])
        (DTensor(f32[4, 4@tp], mesh=(tp=4)), DTensor(f32[4@tp, 4], mesh=(tp=2)))
        """
        try:
            wanted = target(self._layout, device_mesh, placements)
        except Unsettled:  # uneven shards of a size that is a symbol: the program holds for the size at hand only
            self._layout = self._layout.specialised()
            wanted = target(self._layout, device_mesh, placements)
        if async_op is not False or forward_dtype is not None or backward_dtype is not None or max_bytes is not None:
            flag(async_op, "redistribute: async_op")
            optional(a_dtype, forward_dtype, "redistribute: forward_dtype")
            optional(a_dtype, backward_dtype, "redistribute: backward_dtype")
            optional(integer, max_bytes, "redistribute: max_bytes", 0)
        dtype, back = forward_dtype or self.dtype, backward_dtype or self.dtype
        if wanted is self._layout and dtype is back is self.dtype:
            return self
        if self.requires_grad and torch.is_grad_enabled():
            return _Redistribute.apply(self, wanted, back, dtype, async_op, max_bytes)
        return _redistributed(self, wanted, dtype, async_op, max_bytes)

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """The whole tensor as a new ordinary one, on every rank of the mesh: writes to it never reach this tensor. Gradients
        along an axis are the same, or, with `grad_placements` Partial, summands."""
        layout = None if grad_placements is None else make_layout(self.shape, self.mesh, grad_placements, self.dtype)
        if layout is not None and layout.without(dict(layout.partials)) is not layout.replicated():
            raise LayoutError(
                f"full_tensor: grad_placements give {layout}, but the gradient of a whole tensor is whole on every rank: "
                "Replicate() or Partial() along each axis"
            )
        whole = self.redistribute(placements=self._layout.replicated())
        differentiable = whole.requires_grad and torch.is_grad_enabled()
        found: Tensor = _ToPlain.apply(whole, layout) if differentiable else transport(self.mesh).plain(whole._local)
        return found.clone() if whole is self else found

    # ── what it is ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def layout(self) -> Any:  # type: ignore[override]  # torch's own `layout` is an attribute
        """What each rank holds. (torch's own code, which asks how the elements lie in memory, is told: strided.)"""
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return torch.strided if asker.partition(".")[0] == "torch" and asker != READS_ATTRIBUTES else self._layout

    @property
    def _base(self) -> Any:  # type: ignore[override]
        """What this is a view of. (A compiled function gives its results one by one: it would make views anew from their base
        by `as_strided`, which is not theirs.)"""
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return None if asker == LOOKS_FOR_VIEWS else base_of.__get__(self)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def mesh(self) -> Mesh:
        """The mesh the tensor lives on."""
        return self._layout.mesh

    device_mesh = mesh  # as `torch.distributed.tensor` names it

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = "Parameter" if getattr(self, "_is_param", False) else "DTensor"
        return f"{name}({self._layout}, mesh={self.mesh})"

    def __str__(self) -> str:
        """The layout, and what this rank holds: no communication, so one rank alone may print."""
        return f"{self!r}\n{_values(self)}"

    def __format__(self, spec: str) -> str:
        """As `str`; a number without dims in the format that is asked for, by `item()`."""
        return format(self.item(), spec) if spec and not self.ndim else str(self)

    def tolist(self) -> Any:
        """The global value as Python numbers, on every rank."""
        return self.data.full_tensor().tolist()

    __float__, __index__, __complex__ = map(reader, ("__float__", "__index__", "__complex__"))

    def numpy(self, *, force: bool = False) -> Any:
        """The global value as an array, on every rank."""
        flag(force, "numpy: force")
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.full_tensor().__array__(dtype)

    # ── gradients take the layout of their tensor ─────────────────────────────────────────────────────────────────────

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are wanted. The gradient of a leaf arrives in the leaf's layout, reduced once."""
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Ask for gradients, in place."""
        flag(requires_grad, "requires_grad_: requires_grad")
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf:
            self._align()
        return self

    def retain_grad(self) -> None:
        """Keep the gradient of a tensor that is no leaf, in the tensor's layout."""
        self._align()
        super().retain_grad()

    def _align(self) -> None:
        if not hasattr(self, "_aligned"):
            self._aligned = self.register_hook(functools.partial(align_grad, layout=self._layout.reduced()))

    @property
    def data(self) -> Any:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        facts = (self.shape, self.dtype, self.is_meta)
        if not isinstance(value, DTensor) or (value.shape, value.dtype, value.is_meta) != facts:
            given = value._layout if isinstance(value, DTensor) else f"a plain tensor {list(value.shape)}"
            wanted = f"takes a DTensor of its shape, dtype and device, got {given} on {value.device}"
            raise OperatorError(f".data of {self._layout} on {self.device} {wanted}")
        self._local, self._layout = value._local, value._layout
        if hasattr(self, "_aligned"):  # gradients are to come in the new layout
            self._aligned.remove()
            del self._aligned
            self._align()

    # ── writing, copying, pickling ────────────────────────────────────────────────────────────────────────────────────

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(*written_at(self, index, value))

    def __deepcopy__(self, memo: dict[int, DTensor]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise OperatorError("only a leaf DTensor can be deep-copied; call .detach() first")
        with torch.no_grad():  # tensors of this rank that share memory do so in the copy
            local = transport(self.mesh).each(functools.partial(copy.deepcopy, memo=memo), self.mesh, self._local)
            copied = wrap(DTensor, local, self._layout)
        copied = _like(copied, self.requires_grad, getattr(self, "_is_param", False))
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        layout = self._layout
        facts = self.requires_grad, getattr(self, "_is_param", False), transport(layout.mesh).place(layout.mesh)
        return _rebuild, (self._local.detach(), layout, *facts)

    untyped_storage, data_ptr = map(for_torch, ("untyped_storage", "data_ptr"))
    storage, share_memory_, apply_, map_, map2_ = map(refuser, ("storage", "share_memory_", "apply_", "map_", "map2_"))

    def __dlpack__(self, **words: Any) -> Any:
        return self.full_tensor().__dlpack__(**words)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    # ── torch.distributed.checkpoint ──────────────────────────────────────────────────────────────────────────────────

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return write_items(self._local, self._layout, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        torch.autograd.graph.increment_version(self)  # asked only by who loads: the local tensor is written to next
        return chunk_list(self._local, self._layout)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return shard_of(self._local, self._layout, index)

    # ── compiling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def __tensor_flatten__(self) -> tuple[list[str], Form]:
        if sys._getframe(1).f_globals.get("__name__") == TAKES_BRANCHES:
            raise OperatorError(
                f"torch.cond and its like on {self._layout}: they trace both branches, which may communicate otherwise; branch "
                "in Python (`if condition:` reads it, the same on every rank), or compute both and use torch.where"
            )
        return ["_local"], form_of(self._layout)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], form: Form, size: Any, stride: Any) -> DTensor:
        local = inner["_local"]
        made = _made(form, tuple(size), local.dtype, tuple(stride)) if type(local) is Tensor and not local.is_meta else None
        if made is not None:
            self: DTensor = made[0]()
            self._local, self._layout = local, made[1]
            return self
        transport(form.mesh).ready(form.mesh)  # a program from a cache may run here without having been traced
        if None in size or None in stride:  # torch lost what it had found to be a number
            pairs = enumerate(zip(local.shape, size, strict=True))
            size = [n * form.parts(dim) if known is None else known for dim, (n, known) in pairs]
            stride = dense_stride(size, local.stride())
        for dim, (whole, shard) in enumerate(zip(size, local.shape, strict=True)):
            if isinstance(whole, SymInt) and whole != shard * form.parts(dim):
                int(whole)  # uneven, and so of one size only
        return wrap(DTensor, local, form.layout(size, local.dtype, stride))

    def __coerce_tangent_metadata__(self) -> DTensor:
        """In what layout the gradient of this output of a compiled function is expected: reduced."""
        return self.redistribute(placements=self._layout.reduced())

    def __coerce_same_metadata_as_tangent__(self, form: Any, expected_type: Any = None) -> DTensor | None:
        """This gradient in the layout that a compiled backward was made for."""
        if expected_type is not None and not issubclass(expected_type, DTensor):
            return None
        return self.redistribute(placements=form.layout(self.shape, self.dtype, self._layout.stride))

    def _stable_hash_for_caching(self) -> str:
        """What torch's cache of compiled programs knows of this tensor: the same in every process, and on every rank unless
        the program is of one rank only."""
        local, layout, trace = self._local, self._layout, current()
        form, own = form_of(layout).text, (local.dtype, local.shape, local.stride())
        facts = [form, layout.shape, layout.stride, *own, self.requires_grad]
        if not layout.even or (trace is not None and trace.specific):
            facts.append(transport(layout.mesh).place(layout.mesh))
            if trace is not None:
                trace.keyed = True
        return hashlib.blake2b(repr((library_key(), facts)).encode(), digest_size=20).hexdigest()


def _values(x: DTensor) -> str:
    """The values of a tensor that are in this process, as text that says which they are."""
    layout, mesh = x._layout, x.mesh
    if transport(mesh).holds_all:
        return str(x.data.full_tensor())
    place = transport(mesh).place(mesh)
    if place < 0:
        return f"this rank holds nothing of it: it is not in mesh {mesh}"
    if isinstance(x, Severed) and x.is_stale:
        return "its values are not here: the tensor that it is a view of was written to; x.full_tensor() on every rank has them"
    local = str(x._local.detach())
    if layout is layout.replicated():
        return local
    runs = [[f"{start}:{stop}" for start, stop in layout.runs(dim, place)] for dim in range(layout.ndim)]
    part = f"[{', '.join('+'.join(several) or 'nothing' for several in runs)}]" if runs else "it"
    partials = "".join(f", Partial({kind}) over {axis}" for axis, kind in layout.partials)
    return f"rank {mesh.root.ranks[place]} holds {part}{partials}; x.full_tensor() on every rank has the whole:\n{local}"


def _plain_tangent(tangent: Tensor, form: Any, expected_type: Any = None) -> Any:
    """What stands for the gradient of a result that nothing was done with: zeros, as an ordinary tensor of the global shape."""
    if expected_type is None or not issubclass(expected_type, DTensor) or not isinstance(form, Form):
        return None
    return Toolbox(DTensor).distribute(tangent, form.layout(tangent.shape, tangent.dtype))


@memo("outputs", limit=4096)
def _made(form: Form, size: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...]) -> Any:
    """How a result of a compiled program is made, and its layout; None where torch does not know all sizes."""
    if None in size or None in stride:
        return None
    layout = form.layout(size, dtype, stride)
    return maker(DTensor, layout), layout


@untraced
class Severed(DTensor):
    """A view on one device that is a copy here, since data had to move. It cannot be written to, and it is made anew when it is
    read after a write to what it is a view of."""

    severed = True
    __deepcopy__ = copied_view
    _held: Tensor
    __torch_dispatch__: Any = classmethod(lambda cls, *args, **kwargs: dispatch(DTensor, *args, **kwargs))

    def follow(self, source: Any, again: Callable[[], Any]) -> None:
        """Stay a view of `source`: `again()` makes this tensor from it."""
        self._source, self._again, self._seen = source, again, _writes(source)

    @property
    def is_stale(self) -> bool:
        """Whether what this is a view of was written to (or may have been), so that reading this makes it anew."""
        return hasattr(self, "_seen") and (_writes(self._source) != self._seen or self._seen < 0)

    @property
    def _local(self) -> Tensor:
        if self.is_stale:
            self._seen = _writes(self._source)
            fresh = self._again()
            self._held, self._layout = fresh._local, fresh._layout
        return self._held

    @_local.setter
    def _local(self, local: Tensor) -> None:
        self._held = local


DTensor.Severed = Severed


def _writes(x: Tensor) -> int:
    """How often a tensor or a view of it was written to; -1 where torch does not count."""
    return -1 if x.is_inference() else x._version


def _like(x: Any, requires_grad: bool, parameter: bool) -> Any:
    return torch.nn.Parameter(x, requires_grad) if parameter else x.requires_grad_(requires_grad)


@untraced
def _rebuild(local: Tensor, layout: Layout, requires_grad: bool, parameter: bool, place: int) -> DTensor:
    """The DTensor that a pickle holds: what the rank at a place of its mesh held of it."""
    check_loaded(local, layout, place)
    return _like(wrap(DTensor, local, layout), requires_grad, parameter)


torch.serialization.add_safe_globals([_rebuild, restore_layout, Mesh, Factor])
HOOKS.tensor, HOOKS.gather, HOOKS.coerce_tangent = DTensor, DTensor.full_tensor, _plain_tangent


@memo("gradients", limit=4096)
def _placed_as(grad: Layout, layout: Layout) -> Layout:
    return layout.replace(stride=grad.stride, dtype=grad.dtype)


@untraced
def align_grad(grad: Any, layout: Layout) -> Any:
    """A gradient in the layout of what it is the gradient of."""
    if grad is None:  # no gradient flows
        return None
    if not isinstance(grad, DTensor):
        if is_batched(grad):  # many gradients at once: they go where they are asked for, not into a leaf
            return grad
        return Toolbox(DTensor).distribute(grad.detach(), layout.replace(dtype=grad.dtype))
    target = _placed_as(grad._layout, layout)
    if grad._layout is target or grad.requires_grad:
        return grad.redistribute(placements=target)
    return wrap(DTensor, move(grad._local, grad._layout, target, "gradient"), target)


# ── autograd through the ways in and out ──────────────────────────────────────────────────────────────────────────────


def _redistributed(x: DTensor, wanted: Layout, dtype: torch.dtype, later: bool, max_bytes: int | None) -> DTensor:
    have, local = x._layout, x._local
    if dtype is not have.dtype:
        have, wanted, local = have.replace(dtype=dtype), wanted.replace(dtype=dtype), local.to(dtype)
    with deferred.set(True) if later else nullcontext():  # collectives are waited for where their results are first used
        return wrap(DTensor, move(local, have, wanted, max_bytes=max_bytes), wanted)


class _Redistribute(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Layout, backward_dtype: torch.dtype, *how: Any) -> DTensor:
        ctx.layout, ctx.dtype = x._layout.reduced(), backward_dtype
        return _redistributed(x, target, *how)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return align_grad(grad.to(ctx.dtype), ctx.layout).to(ctx.layout.dtype), None, None, None, None, None


class _FromLocal(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, grad_layout: Layout | None) -> DTensor:
        mine = resolved(local.detach())
        ctx.layout, ctx.grad_layout = layout, grad_layout
        ctx.left_out = mine if transport(layout.mesh).place(layout.mesh) < 0 else None
        return from_shards(mine, layout)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        partials = () if ctx.grad_layout is not None else ctx.layout.partials
        kinds = {kind for _, kind in partials}
        if not kinds <= {"sum", "avg"}:
            raise OperatorError(f"from_local of {ctx.layout}: shards Partial({kinds.pop()}) have no gradient")
        grad = align_grad(grad, ctx.grad_layout or ctx.layout.reduced())
        for axis in (axis for axis, kind in partials if kind == "avg"):
            grad = grad / ctx.layout.mesh.axis_sizes[axis]
        return grad.to_local() if ctx.left_out is None else torch.zeros_like(ctx.left_out), None, None


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mesh = ctx.layout.mesh
        grad = transport(mesh).each(_fitting, mesh, grad, PerRank(ctx.layout.local_shape))
        return from_shards(grad, ctx.layout), None


def _fitting(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A rank's gradient, if it has the shape of the rank's shard (bundles of uneven shards go by the shape of the first)."""
    if tuple(grad.shape) != shape:
        raise OperatorError(f"to_local: a gradient of shape {list(grad.shape)} came back for a shard of shape {list(shape)}")
    return grad.contiguous()  # not one element for all, as of a sum: a leaf keeps what it is given, and adds to it


class _ToPlain(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_layout: Layout | None) -> Tensor:
        ctx.layout = grad_layout or x._layout
        return transport(x.mesh).plain(x._local).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if isinstance(grad, DTensor):  # the plain tensor met a DTensor
            return align_grad(grad, ctx.layout.reduced()), None
        # not one element for all, as of a sum: a leaf keeps what it is given, and adds to it
        local = transport(ctx.layout.mesh).replicate(grad.contiguous(), ctx.layout.mesh)
        return from_shards(local, ctx.layout), None


# ── the ways in ───────────────────────────────────────────────────────────────────────────────────────────────────────


def from_shards(local: Tensor, layout: Layout, grad_layout: Any = None) -> DTensor:
    """The DTensor of which each rank gives its shard."""
    if local.requires_grad and torch.is_grad_enabled():
        return _FromLocal.apply(local, layout, grad_layout)
    own = transport(layout.mesh).own(resolved(local), layout.mesh, PerRank(layout.local_shape))
    return wrap(DTensor, own, layout)


def resolved(x: Tensor) -> Tensor:
    """The tensor as it lies in memory: local operators do not see the marks of a lazy conjugate or negative."""
    if isinstance(x, AsyncTensor):
        x = x.trigger_wait()
    return x.resolve_conj().resolve_neg() if x.dtype.is_complex or x.is_neg() else x
