"""Operators that work element by element, with broadcasting."""

from __future__ import annotations

from .table import rule

# Linear in both arguments together.
rule("add sub rsub", "..., ... -> ...", linear=((0, 1),))
# Linear in each argument.
rule("mul", "..., ... -> ...", linear=((0,), (1,)))
rule("div.Tensor div.Scalar true_divide", "..., ... -> ...", linear=((0,),))
