"""Matrix products: linear in each factor, and in each together with what is added; a dim summed over leaves a pending sum."""

from __future__ import annotations

from .table import rule

rule("mm", "m k, k n -> m n", linear=((0,), (1,)))
rule("bmm", "b m k, b k n -> b m n", linear=((0,), (1,)))
rule("mv", "m k, k -> m", linear=((0,), (1,)))
rule("dot vdot", "k, k -> ", linear=((0,), (1,)))

rule("addmm", "m n, m k, k n -> m n", linear=((0, 1), (0, 2)))
rule("baddbmm", "b m n, b m k, b k n -> b m n", linear=((0, 1), (0, 2)))
rule("addbmm", "m n, b m k, b k n -> m n", linear=((0, 1), (0, 2)))
rule("addmv", "m, m k, k -> m", linear=((0, 1), (0, 2)))
rule("addr", "m n, m, n -> m n", linear=((0, 1), (0, 2)))
