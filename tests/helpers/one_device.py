"""The law of the house, as functions for tests: an operator on DTensors gives what it gives on one device.

A `Sample` is a function of tensors and the tensors to call it with. `check(sample, mesh, placements)` distributes the tensors
(partial values are split as `shardwise.verify` splits them), calls the function on both and compares values, shapes and dtypes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard
from shardwise.verify.spread import local_shards
from shardwise.verify.spread import spread as distributed

__all__ = ["MESHES", "Sample", "check", "distributed", "equal", "every_placement", "local_shards", "placements_of", "sample"]


@dataclass(frozen=True)
class Sample:
    """A call: `function(*tensors)`. `mutates` names positions of arguments that the function writes to. `partial` is False
    where partial inputs make no sense (indices, masks)."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    mutates: tuple[int, ...] = ()
    partial: bool = True
    atol: float = 1e-5
    rtol: float = 1.3e-5


def sample(function: Callable[..., Any], *inputs: Any, **words: Any) -> Sample:
    """A sample; a shape stands for a random float tensor of a fixed seed.

    >>> sample(torch.add, (3, 4), (4,)).tensors[1].shape
    torch.Size([4])
    """
    generator = torch.Generator().manual_seed(len(inputs))
    tensors = tuple(i if isinstance(i, Tensor) else torch.randn(i, generator=generator) for i in inputs)
    return Sample(function, tensors, **words)


def every_placement(tensor: Tensor, mesh: Mesh, partial: bool = True) -> Iterator[tuple[Any, ...]]:
    """All per-axis placements of a tensor: Replicate, every Shard, and Partial(sum) where the dtype has signs."""
    options: list[Any] = [Replicate(), *(Shard(d) for d in range(tensor.ndim))]
    if partial and tensor.is_floating_point():
        options.append(Partial("sum"))
    return itertools.product(options, repeat=mesh.ndim)


def placements_of(sample: Sample, mesh: Mesh, limit: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Combinations of placements of a sample's tensors: all, or a fixed random choice of `limit`."""
    every = [list(every_placement(t, mesh, sample.partial)) for t in sample.tensors]
    if math.prod(map(len, every)) <= limit:
        return list(itertools.product(*every))
    generator = torch.Generator().manual_seed(seed)
    picks = [[int(torch.randint(len(o), (), generator=generator)) for o in every] for _ in range(limit)]
    return [tuple(o[i] for o, i in zip(every, pick, strict=True)) for pick in picks]


def check(sample: Sample, mesh: Mesh, placements: Sequence[Any]) -> None:
    """Assert that the sample means the same on DTensors."""
    dense = [t.clone() for t in sample.tensors]
    want = sample.function(*dense)
    spread = [distributed(t, mesh, p) for t, p in zip(sample.tensors, placements, strict=True)]
    layouts = [x.layout for x in spread]
    got = sample.function(*spread)
    about = f"{[repr(layout) for layout in layouts]} on {mesh}"
    for one, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
        equal(one, other, about, sample)
    for i in sample.mutates:
        equal(spread[i], dense[i], f"written argument {i}: {about}", sample)


def equal(got: Any, want: Any, about: str, sample: Sample | None = None) -> None:
    """Assert that a DTensor has the value, shape and dtype of a plain tensor, on every rank."""
    if not isinstance(want, Tensor):
        assert got == want, f"{about}: got {got}, want {want}"
        return
    atol, rtol = (sample.atol, sample.rtol) if sample else (1e-5, 1.3e-5)
    if isinstance(got, DTensor):
        assert got.shape == want.shape and got.dtype == want.dtype, f"{about}: got {got!r}, want {want.shape} {want.dtype}"
        whole = got.detach().redistribute(placements=got.layout.replicated()).to_local()
        for place in range(len(got.mesh.ranks)):
            held = tuple(got.to_local().shards[place].shape)
            assert held == got.layout.local_shape(place), f"{about}: {got!r} holds {held} at place {place}"
        shards: Sequence[Tensor] = whole.shards
    else:
        shards = [got]
    for shard in shards:
        torch.testing.assert_close(
            shard, want, atol=atol, rtol=rtol, equal_nan=True, msg=lambda text: f"{about} → {got!r}\n{text}"
        )


with sw.simulate(8):  # also where this is imported by a process of a real world
    MESHES = {"2": sw.init_mesh(a=2), "3": sw.init_mesh(a=3), "2x2": sw.init_mesh(a=2, b=2)}
    MESHES["2x2x2"] = sw.init_mesh(a=2, b=2, c=2)
