"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import (
    advanced,
    attention,
    chance,
    embedding,
    factory,
    index,
    lists,
    loss,
    matmul,
    norm,
    pointwise,
    pool,
    reduce,
    scan,
    spatial,
    views,
)
from .table import TABLE, find, rule

__all__ = [
    "TABLE",
    "advanced",
    "attention",
    "chance",
    "embedding",
    "factory",
    "find",
    "index",
    "lists",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "pool",
    "reduce",
    "rule",
    "scan",
    "spatial",
    "views",
]
