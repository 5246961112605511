"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import attention, embedding, factory, lists, loss, matmul, pointwise, reduce, views
from .table import TABLE, find, rule

__all__ = ["TABLE", "attention", "embedding", "factory", "find", "lists", "loss", "matmul", "pointwise", "reduce", "rule", "views"]
