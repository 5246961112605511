"""The local program of a model for every rank of a job, traced in one process, whether the job is there or not.

Tensors of the model and of the example stand on the same mesh of processes, each as one rank's piece without its values. What
`sw.capture` does then gives a graph of local operators and collectives. It is called once, with an inner function that only
makes results of the right shapes: that tells which inputs the graph takes and what becomes of its outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .._aoti import tree_flatten, tree_unflatten
from .._torch import local_graphs
from ..comm import PerRank
from ..comm.trace import current
from ..compiled.nodes import remove_dead
from ..compiled.passes import improve
from ..compiled.steps import traceable, whole_steps
from ..errors import CompileError
from ..layout import Layout
from ..mesh import Mesh
from ..redistribute import whole_moves
from ..tensor import DTensor
from ..tools import wrap


class Traced(NamedTuple):
    """A local program.

    graph    takes a list of local tensors and gives one
    inputs   the local tensors it was traced with
    results  what the function gave, flat; `outputs` says at which position of the graph's outputs each tensor is
    """

    graph: GraphModule
    inputs: list[Tensor]
    results: list[Any]
    outputs: list[int | None]
    structure: Any


def stand_in(x: Tensor, mesh: Mesh, name: str) -> Tensor:
    """A tensor as one rank of a job holds it, without its values; plain tensors are the same on every rank."""
    if not isinstance(x, DTensor):
        return x
    layout = x._layout
    if of_processes(layout.mesh.root) is not of_processes(mesh.root):
        raise CompileError(f"{name} lives on the mesh {layout.mesh}, the package is for {mesh}; move it there first")
    if not layout.even:
        raise CompileError(f"{name} is {layout}: {_unequal(layout)}; {_REMEDY}")
    layout = layout.replace(mesh=of_processes(layout.mesh))
    local = torch.zeros_like(_piece(x._local), device=layout.device)
    found: DTensor = wrap(DTensor, local, layout)
    return nn.Parameter(found, requires_grad=False) if isinstance(x, nn.Parameter) else found


_REMEDY = "the program would be of one rank only; choose sizes that the axis divides, or pad the tensor"


def of_processes(mesh: Mesh) -> Mesh:
    """The same mesh in a job of processes."""
    return Mesh.read(mesh.text.replace(f";{mesh.world};", ";processes;", 1))


def _piece(local: Any) -> Tensor:
    first: Tensor = getattr(local, "pieces", (local,))[0]
    return first


def _unequal(layout: Layout) -> str:
    """Which dim of a layout falls into unequal pieces."""
    found = [(dim, f) for dim, factors in enumerate(layout.dims) for f in factors if min(f.sizes) != max(f.sizes)]
    dim, factor = found[0]
    sizes = ", ".join(map(str, factor.sizes))
    return f"dim {dim} of size {layout.shape[dim]} falls into unequal pieces ({sizes}) over {', '.join(factor.axes)}"


# ── tracing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[Tensor]) -> Traced:
    """The local program of a function of `args` and `kwargs`, on the rank pretended; `known` are the tensors that stand in for
    those of the model and of the example."""
    copied: set[int] = set()
    while True:
        traced = _Tracing(function, known, frozenset(copied)).run(args, kwargs)
        shared = {i for i, value in enumerate(traced.results) if isinstance(value, Tensor) and traced.outputs[i] is None}
        if not shared - copied:
            return traced
        copied |= shared  # results that share memory with an input are no outputs of the graph: copies of them are


class _Tracing:
    def __init__(self, function: Callable[..., Any], known: Sequence[Tensor], copied: frozenset[int]) -> None:
        self._function, self._copied = function, copied
        self._known = {id(local_of(x)) for x in known}
        self._graph: GraphModule | None = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        compiled = torch.compile(traceable(self._with_copies), backend=self._backend, fullgraph=True, dynamic=False)
        with torch.no_grad():
            results, structure = tree_flatten(compiled(*args, **kwargs))
        if self._graph is None:
            raise CompileError("the function computes nothing from its inputs: there is nothing to export")
        places = {id(output): place for place, output in enumerate(self._outputs)}
        outputs = [places.get(id(local_of(value))) if isinstance(value, Tensor) else None for value in results]
        return Traced(self._graph, self._inputs, results, outputs, structure)

    def _with_copies(self, *args: Any, **kwargs: Any) -> Any:
        results = self._function(*args, **kwargs)
        if not self._copied:
            return results
        leaves, structure = tree_flatten(results)
        return tree_unflatten([x.clone() if i in self._copied else x for i, x in enumerate(leaves)], structure)

    @whole_steps("captured")
    def _backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        with whole_moves.set(True):
            run = local_graphs(gm, inputs, self._keep)

        def call(*given: Any) -> Any:
            for name, value in zip(names, given, strict=True):
                if isinstance(value, DTensor) and id(value._local) not in self._known:
                    raise CompileError(
                        f"the function uses the DTensor {value._layout} ({name}), which is neither an input nor a parameter or "
                        "buffer of the model: a package cannot hold the pieces of all ranks; pass it, or register it as a buffer"
                    )
            return run(*given)

        return call

    def _keep(self, part: str, gm: GraphModule) -> Callable[[list[Any]], Any]:
        _check_alike()
        improve(gm)
        remove_dead(gm.graph)
        gm.recompile()
        self._graph = gm
        (outputs,) = gm.graph.output_node().args

        def shapes_only(inputs: list[Any]) -> list[Any]:
            self._inputs = list(inputs)
            inputs.clear()
            self._outputs = [_made(node.meta["val"]) for node in outputs]  # type: ignore[union-attr]
            return list(self._outputs)

        return shapes_only


def local_of(x: Tensor) -> Tensor:
    """What this rank holds of a tensor; a plain one itself."""
    return x._local if isinstance(x, DTensor) else x


def _made(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _check_alike() -> None:
    """Refuse a program of one rank only."""
    found = current()
    if found is None or not found.specific:
        return
    if isinstance(found.because, Layout):
        raise CompileError(f"inside the function a tensor is {found.because}: {_unequal(found.because)}; {_REMEDY}")
    values = [value for value in tree_flatten(found.because)[0] if isinstance(value, PerRank)]
    told = next((f": {value.at(0)} on the first, {value.at(1)} on the second" for value in values if value.at(0) != value.at(1)), "")
    raise CompileError(f"inside the function pieces of a tensor differ in size from rank to rank{told}; {_REMEDY}")


@contextlib.contextmanager
def in_place(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """In the block the parameters and buffers of a model are others, by name."""
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in tensors]
    held = [owner._parameters if leaf in owner._parameters else owner._buffers for owner, leaf in owners]
    before = [table[leaf] for table, (_, leaf) in zip(held, owners, strict=True)]
    try:
        for table, (_, leaf), tensor in zip(held, owners, tensors.values(), strict=True):
            table[leaf] = tensor
        yield
    finally:
        for table, (_, leaf), tensor in zip(held, owners, before, strict=True):
            table[leaf] = tensor
