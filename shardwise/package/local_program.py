"""Traces the local program of a model, which serves every rank of a job, in one process, with or without the job.

The tensors of the model and of the example are replaced by one rank's shards without values, on the same mesh of processes.
They are traced as in `sw.capture`, to a graph of local operators and collectives. The traced function is called once with a
program that only makes results of the right shapes, to find out which inputs the graph takes and where its outputs go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .._torch.compiler import local_graphs, sizes_of_data
from .._torch.tensors import tree_flatten, tree_unflatten
from ..comm import Bundle, seen
from ..comm.tracing import refuse_unequal, tracing
from ..errors import CompileError
from ..layouts.mesh import Mesh
from ..programs.passes.graph import remove_dead
from ..programs.passes.order import improve
from ..programs.show import FRAME
from ..programs.training_step import traceable, whole_steps
from ..tensor.dtensor import DTensor
from ..tensor.wrapping import wrap
from .collectives import carry

_TORCH = str(Path(torch.__file__).parent)


class Traced(NamedTuple):
    """A local program.

    graph    takes a list of local tensors and gives one
    inputs   the local tensors it was traced with
    results  what the function gave, flat; `outputs` says which output of the graph each tensor is
    writes   for the known tensors that are written to, by their position, which output of the graph they become
    """

    graph: GraphModule
    inputs: list[Tensor]
    results: list[Any]
    outputs: list[int | None]
    writes: dict[int, int | None]
    structure: Any


def stand_in(x: Tensor, mesh: Mesh, name: str) -> Tensor:
    """A tensor as one rank of a job holds it, without its values; plain tensors are the same on every rank."""
    if not isinstance(x, DTensor):
        return x
    layout = x._layout
    if seen(layout.mesh.root) is not seen(mesh.root):
        raise CompileError(f"{name} lives on the mesh {layout.mesh}, the package is for {mesh}; move it there first")
    try:
        if not layout.even:
            refuse_unequal(layout)
    except CompileError as error:
        raise CompileError(f"{name}: {error}") from None
    layout = layout.replace(mesh=seen(layout.mesh))
    shard = x._local.shards[0] if isinstance(x._local, Bundle) else x._local
    found: DTensor = wrap(DTensor, torch.zeros_like(shard, device=layout.device), layout)
    return nn.Parameter(found, requires_grad=False) if isinstance(x, nn.Parameter) else found


# ── tracing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[Tensor]) -> Traced:
    """The local program of a function of `args` and `kwargs`, on the rank pretended; `known` are the tensors that stand in for
    those of the model and of the example."""
    copied, written = set[int](), list[int]()
    while True:
        before = [x._version for x in known]
        traced = _Tracing(function, known, copied, written).run(args, kwargs)
        # Results that share memory with an input, and what is written to inputs, are no outputs of the graph: copies are.
        shared = {i for i, x in enumerate(traced.results) if isinstance(x, Tensor) and traced.outputs[i] is None}
        changed = [i for i, x in enumerate(known) if x._version != before[i]]
        if shared <= copied and changed == written:
            return traced
        copied, written = copied | shared, changed


class _Tracing:
    """One trace; `copied` and `written` say of which results, and of which known tensors, copies are results as well."""

    def __init__(self, function: Callable[..., Any], known: Sequence[Tensor], copied: set[int], written: list[int]) -> None:
        self._function, self._known, self._copied, self._written = function, known, copied, written
        self._graph: GraphModule | None = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """Trace the function, and find out what its inputs and results are in the graph."""
        compiled = torch.compile(traceable(self._call), backend=self._backend, fullgraph=True, dynamic=False)
        try:
            with torch.no_grad(), tracing(only_alike=True), sizes_of_data():
                results, after = compiled(*args, **kwargs)
        except Exception as error:
            raise _cause(error) from None
        leaves, structure = tree_flatten(_unnamed(results))
        if self._graph is None:
            raise CompileError("the function computes nothing from its inputs: there is nothing to export")
        places = {id(output): place for place, output in enumerate(self._outputs)}
        outputs, final = ([places.get(id(local_of(x))) for x in found] for found in (leaves, after))
        return Traced(self._graph, self._inputs, leaves, outputs, dict(zip(self._written, final, strict=True)), structure)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        results = self._function(*args, **kwargs)
        if self._copied:
            leaves, structure = tree_flatten(results)
            results = tree_unflatten([x.clone() if i in self._copied else x for i, x in enumerate(leaves)], structure)
        return results, [self._known[i].clone() for i in self._written]

    @whole_steps("captured")
    def _backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        known = {id(local_of(x)) for x in self._known}
        with tracing(whole_moves=True):
            run = local_graphs(gm, inputs, self._keep)

        def call(*given: Any) -> Any:
            own = [x if id(local_of(x)) in known else _constant(name, x) for name, x in zip(names, given, strict=True)]
            results = run(*own)
            for name, x, was in zip(names, own, given, strict=True):
                if x is not was and x._version:
                    raise CompileError(
                        f"the function writes to a plain tensor {list(x.shape)} ({name}) that is no input, parameter or saved "
                        "buffer of the model: in a package it is a constant; pass it, or register it as a buffer"
                    )
            return results

        return call

    def _keep(self, part: str, gm: GraphModule) -> Callable[[list[Any]], Any]:
        improve(gm)
        remove_dead(gm.graph)
        carry(gm.graph)
        gm.recompile()
        self._graph = gm
        outputs: Any = gm.graph.output_node().args[0]

        def shapes_only(inputs: list[Any]) -> list[Any]:
            self._inputs = list(inputs)
            inputs.clear()
            self._outputs = [_made(node.meta["val"]) for node in outputs]
            return list(self._outputs)

        return shapes_only


def _unnamed(results: Any) -> Any:
    """Results with plain tuples in place of torch's named ones (`torch.return_types.sort`), which no text can name."""
    if isinstance(results, dict):
        return {key: _unnamed(value) for key, value in results.items()}
    if type(results) is list:
        return [_unnamed(value) for value in results]
    plain = type(results) is tuple or type(results).__module__ == "torch.return_types"
    return tuple(_unnamed(value) for value in results) if plain else results


def _cause(error: BaseException) -> BaseException:
    """What this library refused, with the user's line where the tracer tells it; else the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, CompileError):
        found = found.__cause__ or found.__context__
    if found is None or found is error:
        return error
    frames = [frame for frame in FRAME.findall(str(error)) if not frame[0].startswith(_TORCH)]
    where = f" ({Path(frames[-1][0]).name}:{frames[-1][1]}, in {frames[-1][2]})" if frames else ""
    return CompileError(f"{found}{where}")


def local_of(x: Any) -> Any:
    """What this rank holds of a tensor; anything else itself."""
    return x._local if isinstance(x, DTensor) else x


def _constant(name: str, x: Tensor) -> Tensor:
    """A tensor that a function uses besides its inputs, as it will be in the package."""
    if isinstance(x, DTensor):
        raise CompileError(
            f"the function uses the DTensor {x._layout} ({name}), which is no input, parameter or buffer of the model: a "
            "package cannot hold the shards of all ranks; pass it, or register it as a buffer"
        )
    return x.detach().clone()


def _made(fake: Any) -> Tensor:
    """A tensor like one that only stands for it."""
    if not isinstance(fake, Tensor) or any(isinstance(n, torch.SymInt) for n in fake.shape):
        raise CompileError(
            f"a result is, or has a size, that depends on data ({list(fake.shape) if isinstance(fake, Tensor) else fake}): a "
            "package gives static shapes; keep the shape with a mask, or give the most that there can be"
        )
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


@contextlib.contextmanager
def in_place(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """In the block the parameters and buffers of a model are others, by name."""
    with contextlib.ExitStack() as after:
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            table = module._parameters if leaf in module._parameters else module._buffers
            after.callback(table.__setitem__, leaf, table[leaf])
            table[leaf] = tensor
        yield
