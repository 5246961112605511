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

from .compare import difference
from .spread import filled, flat

#: Operators whose results nobody wrote: there is nothing to compare.
UNINITIALISED = ("empty", "resize_")


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


def cases(op: Any, dtype: torch.dtype, limit: int, inplace: bool = False) -> list[Case]:
    """Some calls of an operator on dense tensors; none where it has no such dtype, or no in-place form."""
    function = op.get_inplace() if inplace else op
    if function is None or dtype not in op.supported_dtypes("cpu"):
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
    step = max(1, len(found) // limit)  # variants of a sample follow one another
    return found[::step][:limit]


def is_random(case: Case) -> bool:
    """Whether a call on one device gives something else when it is repeated."""
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(case.run([t.clone() for t in case.tensors]))
    return difference(results[0], results[1], relative=0.0) is not None
