"""`Sample`: one call of an operator on plain tensors, as rules are checked with; it can be written as a program to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.schema import schema_of
from .spread import filled, flat


@dataclass(frozen=True)
class Sample:
    """An operator overload and its arguments.

    >>> Sample(torch.ops.aten.sum.dim_IntList, (torch.ones(2, 3), [1]), {}).run()
    tensor([3., 3.])
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The overload as `aten.sum.dim_IntList`."""
        return f"{schema_of(self.op).name}.{self.op._overloadname}"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in flat((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def size(self) -> int:
        """The elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def key(self) -> tuple[Any, ...]:
        """What tells the sample from others that are like it: all but the values."""
        return (self.op, *(_fact(leaf) for leaf in flat((self.args, self.kwargs))), *self.kwargs)

    def kind(self) -> tuple[Any, ...]:
        """The same without the sizes."""
        return (self.op, *(_fact(leaf)[1:] if isinstance(leaf, Tensor) else leaf for leaf in flat((self.args, self.kwargs))))

    def given(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with other tensors."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in flat((self.args, self.kwargs))]
        args, kwargs = filled((self.args, self.kwargs), leaves)
        return args, kwargs

    def run(self, tensors: Sequence[Any] | None = None) -> Any:
        """The result on one device, or of other tensors; the sample's own are not written to."""
        args, kwargs = self.given([t.clone() for t in self.tensors] if tensors is None else tensors)
        with torch.no_grad():
            return self.op(*args, **kwargs)

    def written(self, names: Sequence[str]) -> str:
        """The call as code, with a name for each tensor."""
        args, kwargs = self.given([Name(name) for name in names])
        shown = [_code(value) for value in args] + [f"{name}={_code(value)}" for name, value in kwargs.items()]
        return f"torch.ops.{self.name}({', '.join(shown)})"


class Name(str):
    """A variable in a written program."""

    __slots__ = ()


def _fact(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def _code(value: Any) -> str:
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_code, value))
        return f"[{inside}]"
    if isinstance(value, torch.device):
        return repr(str(value))
    return repr(value)


def literal(tensor: Tensor) -> str:
    """A tensor as code.

    >>> literal(torch.ones(2, dtype=torch.int64)), literal(torch.ones(0, 2))
    ('torch.tensor([1, 1])', 'torch.zeros((0, 2))')
    """
    dtype = "" if tensor.dtype in (torch.float32, torch.int64, torch.bool) else f", dtype={tensor.dtype}"
    if not tensor.numel():
        kind = dtype if dtype or tensor.dtype is torch.float32 else f", dtype={tensor.dtype}"
        return f"torch.zeros({tuple(tensor.shape)}{kind})"
    return f"torch.tensor({tensor.tolist()}{dtype})"
