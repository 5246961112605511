"""`export`: a model over DTensors as a compiled program in one file, which every rank of a job loads."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from .._torch.compiler import compile_package, leaves_with_paths, treespec_dumps
from .._torch.tensors import tree_unflatten
from ..base.argument_checks import a_function, file_to_write, instance, optional, several
from ..comm import pretend, seen
from ..errors import CompileError
from ..layouts.mesh import Mesh
from ..tensor.dtensor import DTensor
from .local_program import Traced, in_place, local_of, stand_in, trace
from .manifest import Fixed, Manifest, Slot, checked_nesting, facts_for, write

_FIXED = (int, float, bool, str, type(None))


def export(
    model: Callable[..., Any],
    example_inputs: Sequence[Any],
    mesh: Mesh | Any,
    path: str | os.PathLike[str],
    *,
    kwargs: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Write the local program of a model or a function as an AOTInductor package (`.pt2`), which `load_package` runs.

    One process does it, without a job: the mesh may be simulated. The package serves every rank of a job with such a mesh, for
    inputs of the shapes, dtypes and layouts of `example_inputs` and `kwargs`; their values do not matter. Numbers and texts
    among them are part of the program. Parameters and buffers are given when the package is loaded; plain tensors that the
    model uses besides are inside. The program computes results, and no gradients. `options` are settings of Inductor.

    >>> import shardwise as sw
    >>> mesh = sw.init_mesh(tp=2)
    >>> x = sw.ones(5, mesh=mesh, placements=[sw.Shard(0)])
    >>> export(torch.relu, (x,), mesh, "relu.pt2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.errors.CompileError: input number 0: dim 0 of f32[5@tp], of size 5, falls into unequal shards (3, 2) over tp...
    """
    on = Mesh.from_torch(mesh).root
    a_function(model, "export: model", "a module or a function")
    example_inputs = several(example_inputs, "export: example_inputs", "several inputs, as (x,)")
    for name, words in (("kwargs", kwargs), ("options", options)):
        optional(instance, words, dict, f"export: {name}", "a dictionary by name")
    target = file_to_write(path, "export: path")
    with pretend(on), tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        program, manifest = exported(model, tuple(example_inputs), kwargs or {}, on)
        file = Path(folder) / "package.pt2"
        compile_package(program, str(file), options or {})
        write(file, manifest)
        file.replace(target)


def exported(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> tuple[Any, Manifest]:
    """The local program of a model as torch's compiler takes it, and what a package of it says; for the rank pretended."""
    names, leaves, structure = _given(model, args, kwargs)
    every = _parameters(model, mesh)
    first = {id(x): name for name, x in reversed(every.items())}
    parameters = {name: x for name, x in every.items() if first[id(x)] == name}
    arguments = [_argument(name, x, mesh) for name, x in zip(names, leaves, strict=True)]
    own, words = tree_unflatten(arguments, structure)
    with in_place(model, every):
        named = [*parameters.items(), *zip(names, arguments, strict=True)]
        places = [place for place, (_, x) in enumerate(named) if isinstance(x, Tensor)]
        traced = trace(model, own, words, [named[place][1] for place in places])
    position = {id(local_of(x)): place for place, (_, x) in enumerate(named) if isinstance(x, Tensor)}
    order = [position.get(id(x)) for x in traced.inputs]  # None for a constant
    examples = tuple(x for x, place in zip(traced.inputs, order, strict=True) if place is not None)
    program = torch.export.export(_with_constants(traced, order), examples, strict=False)
    slots: list[Any] = [_value(name, x) for name, x in named]
    ranks = dist.get_world_size() if mesh.world == "processes" and dist.is_initialized() else max(mesh.ranks) + 1
    manifest = Manifest(
        facts_for(seen(mesh), ranks),
        tuple(slots[: len(parameters)]),
        tuple(slots[len(parameters) :]),
        _written_down(structure),
        tuple(place for place in order if place is not None),
        tuple(_result(i, x, at) for i, (x, at) in enumerate(zip(traced.results, traced.outputs, strict=True))),
        _written_down(traced.structure),
        tuple((places[i], at) for i, at in traced.writes.items()),
    )
    return program, manifest


# ── what goes in ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _given(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[Any], Any]:
    """The names that the model gives the example inputs, these, and how they are nested."""
    names = list[str]()
    with contextlib.suppress(ValueError):  # a function of torch's own has no signature
        declared = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
        names = [p.name for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found, structure = leaves_with_paths((args, dict(sorted(kwargs.items()))))

    def name(path: str) -> str:
        kind, at, rest = path[1], *path[4:].partition("]")[::2]
        if kind == "1":
            return at.strip("'") + rest
        return (names[int(at)] if int(at) < len(names) else f"number {at}") + rest

    return [name(path) for path, _ in found], [leaf for _, leaf in found], structure


def _argument(name: str, x: Any, mesh: Mesh) -> Any:
    """The tensor that replaces an example input while the program is traced; a new one each time."""
    if isinstance(x, DTensor):
        return stand_in(x.detach(), mesh, f"input {name}")
    if isinstance(x, Tensor):
        return torch.zeros_like(x)
    if not isinstance(x, _FIXED):
        raise CompileError(f"input {name} is a {type(x).__name__}; a package takes tensors, numbers, texts and None")
    return x


def _parameters(model: Any, mesh: Mesh) -> dict[str, Tensor]:
    """The tensors that replace the parameters and buffers of a model, by every name; one with two names is replaced by one.

    Plain buffers that no state dict has are left out: they become constants of the program.
    """
    if not isinstance(model, nn.Module):
        return {}
    saved, made = model.state_dict(keep_vars=True), dict[int, Tensor]()
    every = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = {name: x for name, x in every.items() if name in saved or isinstance(x, DTensor)}
    for name, x in found.items():
        kind = "parameter" if isinstance(x, nn.Parameter) else "buffer"
        made[id(x)] = made[id(x)] if id(x) in made else stand_in(x, mesh, f"{kind} {name}")
    return {name: made[id(x)] for name, x in found.items()}


def _with_constants(traced: Traced, order: Sequence[int | None]) -> GraphModule:
    """The program with its constants inside."""
    gm = traced.graph
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, x, place in zip(nodes, traced.inputs, order, strict=True):
        if place is None:
            gm.register_buffer(f"constant_{node.name}", x)
            with gm.graph.inserting_before(node):
                constant = gm.graph.get_attr(f"constant_{node.name}")
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


# ── what a manifest says of it ────────────────────────────────────────────────────────────────────────────────────────


def _value(name: str, x: Any) -> Slot | Fixed:
    if not isinstance(x, Tensor):
        return Fixed(name, x)
    local = local_of(x)
    layout = x._layout if isinstance(x, DTensor) else None
    return Slot(name, layout, tuple(local.shape), local.stride(), x.dtype, local.device.type)


def _written_down(structure: Any) -> str:
    try:
        return checked_nesting(treespec_dumps(structure))
    except (NotImplementedError, ValueError) as error:
        raise CompileError(f"inputs and results are nested in tuples, lists and dictionaries; {error}") from None


def _result(number: int, x: Any, at: int | None) -> tuple[int | None, Slot | Fixed]:
    if not isinstance(x, (Tensor, *_FIXED)):
        raise CompileError(f"result {number} is a {type(x).__name__}; a package gives tensors, numbers, texts and None")
    return at, _value(f"result {number}", x)
