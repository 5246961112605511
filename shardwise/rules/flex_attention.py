"""Flex attention on DTensors: it is decomposed into operators that have rules, so batch and heads may be sharded.

The functions that a user gives see global indices, whatever is sharded. The matrix of scores is materialised.
"""

from __future__ import annotations

from .._torch.tensors import flex_operators
from ..tensor.dtensor import DTensor

for _operator, _meaning in flex_operators():
    _operator.py_impl(DTensor)(_meaning)
