"""torch's database of operators: names, sample inputs, in-place forms. The one file that reads `torch.testing`'s own tests.

Not imported by the package itself: the database takes seconds to load.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from .spread import filled, flat

#: Operators whose results nobody wrote: there is nothing to compare.
UNINITIALISED = ("empty", "resize_")
#: The dtypes that matter.
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True)
class Case:
    """One call: `function(*values)`, where the leaves of `values` that are tensors may be replaced."""

    function: Callable[..., Any]
    values: tuple[Any, ...]
    differentiable: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in flat(self.values) if isinstance(leaf, Tensor)]

    def run(self, tensors: list[Any]) -> Any:
        """The call with other tensors."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in flat(self.values)]
        input, args, kwargs = filled(self.values, leaves)
        return self.function(input, *args, **kwargs)


def operators() -> dict[str, Any]:
    """Every entry of the database by its full name, as `nn.functional.conv2d` or `std.unbiased`."""
    return {op.full_name: op for op in op_db}


def uninitialised(name: str) -> bool:
    """Whether an operator gives memory as it is."""
    return any(word in name for word in UNINITIALISED)


def cases(op: Any, dtype: torch.dtype | None, limit: int, inplace: bool = False) -> list[Case]:
    """Up to four times `limit` calls on dense tensors, of the first of `DTYPES` that the operator has where none is given; none
    where it has no such dtype, or no in-place form."""
    function, known = op.get_inplace() if inplace else op, op.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in known), None) if dtype is None else dtype
    if function is None or dtype not in known:
        return []
    torch.manual_seed(0)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs("cpu", dtype, requires_grad=False)
        for sample in itertools.islice(samples, 4 * limit):
            differentiable = op.supports_inplace_autograd if inplace else op.supports_autograd
            one = Case(function, (sample.input, sample.args, sample.kwargs), bool(differentiable))
            if one.tensors and all(t.layout is torch.strided for t in one.tensors):
                found.append(one)
    return found


def chosen(several: list[Case], limit: int) -> list[Case]:
    """Some of the calls; variants of one follow one another, so they are taken at equal distances."""
    return several[:: max(1, len(several) // limit)][:limit]


class _Draws(TorchDispatchMode):
    """Notes whether any operator drew random numbers: it may, and the state of the generator is another one after it."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        self.drawn = self.drawn or not torch.equal(before, torch.get_rng_state())
        return out


def is_random(case: Case) -> bool:
    """Whether a call draws random numbers."""
    with _Draws() as mode:
        case.run([t.clone() for t in case.tensors])
    return mode.drawn
