"""Fused recurrent layers and cells: the batch may be sharded, gradients of weights are then Partial(sum). What forward
operators keep for the backward ones is each rank's own, and of no use elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..base.schema import schema_of
from ..layouts.layout import Dim, Layout, whole
from ..layouts.mesh import Mesh
from ..propagation.table import rule
from ..redistribution.run import move
from ..tensor.toolbox import Toolbox
from ..tensor.wrapping import local_on
from .pooling import spatial
from .shard_position import at_least_one

# ── operators of which torch can tell the shapes; capitals cannot be sharded ──────────────────────────────────────────────

_fused = partial(spatial, whole=frozenset("TIGHKM"))
_fused("mkldnn_rnn_layer", "T n I, G I, G H, K G, K G, M n H, M n H -> T n H, M n H, M n H, =")
_fused("_thnn_fused_lstm_cell", "n G, n G, n H, G, G -> n H, n H, n G")
_fused("_thnn_fused_lstm_cell_backward_impl", "n H, n H, n H, n H, n G -> n G, n H, G", linear=((0, 1),))

# ── operators of which it cannot, and those that read what a rank kept for itself ─────────────────────────────────────

#: The dim that is the batch, from the back; of a result also that it is Partial(sum), or the rank's own; of an argument,
#: None: it is whole.
At = int | str | None
SUM, OWN = "sum", "own"


def _by_batch(dims: dict[str, int], results: Sequence[At], tools: Toolbox, op: Any, *args: Any) -> Any:
    """The operator on each rank's part of the batch, sharded as that of the first argument in `dims`; all else is whole. Where
    ranks kept something for themselves, that is the output of the forward operator, which it fits."""
    given, mesh, lead = schema_of(op).named(args, {}), tools.mesh(*args), next(iter(dims))
    batch = local_on(tools.cls, given[lead], mesh)[1].dims[dims[lead]]
    where = [dims.get(name) for name in given]
    local = [_placed(tools, value, at, (mesh, batch)) for value, at in zip(args, where, strict=True)]
    outs = tools.each(_on_some, mesh, op, where, results, *local)
    return tuple(_wrapped(tools, out, at, (mesh, batch)) for out, at in zip(outs, results, strict=True))


def _placed(tools: Toolbox, value: Any, at: At, rows: tuple[Mesh, Dim]) -> Any:
    """The local value of a tensor (or of each of a list) with the batch at dim `at` sharded."""
    if isinstance(value, list | tuple):
        return [_placed(tools, item, at, rows) for item in value]
    if not isinstance(value, Tensor):
        return value
    local, layout = local_on(tools.cls, value, rows[0])
    dims = [rows[1] if dim - layout.ndim == at else (whole(n),) for dim, n in enumerate(layout.shape)]
    return move(local, layout, layout.replace(dims=dims, partials=()), tools.operator)


def _wrapped(tools: Toolbox, value: Any, at: At, rows: tuple[Mesh, Dim]) -> Any:
    if isinstance(value, list | tuple):
        return [_wrapped(tools, item, at, rows) for item in value]
    if value is None:
        return None
    mesh, batch = rows
    shape = (0,) if at == OWN else tuple(value.shape)  # what differs from rank to rank is no shape of a tensor of all
    dims = [batch if dim - len(shape) == at else (whole(n),) for dim, n in enumerate(shape)]
    partials = [(axis, SUM) for factor in batch for axis in factor.axes if at == SUM]
    return tools.wrap(value, Layout.of(mesh, dims, partials, value.dtype))


def _on_some(op: Any, where: Sequence[At], results: Sequence[At], *args: Any) -> Any:
    """The operator, on a row of zeros where there is no batch; what comes of the row is dropped, and adds nothing to a sum."""
    rows = [isinstance(x, Tensor) and isinstance(at, int) for x, at in zip(args, where, strict=True)]
    filled = [at_least_one(x, at % x.ndim) if row else x for x, at, row in zip(args, where, rows, strict=True)]
    if all(a is b for a, b in zip(args, filled, strict=True)):
        return op(*args)
    outs = zip(op(*filled), results, strict=True)
    return tuple(x.narrow(at, 0, 0) if isinstance(at, int) and x is not None and x.ndim >= -at else x for x, at in outs)


_ROWS = -2
_GIVEN = dict.fromkeys(("output", "input", "hx_", "cx_tmp", "hy_", "cy_", "grad_output", "grad_hy", "grad_cy"), _ROWS)
rule("mkldnn_rnn_layer_backward", program=partial(_by_batch, _GIVEN, (_ROWS, SUM, SUM, SUM, SUM, _ROWS, _ROWS)))
_GATES = dict.fromkeys(("input_gates", "hidden_gates", "hx"), _ROWS)
rule("_thnn_fused_gru_cell", program=partial(_by_batch, _GATES, (_ROWS, _ROWS)))
_KEPT = dict.fromkeys(("grad_hy", "workspace"), _ROWS)
rule("_thnn_fused_gru_cell_backward", program=partial(_by_batch, _KEPT, (_ROWS, _ROWS, _ROWS, SUM, SUM)))


def _cudnn(results: Sequence[At], tools: Toolbox, op: Any, *args: Any) -> Any:
    """A packed batch is whole, and so is one with dropout, of which every row takes its own part of one draw."""
    given = schema_of(op).named(args, {})
    batch = -3 if given["batch_first"] else -2
    lead = "output" if "output" in given else "input"
    dims = {lead: batch, "input": batch, "grad_output": batch, **dict.fromkeys(("hx", "cx", "grad_hy", "grad_cy"), _ROWS)}
    if given["batch_sizes"] or (given["dropout"] and given["train"]):
        given[lead] = tools.replicated(given[lead], tools.mesh(*args), tools.operator)
    return _by_batch(dims, [batch if at is None else at for at in results], tools, op, *given.values())


rule("_cudnn_rnn", program=partial(_cudnn, (None, _ROWS, _ROWS, OWN, OWN)))
rule("_cudnn_rnn_backward", program=partial(_cudnn, (None, _ROWS, _ROWS, SUM)))
