"""What steers a trace, and whether the traced program belongs to one rank only, so that no other rank may be given it.

A traced program is the same on every rank unless a shape or a number of this rank entered it (uneven shards). Then a cache may
keep it only under a key that names the rank's coordinate; found out too late for the key, it is not kept at all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._torch.compiler import tracing_context
from .._torch.patches import install_patches
from .._torch.replacements import HOOKS
from .._torch.tensors import tree_leaves
from ..base.settings import Setting
from ..errors import CompileError
from ..layouts.layout import Layout, PerRank


class Steering(NamedTuple):
    """What steers the traces of a `with tracing(...)` block.

    whole_moves  a redistribution is one operator, which says from where to where: graph passes see what belongs together
    only_alike   programs that are not the same on every rank are refused
    """

    whole_moves: bool = False
    only_alike: bool = False


steering: Setting[Steering] = Setting("tracing", Steering())


def tracing(**changes: bool) -> AbstractContextManager[Steering]:
    """A block whose traces are steered so; what is not given stays as it is around it."""
    return steering.set(steering.get()._replace(**changes))


@dataclass(slots=True)
class Trace:
    """What is known of one trace: whether it is of one rank only, and whether its key says so."""

    specific: bool = False
    keyed: bool = False


def current() -> Trace | None:
    """The trace that is going on, or None."""
    context = tracing_context()
    if context is None:
        return None
    if not hasattr(context, "shardwise"):
        install_patches("tracing")
        context.shardwise = Trace()
    return context.shardwise


def is_of_one_rank() -> bool:
    """Whether ranks may differ in the program that is traced now, and so in what is decided by its sizes and uses of values."""
    trace = current()
    return trace is not None and trace.specific


def mark_specific(because: Any) -> None:
    """Say that what is traced now holds something of this rank, because of a layout or of values that differ between ranks."""
    trace = current()
    if trace is not None:
        if steering.get().only_alike:
            refuse_unequal(because)
        trace.specific = True


def varies(value: Any, places: int) -> bool:
    """Whether a PerRank in `value` is not the same at every place."""
    per_rank = [x for x in tree_leaves(value) if isinstance(x, PerRank)]
    return any(x.at(place) != x.at(0) for x in per_rank for place in range(places))


def refuse_unequal(because: Any) -> None:
    """Say why a program would be of one rank only."""
    if isinstance(because, Layout):
        unequal = [(dim, f) for dim, factors in enumerate(because.dims) for f in factors if min(f.sizes) != max(f.sizes)]
        dim, factor = unequal[0]
        sizes, axes = ", ".join(map(str, factor.sizes)), ", ".join(factor.axes)
        why = f"dim {dim} of {because}, of size {because.shape[dim]}, falls into unequal shards ({sizes}) over {axes}"
    else:
        pairs = [(x.at(0), x.at(1)) for x in tree_leaves(because) if isinstance(x, PerRank)]
        first, second = next((pair for pair in pairs if pair[0] != pair[1]), ("one thing", "another"))
        why = f"ranks differ in what they do with their shards ({first} on the first, {second} on the second)"
    raise CompileError(
        f"{why}: the program would be of one rank only; choose sizes that the axes divide, or pad or redistribute the tensor"
    )


def _is_misleading() -> bool:
    """Whether a cache would give the traced program to other ranks, which it does not fit."""
    trace = current()
    return trace is not None and trace.specific and not trace.keyed


HOOKS.is_of_one_rank, HOOKS.is_misleading = is_of_one_rank, _is_misleading
