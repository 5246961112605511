"""`shift`, `permute`, `halo_exchange`, `all_to_all_v`: batches that many programs need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MeshError, OperatorError
from ..mesh import Mesh
from ..tensor import DTensor
from .batch import batch, recv, send


def shift(x: Tensor, by: int = 1, *, mesh: Mesh | None = None, axis: str | None = None, wrap: bool = True) -> Tensor:
    """What the rank `by` places before this one along an axis holds; zeros where there is none (`wrap=False`).

    >>> import shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0]), torch.tensor([2.0])])
    >>> shift(x, mesh=sw.init_mesh(pp=2), wrap=False).pieces
    (tensor([0.]), tensor([1.]))
    """
    x, mesh = local_of(x, mesh)
    along: dict[str, Any] = {"mesh": mesh, "axis": axis, "wrap": wrap}
    return batch([send(x, shift=by, **along), recv(x.shape, x.dtype, shift=-by, **along)])[0]


def permute(x: Tensor, permutation: Sequence[int], *, mesh: Mesh | None = None, axis: str | None = None) -> Tensor:
    """What the rank holds that sends to this one: coordinate i of the axis sends to `permutation[i]` (-1: to none).

    >>> import shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    >>> permute(x, [2, 0, 1], mesh=sw.init_mesh(tp=3)).pieces
    (tensor([2.]), tensor([3.]), tensor([1.]))
    """
    x, mesh = local_of(x, mesh)
    back = [-1] * len(permutation)
    for here, there in enumerate(permutation):
        if there >= len(permutation):
            raise MeshError(f"a permutation of {len(permutation)} coordinates names coordinate {there}: {list(permutation)}")
        if there >= 0:
            back[there] = here
    along: dict[str, Any] = {"mesh": mesh, "axis": axis}
    return batch([send(x, permutation=permutation, **along), recv(x.shape, x.dtype, permutation=back, **along)])[0]


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
    """A piece with the last `before` rows of the piece before it and the first `after` rows of the one after it at its ends.

    Where there is no such piece the rows are zeros; with `wrap` the first piece comes after the last.

    >>> import shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    >>> halo_exchange(x, 0, 1, 1, mesh=sw.init_mesh(tp=2)).pieces
    (tensor([0., 1., 2., 3.]), tensor([2., 3., 4., 0.]))
    """
    x, mesh = local_of(x, mesh)
    if min(before, after) < 0 or x.shape[dim] < max(before, after):
        raise OperatorError(
            f"halo_exchange: {before} rows before and {after} after, of pieces with {x.shape[dim]} rows in dim {dim}: a halo "
            "comes from the next piece alone; use larger pieces or fewer ranks"
        )
    along: dict[str, Any] = {"mesh": mesh, "axis": axis, "wrap": wrap}
    ops: list[Any] = []
    for rows, start, by in ((before, -before, 1), (after, 0, -1)):
        if rows:
            edge = x.narrow(dim, start, rows)
            ops += [send(edge, shift=by, **along), recv(edge.shape, x.dtype, shift=-by, **along)]
    halos = list(batch(ops)) if ops else []
    first = [halos.pop(0)] if before else []
    return torch.cat([*first, x, *halos], dim)


def local_of(x: Tensor, mesh: Mesh | None) -> tuple[Tensor, Mesh]:
    """What a rank holds of a tensor, and the mesh it is on."""
    if isinstance(x, DTensor):
        mesh = mesh or x.mesh
        x = x.to_local()
    if mesh is None:
        raise MeshError("point-to-point communication of a plain tensor needs mesh=; only a DTensor knows its own")
    return x, mesh
