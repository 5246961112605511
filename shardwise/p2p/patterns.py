"""`shift`, `permute`, `halo_exchange`: communication between neighbours along an axis, made of batches of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._torch.compiler import Function
from ..base.argument_checks import a_tensor, flag, integer, integers
from ..comm import seen, transport
from ..comm.messages import Batch
from ..errors import MeshError, OperatorError
from ..layouts.mesh import Mesh
from ..propagation.table import LIBRARY
from ..tensor.dtensor import DTensor
from .batch import batch, like, recv, run, send, wait


def shift(x: Tensor, by: int = 1, *, mesh: Mesh | None = None, axis: str | None = None, wrap: bool = True) -> Tensor:
    """The tensor of the rank `by` places before this one along an axis; zeros where there is none (`wrap=False`).

    >>> import torch, shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0]), torch.tensor([2.0])])
    >>> shift(x, mesh=sw.init_mesh(pp=2), wrap=False).shards
    (tensor([0.]), tensor([1.]))
    """
    integer(by, "p2p.shift: by")
    flag(wrap, "p2p.shift: wrap")
    x, mesh = local_of(x, mesh, "p2p.shift: x")
    along: dict[str, Any] = {"mesh": mesh, "axis": axis, "wrap": wrap}
    return batch([send(x, shift=by, **along), recv(x.shape, x.dtype, shift=-by, **along)])[0]


def permute(x: Tensor, permutation: Sequence[int], *, mesh: Mesh | None = None, axis: str | None = None) -> Tensor:
    """The tensor of the rank that sends to this one: coordinate i of the axis sends to `permutation[i]` (-1: to none).

    >>> import torch, shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    >>> permute(x, [2, 0, 1], mesh=sw.init_mesh(tp=3)).shards
    (tensor([2.]), tensor([3.]), tensor([1.]))
    """
    permutation = integers(permutation, "p2p.permute: permutation", -1)
    x, mesh = local_of(x, mesh, "p2p.permute: x")
    back = [-1] * len(permutation)
    for here, there in enumerate(permutation):
        if there >= len(permutation):
            raise MeshError(f"a permutation of {len(permutation)} coordinates names coordinate {there}: {list(permutation)}")
        if there >= 0:
            back[there] = here
    along: dict[str, Any] = {"mesh": mesh, "axis": axis}
    return batch([send(x, permutation=permutation, **along), recv(x.shape, x.dtype, permutation=back, **along)])[0]


def local_of(x: Tensor, mesh: Mesh | Any | None, what: str) -> tuple[Tensor, Mesh]:
    """The local tensor, and the mesh it is on."""
    a_tensor(x, what)
    on = None if mesh is None else Mesh.from_torch(mesh)
    if isinstance(x, DTensor):
        if on is not None and on.write_root() != x.mesh.write_root():
            raise MeshError(f"{what} is a DTensor on mesh {x.mesh}, and mesh={on} another one; leave mesh= out")
        return x.to_local(), x.mesh if on is None else on
    if on is None:
        raise MeshError("point-to-point communication of a plain tensor needs mesh=; only a DTensor knows its own")
    return x, on


def ready(text: str) -> Mesh:
    """The mesh that an operator of a traced program names, ready to communicate."""
    mesh = seen(Mesh.read(text))
    transport(mesh).ready(mesh)
    return mesh


# ── halos ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def halo_exchange(  # noqa: PLR0913  as many facts as a halo has
    x: Tensor,
    dim: int,
    before: int = 1,
    after: int = 1,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    wrap: bool = False,
) -> Tensor:
    """A shard with the last `before` rows of the shard before it and the first `after` rows of the one after it at its ends.

    Where there is no such shard the rows are zeros; with `wrap` the first shard comes after the last. The backward adds the
    gradients of these rows to those of the shards that they are from.

    >>> import shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])])
    >>> halo_exchange(x, 0, 1, 1, mesh=sw.init_mesh(tp=2)).shards
    (tensor([0., 1., 2., 3.]), tensor([2., 3., 4., 5., 0.]))
    """
    a_tensor(x, "halo_exchange: x")
    integer(dim, "halo_exchange: dim", -x.ndim, x.ndim - 1)
    flag(wrap, "halo_exchange: wrap")
    for name, rows in (("before", before), ("after", after)):
        integer(rows, f"halo_exchange: {name}", 0)
    if isinstance(x, DTensor) and not torch.compiler.is_compiling():
        _check_rows(min(map(x._layout.local_shape, range(len(x.mesh.ranks))), key=lambda s: s[dim])[dim], dim, before, after)
    x, mesh = local_of(x, mesh, "halo_exchange: x")
    facts = (mesh.write_root(), mesh.named(axis), dim, before, after, wrap)
    if torch.compiler.is_compiling():
        return torch.ops.shardwise.halo(x, *facts, LIBRARY.key())
    return _halo(x, _HaloRows(*facts))


class _HaloRows(NamedTuple):
    """How many rows each shard gets from its neighbours along an axis."""

    mesh: str
    axis: str
    dim: int
    before: int
    after: int
    wrap: bool

    def batch(self, edges: list[Tensor]) -> Batch:
        """The last rows go on, the first ones back."""
        ends = "wrap" if self.wrap else "end"
        on, back = (f"shift {by:+d} {ends} {self.axis}" for by in (1, -1))
        shapes, kinds = zip(*map(like, edges), strict=True)
        return Batch(Mesh.read(self.mesh), (on, back), (back, on), tuple(shapes), tuple(kinds))


def _halo(x: Tensor, how: _HaloRows) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _HaloExchange.apply(x, how)
    return _forward(x, how)


class _HaloExchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _HaloRows) -> Tensor:
        ctx.how = how
        return _forward(x, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        how: _HaloRows = ctx.how
        mesh = Mesh.read(how.mesh)
        first, own, last = transport(mesh).each(_parted, mesh, grad, how)
        # What came from the shard before goes back to it, and is for its last rows.
        back = how.batch([first, last])
        from_after, from_before = run([first, last], back._replace(goals=back.sources, sources=back.goals))
        return transport(mesh).each(_added, mesh, own, wait(from_after), wait(from_before), how), None


def _forward(x: Tensor, how: _HaloRows) -> Tensor:
    mesh = Mesh.read(how.mesh)
    last, first = transport(mesh).each(_edges, mesh, x, how)
    before, after = run([last, first], how.batch([last, first]))
    return transport(mesh).each(torch.cat, mesh, [wait(before), x, wait(after)], how.dim)


def _edges(x: Tensor, how: _HaloRows) -> tuple[Tensor, Tensor]:
    _check_rows(x.shape[how.dim], how.dim, how.before, how.after)
    return x.narrow(how.dim, x.shape[how.dim] - how.before, how.before), x.narrow(how.dim, 0, how.after)


def _check_rows(rows: int, dim: int, before: int, after: int) -> None:
    if rows < max(before, after):
        raise OperatorError(
            f"halo_exchange: {before} rows before and {after} after, of a shard with {rows} rows in dim {dim}: a halo comes "
            "from the next shard alone; use larger shards or fewer ranks"
        )


def _parted(grad: Tensor, how: _HaloRows) -> tuple[Tensor, Tensor, Tensor]:
    rows = grad.shape[how.dim]
    return cast(Any, grad.split([how.before, rows - how.before - how.after, how.after], how.dim))


def _added(own: Tensor, to_last: Tensor, to_first: Tensor, how: _HaloRows) -> Tensor:
    rows = own.shape[how.dim]
    own = own.clone()
    own.narrow(how.dim, rows - how.before, how.before).add_(to_last)
    own.narrow(how.dim, 0, how.after).add_(to_first)
    return own


torch.library.define(
    "shardwise::halo", "(Tensor x, str mesh, str axis, int dim, int before, int after, bool wrap, str library) -> Tensor"
)


def _halo_traced(x: Tensor, *facts: Any) -> Tensor:
    how = _HaloRows(*facts[:-1])
    return _halo(x, how._replace(mesh=ready(how.mesh).text))


torch.library.impl("shardwise::halo", "CompositeImplicitAutograd", _halo_traced)
