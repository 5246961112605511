"""The one table of rules. Importing this package fills it: one file per operator family."""

from . import (  # noqa: F401  importing them fills the table
    advanced,
    attention,
    chance,
    embedding,
    factory,
    fourier,
    index,
    linalg,
    lists,
    loss,
    matmul,
    norm,
    order,
    pointwise,
    pool,
    recurrent,
    reduce,
    scan,
    spatial,
    views,
)
from .table import TABLE, find, rule

__all__ = ["TABLE", "find", "rule"]
