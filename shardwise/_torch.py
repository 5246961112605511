"""Every private torch name used anywhere in Shardwise, each with the reason it is needed.

Supported: torch 2.11 to 2.13. Nothing else in the package touches `torch._*`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._decomp  # the table of decompositions is filled on import
import torch._meta_registrations  # noqa: F401  Python meta kernels give output shapes of many operators
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket", "decompositions", "make_wrapper", "no_torch_function"]

#: The only constructor of a tensor subclass that holds no memory of its own.
make_wrapper = torch.Tensor._make_wrapper_subclass

#: Turning the Python torch-function protocol off halves the cost of an operator on a subclass.
no_torch_function: Any = torch._C._disabled_torch_function_impl

#: Operator → a Python function of other operators; serves operators that have no rule.
decompositions: dict[Any, Any] = torch._decomp.decomposition_table
