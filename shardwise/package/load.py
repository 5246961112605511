"""`load_package`: loads a package that `export` wrote, and runs its program. Nothing is traced, and no compiler is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiler import open_package, treespec_loads
from .._torch.tensors import tree_flatten, tree_unflatten
from ..base.argument_checks import file_to_read, instance, optional
from ..comm import transport
from ..comm.watch.debug import errors_of_ranks
from ..errors import CompileError, OperatorError
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from ..tensor.wrapping import wrap
from .manifest import Fixed, Manifest, Slot, check_world, read

#: Kernels read vectors of so many bytes at a time.
_ALIGNMENT = 16


class Package:
    """A compiled program of a model; call it like the model, once its parameters are bound."""

    def __init__(self, manifest: Manifest, loader: Any, mesh: Mesh) -> None:
        self.mesh = mesh
        self._manifest, self._loader = manifest, loader
        self._slots: tuple[Any, ...] = (*manifest.parameters, *manifest.arguments)
        self._takes, self._gives = treespec_loads(manifest.takes), treespec_loads(manifest.gives)
        self._parameters: list[Tensor] | None = None if manifest.parameters else []

    @property
    def parameters(self) -> dict[str, Layout | None]:
        """The layouts in which parameters and buffers are bound, by name; None for plain tensors."""
        return {slot.name: slot.layout for slot in self._manifest.parameters}

    def bind(self, parameters: nn.Module | Mapping[str, Any]) -> Package:
        """Take the parameters and buffers of a model, or of a state dict; writes to them are seen by later calls.

        DTensors are taken as they are, and must have the layouts of the model that was exported. A plain tensor in place of a
        DTensor is the whole of it, and is distributed (a collective: the first rank's values count).
        """
        instance(parameters, (nn.Module, Mapping), "Package.bind: parameters", "a module or a state dict")
        slots = self._manifest.parameters
        if isinstance(parameters, nn.Module):
            every = parameters.named_parameters(remove_duplicate=False), parameters.named_buffers(remove_duplicate=False)
            parameters = {name: x for several in every for name, x in several}
        missing = [slot.name for slot in slots if slot.name not in parameters]
        if missing:
            more = f" (nor are {len(missing) - 1} others)" if missing[1:] else ""
            raise OperatorError(
                f"the package has {len(slots)} parameters and buffers, given are {len(parameters)} tensors, and {missing[0]!r} "
                f"is not among them{more}; bind the model that was exported"
            )
        for slot in slots:
            _check(slot, f"parameter {slot.name}", parameters[slot.name], whole_will_do=True)
        self._parameters = [_distributed(parameters[slot.name], slot.layout) for slot in slots]
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._parameters is None:
            raise OperatorError(
                f"the package takes {len(self._manifest.parameters)} parameters and buffers; bind them first: "
                "load_package(path, parameters=model), or package.bind(model)"
            )
        values, manifest, slots = self._flat(args, kwargs), self._manifest, self._slots
        for slot, value in zip(manifest.arguments, values, strict=True):
            _check(slot, f"input {slot.name}", value)
        for slot, parameter in zip(manifest.parameters, self._parameters, strict=True):
            _check(slot, f"parameter {slot.name}", parameter)
        given = (*self._parameters, *values)
        with errors_of_ranks():
            outputs = self._loader.boxed_run([_local(slots[place], given[place]) for place in manifest.order])
        self._check_outputs(outputs)
        for place, at in manifest.writes:
            _held(slots[place], given[place]).copy_(outputs[at])
        results = [
            value.value if at is None else outputs[at] if value.layout is None else wrap(DTensor, outputs[at], value.layout)
            for at, value in manifest.results
        ]
        return tree_unflatten(results, self._gives)

    def _check_outputs(self, outputs: list[Tensor]) -> None:
        """Refuse outputs that differ from the manifest, which may be forged."""
        writes = ((at, self._slots[place]) for place, at in self._manifest.writes)
        for at, slot in (*self._manifest.results, *writes):
            if at is None:
                continue
            x = outputs[at] if at < len(outputs) else None
            if x is None or x.shape != slot.shape or x.dtype != slot.dtype:
                found = len(outputs) if x is None else f"{x.dtype} {list(x.shape)}"
                raise OperatorError(
                    f"the package tells of output {at} as {slot.dtype} {list(slot.shape)}, and its program gives {found}: what "
                    "it says of itself belongs to another program; export the model again"
                )

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        values, structure = tree_flatten((args, dict(sorted(kwargs.items()))))
        if structure != self._takes:
            names = ", ".join(value.name for value in self._manifest.arguments)
            raise OperatorError(
                f"the package takes {len(self._manifest.arguments)} inputs ({names}), given are {len(values)}"
                f"{'' if len(values) != len(self._manifest.arguments) else ' in another structure'}; call it as the example was"
            )
        return values


def load_package(
    path: str | os.PathLike[str], parameters: nn.Module | Mapping[str, Any] | None = None, mesh: Mesh | Any = None
) -> Package:
    """The program that `export` wrote, for this rank; collective: the groups that it communicates in are made here.

    Nothing is traced. Refused for another torch, Shardwise, rules, kind of chip, mesh or number of ranks than it was made for.
    A damaged file is refused before anything in it is unpacked. The file holds native code: load only what you trust.

    >>> load_package("nothing.pt2")
    Traceback (most recent call last):
    shardwise.errors.MissingFileError: load_package: path is a file to read, got 'nothing.pt2', which is not there
    """
    optional(instance, parameters, (nn.Module, Mapping), "load_package: parameters", "a module or a state dict")
    given = optional(Mesh.from_torch, mesh)
    file = file_to_read(path, "load_package: path")
    source, manifest = f"package {str(file)!r}", read(file)
    on = check_world(manifest, source, given)
    transport(on).ready(on)
    try:
        program = open_package(os.fspath(path))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CompileError(f"{source} has a program that torch cannot load: {reason}; export the model again") from None
    package = Package(manifest, program, on)
    return package if parameters is None else package.bind(parameters)


# ── what goes in and out ──────────────────────────────────────────────────────────────────────────────────────────────


def _check(slot: Slot | Fixed, what: str, value: Any, whole_will_do: bool = False) -> None:
    """Refuse what the program was not made for: from facts that every rank knows, before any of them communicates."""
    if isinstance(slot, Fixed):
        if type(value) is not type(slot.value) or value != slot.value:
            raise OperatorError(f"{what} is {slot.value!r} in this package, given is {value!r}; export it with that value")
        return
    layout, held = slot.layout, (slot.shape, slot.dtype, slot.device)
    if isinstance(value, DTensor):
        fits = layout is not None and _is_reordered(value._layout, layout)
    elif layout is None:
        fits = isinstance(value, Tensor) and (value.shape, value.dtype, value.device.type) == held
    else:
        fits = whole_will_do and isinstance(value, Tensor) and (value.shape, value.dtype) == (layout.shape, slot.dtype)
    if not fits:
        raise OperatorError(f"{what} is a {slot} in this package, given is {_description(value, slot)}")


def _description(value: Any, slot: Slot) -> str:
    """An argument in words, with its difference from a slot and the remedy."""
    if isinstance(value, DTensor):
        have, want = value._layout, slot.layout
        if want is None:
            return f"a DTensor {have}; give value.full_tensor()"
        if have.mesh is not want.mesh:
            return f"a DTensor {have} on the {have.mesh.world} mesh {have.mesh}; it belongs on the mesh {want.mesh}"
        wrong = "dtype" if have.dtype != want.dtype else "shape" if have.shape != want.shape else "layout"
        remedy = "redistribute it" if wrong == "layout" else "export the model for it"
        return f"a DTensor {have}, of another {wrong}; {remedy}"
    if isinstance(value, Tensor):
        remedy = f"; distribute it on the mesh {slot.layout.mesh}" if slot.layout is not None else ""
        return f"a plain tensor {value.dtype} {list(value.shape)} on {value.device.type}{remedy}"
    return f"a {type(value).__name__}"


def _is_reordered(have: Layout, want: Layout) -> bool:
    """Whether layouts differ in the order of elements in memory at most."""
    same = have.mesh is want.mesh and have.shape == want.shape
    return have is want or (same and have.replace(stride=want.stride) is want)


def _distributed(x: Any, layout: Layout | None) -> Tensor:
    return x if layout is None or isinstance(x, DTensor) else distribute_tensor(x.detach(), layout.mesh, layout)


def _local(slot: Any, value: Any) -> Tensor:
    """What this rank holds, as it lay in memory where the program was compiled."""
    local = _held(slot, value)
    if local.shape != slot.shape or local.device.type != slot.device:
        raise OperatorError(
            f"{slot.name}: this rank holds {list(local.shape)} on {local.device.type}, the program takes {list(slot.shape)} on "
            f"{slot.device}; a promise that was made by run_check=False does not hold"
        )
    if local.stride() == slot.stride and local.data_ptr() % _ALIGNMENT == 0:
        return local
    return torch.empty_strided(slot.shape, slot.stride, dtype=local.dtype, device=local.device).copy_(local)


def _held(slot: Any, value: Any) -> Tensor:
    return value.detach() if slot.layout is None else value._local
