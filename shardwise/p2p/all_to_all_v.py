"""`all_to_all_v`: each rank sends a number of rows, data or known beforehand, to each rank along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compiler import Function, keep_alive
from .._torch.tensors import collectives
from ..base.argument_checks import a_tensor, integers, optional, refuse, several
from ..comm import Bundle, PerRank, transport
from ..comm.interception import watched
from ..comm.tracing import current
from ..comm.transport import Counts
from ..errors import OperatorError
from ..layouts.mesh import Mesh
from ..propagation.table import LIBRARY
from .patterns import local_of, ready

wait_tensor = collectives.wait_tensor.default


def all_to_all_v(
    x: Tensor,
    going: Tensor | Sequence[int] | Sequence[Sequence[int]],
    coming: Tensor | None = None,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
) -> Tensor:
    """The rows that the ranks along an axis send to this one, in their order; those of `x` lie in the order of the ranks they
    go to, `going[j]` of them for the j-th.

    `going` is data, a tensor of counts that is each rank's own, or it is known: a table, `going[i][j]` rows from the i-th to
    the j-th, or one row for all. Data the ranks tell each other first, unless they know it as `coming`: what this function
    makes of `going` itself, with one row for each. The backward sends gradients the other way.

    >>> import shardwise as sw
    >>> x = sw.Bundle([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])])
    >>> going = sw.Bundle([torch.tensor([1, 2]), torch.tensor([1, 0])])
    >>> all_to_all_v(x, going, mesh=sw.init_mesh(ep=2)).shards
    (tensor([1., 4.]), tensor([2., 3.]))
    """
    x, mesh = local_of(x, mesh, "all_to_all_v: x")
    optional(a_tensor, coming, "all_to_all_v: coming")
    on, axis = mesh.write_root(), mesh.named(axis)
    if not isinstance(going, Tensor):
        table = _table(going, mesh.size_of(axis))
        if torch.compiler.is_compiling():
            return torch.ops.shardwise.rows_known(x, [n for row in table for n in row], on, axis, LIBRARY.key())
        return _swap(x, _known(table, mesh, axis))
    if going.dtype.is_floating_point or going.dtype.is_complex or going.shape != (mesh.size_of(axis),):
        refuse(
            "all_to_all_v: going", f"a tensor of {mesh.size_of(axis)} integers, the rows for each rank along {axis!r}", going
        )
    if torch.compiler.is_compiling():
        return torch.ops.shardwise.rows_counted(x, going, coming, on, axis, LIBRARY.key())
    return _swap(x, _Counts(mesh.root, axis, going, _counts_received(going, mesh.root, axis) if coming is None else coming))


def _table(going: Any, size: int) -> list[list[int]]:
    what = "all_to_all_v: going"
    given = several(going, what, f"a tensor of {size} counts, several counts, or a table of them")
    if given and isinstance(given[0], Sequence) and not isinstance(given[0], str):
        rows = [list(integers(row, what, 0)) for row in given]
    else:
        rows = [list(integers(given, what, 0))] * size
    if len(rows) != size or any(len(row) != size for row in rows):
        raise OperatorError(
            f"all_to_all_v along an axis of size {size} takes as going {size} counts, or a table of {size} rows, got "
            f"{len(rows)} rows of {sorted({len(row) for row in rows})}"
        )
    return rows


# ── how many rows ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Counts(NamedTuple):
    """How many rows go to, and come from, each of an axis: known of all ranks, or data."""

    mesh: Mesh
    axis: str
    going: Tensor | PerRank
    coming: Tensor | PerRank


def _known(table: Sequence[Sequence[int]], mesh: Mesh, axis: str) -> _Counts:
    at = [point[mesh.root.axes.index(axis)] for point in mesh.root.coordinates]
    going = PerRank(lambda place: tuple(table[at[place]]))
    coming = PerRank(lambda place: tuple(row[at[place]] for row in table))
    return _Counts(mesh.root, axis, going, coming)


def _counts_received(going: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """How many rows come from each, told by those who send them."""
    ones = (1,) * mesh.size_of(axis)
    return transport(mesh, "p2p").all_to_all(going.to(torch.int64), ones, ones, mesh, (axis,))


def _numbers(counts: Tensor | PerRank) -> Counts:
    if isinstance(counts, PerRank):
        return counts
    if isinstance(counts, Bundle):
        shards = counts.shards
        return PerRank(lambda place: tuple(shards[place].tolist()))
    return tuple(counts.tolist())


# ── the rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _swap(x: Tensor, how: _Counts) -> Tensor:
    """The rows that come, differentiable."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Swap.apply(x, how)
    return _run(x, how)


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _Counts) -> Tensor:
        ctx.how = how
        return _run(x, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        how: _Counts = ctx.how
        return _swap(grad, how._replace(going=how.coming, coming=how.going)), None


def _run(x: Tensor, how: _Counts) -> Tensor:
    given = tuple(value for value in (x, how.going, how.coming) if isinstance(value, Tensor))
    if not transport(how.mesh, "p2p").traced(x):
        return watched("p2p", (how.mesh, how.axis), given, lambda: _now(x, how))
    current()  # torch is patched for a trace that communicates
    if isinstance(how.going, Tensor):
        return wait_tensor(torch.ops.shardwise.rows(*given, how.mesh.text, how.axis))
    return _now(x, how)


def _now(x: Tensor, how: _Counts) -> Tensor:
    world, width = transport(how.mesh, "p2p"), math.prod(x.shape[1:])
    going, coming = _numbers(how.going), _numbers(how.coming)
    flat = world.each(_flat, how.mesh, x, going, how.axis)
    out = world.all_to_all(flat, _times(going, width), _times(coming, width), how.mesh, (how.axis,))
    return world.each(lambda flat, counts: flat.view(sum(counts), *x.shape[1:]), how.mesh, out, coming)


def _times(counts: Counts, width: int) -> Counts:
    if isinstance(counts, PerRank):
        return PerRank(lambda place: tuple(n * width for n in counts.at(place)))
    return tuple(n * width for n in counts)


def _flat(x: Tensor, going: tuple[int, ...], axis: str) -> Tensor:
    if x.ndim == 0 or x.shape[0] != sum(going):
        raise OperatorError(
            f"all_to_all_v along {axis!r}: counts {list(going)} are {sum(going)} rows, the tensor has shape {list(x.shape)}"
        )
    return x.reshape(-1)


# ── as operators of a traced program ──────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::rows_known", "(Tensor x, SymInt[] table, str mesh, str axis, str library) -> Tensor")
torch.library.define(
    "shardwise::rows_counted", "(Tensor x, Tensor going, Tensor? coming, str mesh, str axis, str library) -> Tensor"
)
torch.library.define("shardwise::rows", "(Tensor x, Tensor going, Tensor coming, str mesh, str axis) -> Tensor")


def _known_traced(x: Tensor, table: Sequence[int], mesh: str, axis: str, library: str) -> Tensor:
    on, size = ready(mesh), math.isqrt(len(table))
    return _swap(x, _known([table[i * size : (i + 1) * size] for i in range(size)], on, axis))


def _counted_traced(x: Tensor, going: Tensor, coming: Tensor | None, mesh: str, axis: str, library: str) -> Tensor:
    on = ready(mesh)
    return _swap(x, _Counts(on, axis, going, _counts_received(going, on, axis) if coming is None else coming))


def _rows_now(x: Tensor, going: Tensor, coming: Tensor, mesh: str, axis: str) -> Tensor:
    return _now(x, _Counts(Mesh.read(mesh), axis, going, coming))


def _rows_fake(x: Tensor, going: Tensor, coming: Tensor, mesh: str, axis: str) -> Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), *x.shape[1:]))


torch.library.impl("shardwise::rows_known", "CompositeImplicitAutograd", _known_traced)
torch.library.impl("shardwise::rows_counted", "CompositeImplicitAutograd", _counted_traced)
torch.library.impl("shardwise::rows", "CompositeExplicitAutograd", _rows_now)
torch.library.register_fake("shardwise::rows", _rows_fake)
keep_alive(torch.ops.shardwise.rows.default)
