"""From tensors to one Python number or truth value: `item`, `equal`, `allclose`."""

from __future__ import annotations

from typing import Any

import torch

from ..propagation.table import rule
from ..tensor.toolbox import Toolbox

aten = torch.ops.aten


def _allclose(tools: Toolbox, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(aten.isclose(*args, **kwargs).all())


rule("_local_scalar_dense", program=lambda tools, op, x: tools.plain(x, "item").item())
rule("equal", program=lambda tools, op, x, other: x.shape == other.shape and bool((x == other).all()))
rule("allclose", program=_allclose)
