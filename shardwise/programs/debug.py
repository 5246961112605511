"""Captured programs under `debug_mode` and `trace_comm`: each collective is reported with its operator and the user's line.

A program is assembled a second time, with these reports in it, when it first runs in such a block; outside of one it runs
without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from .._torch.tensors import OpOverload
from ..comm.aliases import expected
from ..comm.failures import failed
from ..comm.watch.log import watching
from .assemble import assemble
from .passes.graph import WAIT
from .show import line_of


def with_checks(graph: Graph) -> Callable[[list[Any]], Any]:
    """A local program as a function, which reports its collectives in blocks of `debug_mode` and `trace_comm`."""
    plain = assemble(graph)
    telling = functools.cache(lambda: assemble(graph, _before))

    def run(inputs: list[Any]) -> Any:
        try:
            return plain(inputs) if watching.get() is None else telling()(inputs)
        except Exception as error:
            failed(error, "a captured program")
            raise
        finally:
            expected.origin = ("", "")

    return run


def _before(node: Node) -> Callable[..., None] | None:
    if not isinstance(node.target, OpOverload) or node.target is WAIT or node.target.namespace != "_c10d_functional":
        return None
    origin = str(node.meta.get("shardwise", "")).partition(": ")[0], line_of(node)
    return lambda *args: setattr(expected, "origin", origin)
