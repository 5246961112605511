"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import embedding, factory, lists, loss, matmul, pointwise, views
from .table import TABLE, find, rule

__all__ = ["TABLE", "embedding", "factory", "find", "lists", "loss", "matmul", "pointwise", "rule", "views"]
