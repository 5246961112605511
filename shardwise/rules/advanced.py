"""Indexing by tensors: `x[i, :, j]` and `x[i, :, j] = y`. Each call has a sentence of its own: its dims come from the indices.

Letters: `u` for dims that are not indexed, `s` for those that are, `j` for the dims of the indices, broadcast together. All may
be cut; an `s` that is cut is read as a pending sum, and written to with a spare row for what falls to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layout import Layout
from .notation import Call, Pattern, Proposal, Rule
from .piece import Piece, at_least_one, keep, padded
from .table import rule

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)


def _letters(call: Call) -> tuple[list[str], list[str], list[str], list[int]]:
    """The letters of the tensor, of the indices together, of what is read, and the dims that are indexed."""
    indices = call["indices"]
    ndim = call["self"].ndim
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(indices[dim].shape for dim in indexed))
    own = [f"s{dim}" if dim in indexed else f"u{dim}" for dim in range(ndim)]
    together = [f"j{i}" for i in range(len(shape))]
    rest = [letter for letter in own if letter.startswith("u")]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = indexed[0] if adjacent else 0
    return own, together, [*rest[:before], *together, *rest[before:]], indexed


def _pattern(letters: Sequence[str]) -> Pattern:
    return Pattern(tuple(letters), False, None, ())


def _has_masks(call: Call) -> bool:
    return any(index is not None and index.dtype in MASKS for index in call["indices"])


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Cuts:
    """The indexed dims that are cut, and the numbers that kernels need of them."""

    def __init__(self, layout: Layout, indexed: Sequence[int]) -> None:
        self.pieces = {dim: Piece(layout, dim) for dim in indexed if layout.axes_of(dim)}
        self.numbers = [number for piece in self.pieces.values() for number in piece.numbers]

    def local(self, x: Tensor, indices: Sequence[Any], numbers: Sequence[Tensor], spare: bool) -> tuple[list[Any], Any]:
        """The indices as positions on this rank, and which elements are all on it (None: all)."""
        found, mine = list(indices), None
        taken = 0
        for dim, piece in self.pieces.items():
            own = numbers[taken : taken + len(piece.numbers)]
            taken += len(piece.numbers)
            index = torch.where(indices[dim] < 0, indices[dim] + piece.size, indices[dim])
            found[dim], here = piece.local(index, own, elsewhere=x.shape[dim] if spare else 0)
            mine = here if mine is None else mine & here
        return found, mine


def _read(indexed: Sequence[int], behind: int, call: Call, wants: Sequence[Layout]) -> Any:
    """Read what this rank holds; the rest is zero. `behind`: how many dims of the result come after those of the indices."""
    cuts, op = _Cuts(wants[0], indexed), call.op
    if not cuts.pieces:
        return None

    def kernel(x: Tensor, indices: Sequence[Any], *numbers: Tensor) -> Tensor:
        positions, mine = cuts.local(x, indices, numbers, spare=False)
        for dim in cuts.pieces:
            x = at_least_one(x, dim)
        return keep(op(x, positions), mine[(..., *[None] * behind)])

    return kernel, *cuts.numbers


def _write(indexed: Sequence[int], call: Call, wants: Sequence[Layout]) -> Any:
    """Write what this rank holds, and the rest to a spare row."""
    cuts, op, in_place = _Cuts(wants[0], indexed), call.op, call.written is not None
    if not cuts.pieces:
        return None

    def kernel(x: Tensor, indices: Sequence[Any], values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        count = len(args) - len(cuts.numbers)
        positions, _ = cuts.local(x, indices, args[count:], spare=True)
        out = x
        for dim in cuts.pieces:
            out = padded(out, dim)
        out = op(out, positions, values, *args[:count], **kwargs)
        for dim in cuts.pieces:
            out = out.narrow(dim, 0, x.shape[dim])
        return x.copy_(out) if in_place else out.contiguous()

    return kernel, *cuts.numbers


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _index(call: Call) -> Rule | Proposal:
    if _has_masks(call):
        return Proposal((), (), program=_by_number)
    own, together, out, indexed = _letters(call)
    inputs = (_pattern(own), *(_pattern(together) for _ in indexed))
    behind = len(out) - out.index(together[-1]) - 1 if together else 0
    return Rule(inputs, (_pattern(out),), linear=((0,),), passes="all", kernel=partial(_read, indexed, behind))


def _index_put(call: Call) -> Rule | Proposal:
    if _has_masks(call):
        return Proposal((), (), program=_fill_or_number)
    own, together, out, indexed = _letters(call)
    inputs = (_pattern(own), *(_pattern(together) for _ in indexed), _pattern(out))
    added = ((0, len(inputs) - 1),)
    kernel = partial(_write, indexed)
    if call["accumulate"]:
        return Rule(inputs, (_pattern(own),), linear=added, kernel=kernel)
    return Rule(inputs, (_pattern(own),), linear=added, kernel=kernel, whole=frozenset(together), lost=None)


# ── masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _numbers(indices: Sequence[Any]) -> list[Any]:
    """The indices with masks replaced by the numbers of their true elements."""
    found: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in MASKS:
            found += aten.nonzero(index).unbind(1)
        else:
            found.append(index)
    return found


def _by_number(tools: Any, op: Any, x: Any, indices: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    return op(x, _numbers(indices), *args, **kwargs)


def _fill_or_number(
    tools: Any, op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *unsafe: bool
) -> Any:
    """One value for all elements of one mask is a `masked_fill`, which needs no number of elements."""
    mask = indices[0]
    if accumulate or len(indices) > 1 or mask is None or values.numel() != 1:
        return op(x, _numbers(indices), values, accumulate, *unsafe)
    mask = mask.to(torch.bool)[(..., *[None] * (x.ndim - mask.ndim))]
    fill = aten.masked_fill_ if op._schema.is_mutable else aten.masked_fill
    return fill(x, mask, values.reshape(()).to(x.dtype))


_MASKS = "sum max min product cut: of masks, of which nobody knows how much they select until it is counted"
rule("index.Tensor _unsafe_index.Tensor", function=_index, unoffered=_MASKS)
rule("index_put _unsafe_index_put _index_put_impl", function=_index_put, unoffered=_MASKS)
