"""`Sample`: one call of an operator on plain tensors, as rules are checked with; it can be written as a program to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._torch.tensors import tree_flatten, tree_unflatten
from ..base.schema import schema_of


@dataclass(frozen=True)
class Sample:
    """An operator, or a function of torch, and its arguments.

    >>> Sample(torch.ops.aten.sum.dim_IntList, (torch.ones(2, 3), [1]), {}).run()
    tensor([3., 3.])
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: bool = False

    @property
    def name(self) -> str:
        """The overload as `aten.sum.dim_IntList`."""
        return f"{schema_of(self.op).name}.{self.op._overloadname}"

    @cached_property
    def leaves(self) -> tuple[list[Any], Any]:
        """The arguments, out of the lists that they are in, and how they are nested in these."""
        return tree_flatten((self.args, self.kwargs))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves[0] if isinstance(leaf, Tensor)]

    @property
    def size(self) -> int:
        """The elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def key(self, sizes: bool = True) -> tuple[Any, ...]:
        """What tells the sample from others that are like it: all but the values, and the sizes if these do not matter."""
        shapes = [
            (leaf.dtype, tuple(leaf.shape) if sizes else leaf.ndim) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in self.leaves[0]
        ]
        return (self.op, *shapes, *self.kwargs)

    def given(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with other tensors."""
        left, (leaves, structure) = iter(tensors), self.leaves
        return tree_unflatten([next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    def run(self, tensors: Sequence[Any] | None = None) -> Any:
        """The result on one device, or of other tensors; the sample's own are not written to."""
        args, kwargs = self.given([t.clone() for t in self.tensors] if tensors is None else tensors)
        return self.op(*args, **kwargs)

    def written(self, names: Sequence[str]) -> str:
        """The call as code, with a name for each tensor."""
        args, kwargs = self.given([Name(name) for name in names])
        shown = [_code(value) for value in args] + [f"{name}={_code(value)}" for name, value in kwargs.items()]
        return f"torch.ops.{self.name}({', '.join(shown)})"


def grouped(samples: Iterable[Sample], key: Callable[[Sample], Any]) -> list[list[Sample]]:
    """The samples with one key together."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(repr(key(sample)), []).append(sample)
    return list(groups.values())


class Name(str):
    """A variable in a written program."""

    __slots__ = ()

    __repr__ = str.__str__


def _code(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_code, value))}]"
    return repr(str(value) if isinstance(value, torch.device) else value)


def literal(tensor: Tensor) -> str:
    """A tensor as code.

    >>> literal(torch.ones(2, dtype=torch.int64)), literal(torch.ones(0, 2))
    ('torch.tensor([1, 1])', 'torch.zeros((0, 2))')
    """
    inferred = (torch.float32, torch.int64, torch.bool) if tensor.numel() else (torch.float32,)
    dtype = "" if tensor.dtype in inferred else f", dtype={tensor.dtype}"
    value = f"tensor({tensor.tolist()}" if tensor.numel() else f"zeros({tuple(tensor.shape)}"
    return f"torch.{value}{dtype})"
