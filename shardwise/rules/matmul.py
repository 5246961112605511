"""Matrix products."""

from __future__ import annotations

from .table import rule

rule("mm", "m k, k n -> m n", linear=((0,), (1,)))
