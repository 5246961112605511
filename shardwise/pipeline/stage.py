"""Places modules on the ranks of their stage, and splits batches into microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.tensors import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from ..errors import PipelineError
from ..layouts.from_placements import Placements
from ..layouts.mesh import Mesh
from ..tensor.distribute import distribute
from ..tensor.dtensor import DTensor

# ── modules ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_apart(stages: Sequence[nn.Module]) -> None:
    """Refuse stages that share a parameter."""
    owners: dict[Any, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            first, known = owners.setdefault(parameter, (index, name))
            if first != index:
                raise PipelineError(
                    f"stage {index} has as {name!r} the parameter that is {known!r} of stage {first}: a parameter lives on the "
                    "ranks of one stage. Use it in one stage only, or give each stage its own "
                    "(nn.Parameter(p.detach().clone())); they are then trained apart"
                )


def put_on_mesh(module: nn.Module, mesh: Mesh, index: int) -> None:
    """Replace plain parameters and buffers by replicated ones on the stage's mesh; DTensors have to be on it already."""
    done: dict[Tensor, Tensor] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            if tensor.mesh.root is not mesh.root:
                raise PipelineError(
                    f"{name!r} of stage {index} is {tensor.layout} on ranks {list(tensor.mesh.ranks)}, the stage on ranks "
                    f'{list(mesh.ranks)}: distribute it over mesh["pp"].at({index}), the stage\'s own mesh'
                )
            continue
        if tensor not in done:
            made = distribute(tensor.detach(), mesh, None, 0)
            done[tensor] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, done[tensor])


# ── microbatches ──────────────────────────────────────────────────────────────────────────────────────────────────────


def onto(value: Any, mesh: Mesh, placements: Placements | None) -> Any:
    """Tensors in `value` on a mesh: plain ones by the placements, those on another mesh sharded by the same axes."""

    def placed(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return distribute(x.detach(), mesh, placements, None)
        if x.mesh.root is mesh.root:
            return x.detach()
        by_axis = zip(x.mesh.axes, x.layout.reduced().placements, strict=True)
        return x.redistribute(mesh, {axis: placement for axis, placement in by_axis if axis in mesh.axes}).detach()

    return tree_map_only(Tensor, placed, value)


class Split:
    """How the rows of a batch fall into microbatches: each takes as many from every shard, so that none has to move.

    >>> import shardwise as sw
    >>> x = sw.distribute_tensor(torch.arange(8), sw.init_mesh(dp=2), [sw.Shard(0)])
    >>> [part.tolist() for part in Split([x], 2).parts(x)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    def __init__(self, value: Any, microbatches: int) -> None:
        several = [x for x in tree_leaves(value) if isinstance(x, DTensor) and x.ndim]
        sizes = sorted({x.shape[0] for x in several})
        if len(sizes) != 1:
            raise PipelineError(f"inputs and targets of a pipeline have one number of rows (dim 0), got {sizes or 'none'}")
        self.microbatches = microbatches
        self.shards = max(math.prod(x.mesh.axis_sizes[axis] for axis in x.layout.axes_of(0)) for x in several)
        self.rows, left = divmod(sizes[0], self.shards * microbatches)
        if left or not self.rows:
            raise PipelineError(
                f"a batch of {sizes[0]} rows, in {self.shards} shards, does not fall into {microbatches} equal microbatches: "
                f"use a batch of a multiple of {self.shards * microbatches} rows, or another number of microbatches"
            )

    def parts(self, value: Any) -> list[Any]:
        """A value for each microbatch: tensors by their rows, all else as it is."""
        return [tree_map_only(DTensor, partial(self._part, index=index), value) for index in range(self.microbatches)]

    def _part(self, x: DTensor, index: int) -> DTensor:
        by_shard = (self.shards, self.microbatches, self.rows)
        return x.unflatten(0, by_shard).select(1, index).flatten(0, 1) if x.ndim else x

    def join(self, values: Sequence[Any]) -> Any:
        """What came of all microbatches as one value, with rows in the order of the batch."""
        flat, spec = zip(*map(tree_flatten, values), strict=True)
        leaves = [self._join(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*flat, strict=True)]
        return tree_unflatten(leaves, spec[0])

    def _join(self, parts: Sequence[DTensor]) -> Tensor:
        first = parts[0]
        if not first.ndim or first.shape[0] != self.shards * self.rows:
            raise PipelineError(
                f"the last stage gives {first.layout} for a microbatch of {self.shards * self.rows} rows: microbatches are put "
                "together along dim 0, which has to have as many"
            )
        return torch.stack([part.unflatten(0, (self.shards, self.rows)) for part in parts], 1).flatten(0, 2)
