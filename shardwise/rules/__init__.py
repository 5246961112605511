"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import matmul, pointwise
from .table import TABLE, find, rule

__all__ = ["TABLE", "find", "matmul", "pointwise", "rule"]
