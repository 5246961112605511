"""Looking up rows of a table: rows cut leave a pending sum, of which each rank gives what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..layout import Layout
from .notation import Call
from .piece import Piece, at_least_one, keep
from .table import rule


def _rows(call: Call, wants: Sequence[Layout]) -> Any:
    """Look up the rows that this rank holds; the others are zero."""
    if not wants[0].axes_of(0):
        return None
    piece, op = Piece(wants[0], 0), call.op

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        (weight, indices, *rest), numbers = piece.split(args)
        position, mine = piece.local(indices, numbers)
        found: Tensor = op(at_least_one(weight, 0), position, *rest, **kwargs)
        return keep(found, mine[..., None])

    return kernel, *piece.numbers


rule("embedding", "v d, ... -> ... d", linear=((0,),), passes="all", kernel=_rows)
rule("embedding_dense_backward", "... d, ... -> v d", linear=((0,),), whole="...?scale_grad_by_freq")
