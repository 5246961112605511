"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import factory, matmul, pointwise, views
from .table import TABLE, find, rule

__all__ = ["TABLE", "factory", "find", "matmul", "pointwise", "rule", "views"]
