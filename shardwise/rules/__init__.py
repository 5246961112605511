"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import attention, embedding, factory, lists, loss, matmul, norm, pointwise, reduce, scan, views
from .table import TABLE, find, rule

__all__ = ["TABLE", "attention", "embedding", "factory", "find", "lists", "loss", "matmul", "norm", "pointwise", "reduce", "rule", "scan", "views"]
