"""Operators whose result does not depend on values: `*_like` and `new_*`, and the ways from a tensor to a Python number."""

from __future__ import annotations

from typing import Any

from ..layout import Layout, make_layout
from ..placement import Replicate
from .notation import Call, Proposal
from .table import rule


def _like(call: Call) -> Proposal:
    """Cut as the argument is; nothing is pending, since every rank fills in the value itself."""
    layout, one = call.tensors[0], call.results[0]
    return Proposal((layout,), (Layout.of(layout.mesh, layout.dims, (), one.dtype, one.stride),))


rule("empty_like zeros_like ones_like full_like", function=_like)


def _new(call: Call) -> Proposal:
    layout, one = call.tensors[0], call.results[0]
    placements = [Replicate()] * layout.mesh.ndim
    return Proposal((layout,), (make_layout(one.shape, layout.mesh, placements, one.dtype, one.stride),))


rule("new_empty new_zeros new_ones new_full new_empty_strided", function=_new)


def _number(tools: Any, op: Any, x: Any) -> Any:
    return tools.plain(x, "item").item()


rule("_local_scalar_dense", program=_number)
