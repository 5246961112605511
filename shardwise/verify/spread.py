"""Distributes a tensor from index sets alone, without `redistribute`, and with partial values that are hard to get right.

Summands have alternating signs and uneven magnitudes, other ones from element to element, and add up exactly; where a max or a
product is partial, every element has its own rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..comm import Bundle
from ..comm.encoding import combine
from ..layouts.from_placements import make_layout
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..tensor.dtensor import DTensor

#: Unsigned integers, and what their bits are read as.
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def simulated_mesh(shape: tuple[int, ...]) -> Mesh:
    """A mesh of simulated ranks with axes a, b and so on."""
    return Mesh(tuple("abcdef"[: len(shape)]), shape, range(math.prod(shape)), "cpu", "simulated")


def spread(tensor: Tensor, mesh: Mesh, placements: Any, turn: int = 0) -> DTensor:
    """A DTensor of a plain tensor; another `turn` splits partial values otherwise.

    >>> from ..comm import init_mesh
    >>> from ..layouts.placement import Partial
    >>> spread(torch.tensor([3.0, 5.0]), init_mesh(a=2), [Partial()]).to_local().shards
    (tensor([ 6., -5.]), tensor([-3., 10.]))
    """
    layout = placements if isinstance(placements, Layout) else make_layout(tensor.shape, mesh, placements, tensor.dtype)
    return DTensor.from_local(local_shards(tensor, layout, turn), mesh, layout, run_check=False)


def shards_of(x: DTensor) -> tuple[Tensor, ...]:
    """The local tensor of each rank of a simulated DTensor."""
    return cast(Bundle, x._local).shards


def local_shards(tensor: Tensor, layout: Layout, turn: int = 0) -> Bundle:
    """What each rank holds of a tensor in a layout."""
    mesh, shards = layout.mesh, []
    for place in range(len(mesh.ranks)):
        shard = tensor
        for dim in range(tensor.ndim):
            index = _indices(layout, dim, place)
            if len(index) != tensor.shape[dim]:
                shard = shard.index_select(dim, index)
        point = dict(zip(mesh.axes, mesh.coordinates[place], strict=True))
        for number, (axis, kind) in enumerate(layout.partials):
            how = f"{kind} of one" if kind in ("sum", "avg") and number else kind
            shard = split(shard, how, mesh.axis_sizes[axis], turn + number)[point[axis]]
        shards.append(torch.empty_like(shard, memory_format=torch.preserve_format).copy_(shard))
    return Bundle(shards)


def _indices(layout: Layout, dim: int, place: int) -> Tensor:
    return torch.tensor([i for start, stop in layout.runs(dim, place) for i in range(start, stop)], dtype=torch.long)


def assembled(x: DTensor) -> list[Tensor]:
    """The whole value, as each set of ranks that hold a copy of it has it; from index sets alone, as `local_shards`.

    >>> from ..comm import init_mesh
    >>> from ..layouts.placement import Shard
    >>> assembled(spread(torch.arange(3), init_mesh(a=2, b=2), {"a": Shard(0)}))
    [tensor([0, 1, 2]), tensor([0, 1, 2])]
    """
    layout, mesh = x._layout, x._layout.mesh
    kinds = dict(layout.partials)
    copies = [axis for axis in mesh.axes if axis not in layout.states]
    wholes: dict[Any, dict[Any, Tensor]] = {}
    for place, shard in enumerate(shards_of(x)):
        point = dict(zip(mesh.axes, mesh.coordinates[place], strict=True))
        summands = wholes.setdefault(tuple(point[axis] for axis in copies), {})
        partials = tuple(point[axis] for axis in kinds)
        if partials not in summands:
            summands[partials] = torch.empty(layout.shape, dtype=shard.dtype)
        _put(summands[partials], shard.detach().to_dense(), layout, place)
    return [_combined(summands, list(kinds.values())) for summands in wholes.values()]


def _put(whole: Tensor, shard: Tensor, layout: Layout, place: int) -> None:
    index = torch.meshgrid(*(_indices(layout, dim, place) for dim in range(shard.ndim)), indexing="ij") if shard.ndim else ()
    if shard.dtype in UNSIGNED:  # which torch cannot write by index
        whole, shard = whole.view(UNSIGNED[shard.dtype]), shard.contiguous().view(UNSIGNED[shard.dtype])
    whole[index] = shard


def _combined(summands: dict[Any, Tensor], kinds: list[str]) -> Tensor:
    """The summands reduced over one axis after the other."""
    for kind in reversed(kinds):
        groups: dict[Any, list[Tensor]] = {}
        for partials, value in sorted(summands.items(), key=lambda item: item[0]):
            groups.setdefault(partials[:-1], []).append(value)
        summands = {partials: reduced(values, kind) for partials, values in groups.items()}
    return summands[()]


def reduced(values: Sequence[Tensor], kind: str) -> Tensor:
    """What values of some ranks are together."""
    return combine(values, "sum") / len(values) if kind == "avg" else combine(values, kind)


def split(x: Tensor, kind: str, ranks: int, turn: int = 0) -> list[Tensor]:
    """What each of some ranks holds of a value that is partial.

    >>> split(torch.tensor([1.0, 2.0]), "max", 2)
    [tensor([1.0000, 1.6250]), tensor([-1.,  2.])]
    """
    if ranks == 1:
        return [x.clone()]
    owner = torch.randint(ranks, x.shape, generator=torch.Generator().manual_seed(turn))
    second = (owner + 1) % ranks
    given = x * ranks if kind.startswith("avg") else x
    return [_SPLITS[kind](given, owner == rank, second == rank) for rank in range(ranks)]


def _sum(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    if x.dtype is torch.bool:
        return x & first
    if not (x.is_floating_point() or x.is_complex()):
        return torch.where(first, x - 7, 0) + torch.where(second, 7, 0).to(x.dtype)
    calm = x.isfinite() & (x.abs() < torch.finfo(x.dtype).max / 4)
    other = torch.where(x == 0, torch.ones_like(x), x)
    mine = torch.where(first, torch.where(x == 0, other, 2 * x), torch.where(second, -other, torch.zeros_like(x)))
    return torch.where(calm, mine, torch.where(first, x, torch.zeros_like(x)))


def _extreme(sign: int, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    alternate = torch.arange(x.numel()).reshape(x.shape) % 2 == 0
    if x.dtype is torch.bool:
        held = first | (second & alternate)  # some by several ranks
        return x & held if sign < 0 else x | ~held
    step = 1 + x.abs()
    if x.is_floating_point():
        step = torch.where(alternate, step, step / 8)
    away = x + sign * torch.where(second, step, 2 * step)
    return torch.where(first | ~x.isfinite(), x, away)


def _product(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    if x.dtype is torch.bool:
        return x | ~first
    big, small = (-2, -0.5) if x.is_floating_point() or x.is_complex() else (-1, -1)
    one = torch.ones_like(x)
    return torch.where(first, x * big, torch.where(second, one * small, one))


def _one(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A sum over a second axis: one rank has it all, so that adding up over both is exact in any order."""
    return torch.where(first, x, torch.zeros_like(x))


_SPLITS: dict[str, Any] = {
    **{"sum": _sum, "avg": _sum, "sum of one": _one, "avg of one": _one, "product": _product},
    **{"max": partial(_extreme, -1), "min": partial(_extreme, 1)},
}
