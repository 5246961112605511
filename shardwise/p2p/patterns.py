"""`shift`, `permute`: a batch of one message for each rank along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..base.argument_checks import a_tensor, flag, integer, integers
from ..errors import MeshError
from ..layouts.mesh import Mesh
from ..tensor.dtensor import DTensor
from .batch import batch, recv, send


def shift(x: Tensor, by: int = 1, *, mesh: Mesh | None = None, axis: str | None = None, wrap: bool = True) -> Tensor:
    """What the rank `by` places before this one along an axis holds; zeros where there is none (`wrap=False`).

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
    """What the rank holds that sends to this one: coordinate i of the axis sends to `permutation[i]` (-1: to none).

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
    """What a rank holds of a tensor, and the mesh it is on."""
    a_tensor(x, what)
    on = None if mesh is None else Mesh.from_torch(mesh)
    if isinstance(x, DTensor):
        if on is not None and on.write_root() != x.mesh.write_root():
            raise MeshError(f"{what} is a DTensor on mesh {x.mesh}, and mesh={on} another one; leave mesh= out")
        return x.to_local(), x.mesh if on is None else on
    if on is None:
        raise MeshError("point-to-point communication of a plain tensor needs mesh=; only a DTensor knows its own")
    return x, on
