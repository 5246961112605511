"""Flex attention on DTensors: what it means in terms of other operators, of which batch and heads may be sharded.

The functions that a user gives see global indices, whatever is sharded. Scores are whole matrices meanwhile.
"""

from __future__ import annotations

from .._torch.tensors import flex_operators
from ..tensor.dtensor import DTensor

for _operator, _meaning in flex_operators():
    _operator.py_impl(DTensor)(_meaning)
