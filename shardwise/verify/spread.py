"""Distributes tensors from index sets alone, without `redistribute`, and compares such tensors with those of one device.

Partial values are made to be hard to get right: summands have alternating signs and uneven magnitudes, other ones from element
to element, and add up exactly; where a max or a product is partial, every element has its own rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .._torch.tensors import tree_leaves
from ..comm import Bundle
from ..comm.encoding import combine
from ..comm.simulated import shared
from ..layouts.from_placements import make_layout
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..tensor.dtensor import DTensor

#: How far numbers may be apart, for the largest of them.
RELATIVE = 2e-4
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
                shard = shard.index_select(dim, torch.tensor(index, dtype=torch.long))
        point = dict(zip(mesh.axes, mesh.coordinates[place], strict=True))
        for number, (axis, kind) in enumerate(layout.partials):
            how = f"{kind} of one" if kind in ("sum", "avg") and number else kind
            shard = split(shard, how, mesh.axis_sizes[axis], turn + number)[point[axis]]
        shards.append(torch.empty_like(shard, memory_format=torch.preserve_format).copy_(shard))
    return Bundle(shards)


def _indices(layout: Layout, dim: int, place: int) -> list[int]:
    return [i for start, stop in layout.runs(dim, place) for i in range(start, stop)]


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
    summands = [mesh.axis_sizes[axis] for axis in kinds]  # dims before those of the tensor
    wholes: dict[Any, Tensor] = {}
    for place, shard in enumerate(shards_of(x)):
        point = dict(zip(mesh.axes, mesh.coordinates[place], strict=True))
        shard, key = shard.detach().to_dense(), tuple(point[axis] for axis in copies)
        if key not in wholes:
            wholes[key] = torch.empty([*summands, *layout.shape], dtype=shard.dtype)
        whole = wholes[key][tuple(point[axis] for axis in kinds)]
        held = [torch.tensor(_indices(layout, dim, place), dtype=torch.long) for dim in range(x.ndim)]
        index = tuple(indices.view([-1] + [1] * (x.ndim - dim - 1)) for dim, indices in enumerate(held))
        if shard.dtype in UNSIGNED:  # which torch cannot write by index
            whole, shard = whole.view(UNSIGNED[shard.dtype]), shard.contiguous().view(UNSIGNED[shard.dtype])
        whole[index] = shard
    for number, kind in reversed([*enumerate(kinds.values())]):
        wholes = {key: reduced(whole.unbind(number), kind) for key, whole in wholes.items()}
    return list(wholes.values())


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


# ── what differs from one device ──────────────────────────────────────────────────────────────────────────────────────


def difference(got: Any, want: Any, relative: float = RELATIVE) -> str | None:
    """Where two results (lists and tuples included) differ first; None where they agree.

    >>> difference(torch.ones(2), torch.zeros(2))
    'gives [1.0, 1.0], not [0.0, 0.0]'
    """
    several, wanted = tree_leaves(got), tree_leaves(want)
    if len(several) != len(wanted):
        return f"gives {len(several)} results, not {len(wanted)}"
    for number, (one, other) in enumerate(zip(several, wanted, strict=True)):
        text = _difference(one, other, relative)
        if text is not None:
            return text if len(wanted) == 1 else f"result {number} {text}"
    return None


def _difference(got: Any, want: Any, relative: float) -> str | None:
    if not isinstance(want, Tensor):
        same = got == want or (got != got and want != want)
        if isinstance(want, float | complex) and isinstance(got, int | float | complex):
            same = same or abs(got - want) <= relative * max(1.0, abs(want))
        return None if same else f"gives {got!r}, not {want!r}"
    if not isinstance(got, Tensor) or isinstance(got, Bundle):
        return f"gives a {type(got).__name__}, not a tensor"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"gives {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    want = want.detach()
    if not isinstance(got, DTensor):
        return _numbers(got.detach(), want, relative)
    for place, shard in enumerate(shards_of(got)):
        if tuple(shard.shape) != got.layout.local_shape(place):
            return f"holds {list(shard.shape)} at rank {place} of {got.layout}, not {list(got.layout.local_shape(place))}"
    common = shared(shards_of(got)) if want.layout == torch.strided else None
    if common is not None:
        return f"gives ranks {common[0]} and {common[1]} memory in common: a write on one would be one on the other"
    texts = (_numbers(whole, want, relative) for whole in assembled(got))
    return next((f"{text} ({got.layout})" for text in texts if text is not None), None)


def _numbers(got: Tensor, want: Tensor, relative: float) -> str | None:
    if want.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
    return None if close(got, want, relative) else _shown(got, want)


def close(got: Tensor, want: Tensor, relative: float = RELATIVE) -> bool:
    """Whether two tensors of one shape have the same numbers."""
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return torch.equal(got, want)
    wide = torch.complex128 if want.is_complex() else torch.float64
    relative = max(relative, 8 * torch.finfo(want.dtype).eps) if relative else 0.0
    one, other = got.to(wide), want.to(wide)
    largest = other.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if want.numel() else 0.0
    return torch.allclose(one, other, rtol=relative, atol=relative * max(1.0, largest), equal_nan=True)


def _shown(got: Tensor, want: Tensor) -> str:
    """Both values, or the element of many that differs most."""
    if want.numel() <= 8:
        return f"gives {got.tolist()}, not {want.tolist()}"
    wide = torch.complex128 if want.is_complex() else torch.float64
    apart = (got.to(wide) - want.to(wide)).abs()
    apart = torch.where(got.isnan() != want.isnan(), torch.inf, apart.nan_to_num(0.0, torch.inf))
    worst = int(apart.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)]
    one, other = got.reshape(-1)[worst].item(), want.reshape(-1)[worst].item()
    return f"gives {one} at {place}, not {other}"
