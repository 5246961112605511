"""`capture`: a distributed function becomes a local program, once; from then on only the local program runs.

Dynamo finds the operators of the user's function and guards what they depend on; AOTAutograd runs them on DTensors, forward and
backward, and sees plain operators and collectives on local tensors; graph passes improve these. No layout is looked at when the
program runs, and nothing is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch.compiler import hit_recompile_limit, local_graphs
from .._torch.tensors import OpOverload
from ..base.argument_checks import a_function
from ..comm.aliases import expected
from ..comm.failures import failed
from ..comm.tracing import is_of_one_rank, tracing
from ..comm.watch.log import watching
from .assemble import assemble
from .passes.captured import reduce_calls
from .passes.graph import WAIT, hold
from .passes.order import improve
from .show import line_of, show
from .training_step import align_leaves, traceable, whole_steps


class Captured(NamedTuple):
    """One local program: "forward", "backward" or (without gradients) "inference"."""

    part: str
    graph: GraphModule


class Program:
    """A captured function; call it like the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        a_function(function, "capture: function", "a function, a module or an optimizer's step")
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._start()

    def _start(self) -> None:
        self.captured: list[Captured] = []
        self._call = torch.compile(traceable(self._function), backend=self._trace, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except Exception as error:
            if not hit_recompile_limit(error):
                raise
            self._start()
            return self(*args, **kwargs)

    @whole_steps("captured")
    def _trace(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with tracing(whole_moves=True):
            return local_graphs(align_leaves(gm, inputs), inputs, self._keep, _held)

    def _keep(self, part: str, gm: GraphModule) -> Callable[[list[Any]], Any]:
        improve(gm)
        reduce_calls(gm.graph)
        gm.recompile()
        self.captured.append(Captured(part, gm))
        return _with_reports(gm.graph)

    def text(self) -> str:
        """The local programs as text: a line for each operator, and behind each collective the user's line that needs it."""
        return "\n\n".join(show(part, gm) for part, gm in self.captured)

    def print(self) -> None:
        """Print the local programs."""
        print(self.text())


def capture(function: Callable[..., Any]) -> Program:
    """A function, a module or an optimizer's `step`, traced at its first call to a local program of plain operators and
    collectives, the same on every rank, that later calls run without any work on layouts.

    It means what the function means, gradients included. A training step is captured whole: `backward`, an optimizer's `step`
    and `zero_grad` are parts of the program, and the results of such a function come without gradients.

    Inputs of another layout, shape or dtype, and whatever else the function depends on (its globals, attributes of modules),
    trace it anew; after as many programs as `torch._dynamo.config.recompile_limit` says (8) it starts over.

    >>> import shardwise as sw
    >>> mesh = sw.init_mesh(tp=2)
    >>> double = capture(lambda x: x * 2)
    >>> double(sw.ones(4, mesh=mesh, placements=[sw.Shard(0)])).sum().item()
    8.0
    """
    return Program(function)


def _held(joint: GraphModule) -> GraphModule:
    if is_of_one_rank():
        hold(joint.graph)
    return joint


# ── reports of collectives ────────────────────────────────────────────────────────────────────────────────────────────


def _with_reports(graph: Graph) -> Callable[[list[Any]], Any]:
    """A local program as a function. In blocks of `debug_mode` and `trace_comm` it is one that says before each collective for
    which operator and which line of the user it is; that one is made when it is first needed."""
    plain = assemble(graph)
    reporting = functools.cache(lambda: assemble(graph, _before))

    def run(inputs: list[Any]) -> Any:
        try:
            return plain(inputs) if watching.get() is None else reporting()(inputs)
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
