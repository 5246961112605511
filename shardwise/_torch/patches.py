"""Every change that Shardwise makes to torch, as one table: what is replaced, in which versions, and which feature needs it.

Importing Shardwise changes nothing. `install_patches` is called at three moments, each the first of its kind in the process:

    tensors  a mesh is made: what distributed tensors need, compiled or not
    tracing  a function is compiled or captured; under `torch.compile` alone, when its trace first meets this library
    regions  `remat` runs code that may call regions that Inductor has compiled

`uninstall` takes everything out again. A target that is missing, or has other parameters, is an error that names the feature.

Beside the table the library keeps notes as attributes on objects of torch that live as long as one trace or one compiled
program: `shardwise` and `shardwise_backward` on a tracing context and an output graph, `shardwise_last` on a functional mode,
`steps_stay` on an optimizer's variable, `shardwise` on the description of a tensor that a compiled function takes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed._state_dict_utils  # now: imported inside a job, its defaults would hold the job's group for ever
from torch._ops import OpOverload

import shardwise._torch.replacements as by

from ..errors import WorldError
from .compiler import constant_result

_ABSENT = object()
_RUNNING = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Patch(NamedTuple):
    """One attribute of torch that is replaced, or one operator that gets a kernel."""

    #: when it is installed: "tensors", "tracing" or "regions"
    moment: str
    #: what does not work without it
    feature: str
    #: "module:attribute.attribute"
    target: str
    #: the names of its parameters, with … where more may follow; of what is no function its type, or "absent"
    parameters: str
    #: makes the replacement of torch's own
    replace: Callable[[Any], Any]
    #: the first and the last torch that needs it
    versions: tuple[tuple[int, int], tuple[int, int]] = ((2, 11), (2, 13))

    def find(self) -> tuple[Any, str, Any]:
        """What holds the attribute, its name there, and its value, which is as expected."""
        module, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        try:
            holder: Any = importlib.import_module(module)
            for part in outer:
                holder = getattr(holder, part)
            value = vars(holder)[name] if name in vars(holder) else getattr(holder, name, _ABSENT)
        except (ImportError, AttributeError):
            value = _ABSENT
        there, (wanted, more, _) = _parameters(value), self.parameters.partition(" …")
        if there != wanted and not (more and there.startswith(f"{wanted} ")):
            known = "is missing" if value is _ABSENT else f"has ({there}) where Shardwise expects ({self.parameters})"
            raise WorldError(
                f"torch {torch.__version__}: {module}.{path} {known}; without it Shardwise loses {self.feature}. Supported are "
                "torch 2.11 to 2.13."
            )
        return holder, name, value

    def install(self) -> Callable[[], None]:
        """Replace the attribute; gives what puts torch's own back."""
        holder, name, value = self.find()
        made = self.replace(None if value is _ABSENT else value)
        if isinstance(value, OpOverload):
            library = torch.library.Library(value.namespace, "IMPL")
            library.impl(value, made, "PythonTLSSnapshot", with_keyset=True)
            return library._destroy
        setattr(holder, name, made)
        return partial(delattr, holder, name) if value is _ABSENT else partial(setattr, holder, name, value)


def _parameters(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, OpOverload):
        return " ".join(argument.name for argument in value._schema.arguments)
    return " ".join(inspect.signature(value).parameters) if callable(value) else type(value).__name__


_DYNAMO, _AOT = "torch._dynamo.variables", "torch._functorch"
_TENSOR, _OPTIMIZER = f"{_DYNAMO}.tensor:TensorVariable", f"{_DYNAMO}.optimizer:OptimizerVariable"
_STEPS = "whole training steps as one program in sw.capture and sw.compile"
_CACHE = "correct programs from torch's cache"

#: When, and the feature that is lost without them: target, parameters, replacement, and versions where not all.
_TABLE: dict[tuple[str, str], list[tuple[Any, ...]]] = {
    ("tensors", "get_model_state_dict(full_state_dict=True): rank 0 would save its shards as the whole"): [
        (
            "torch.distributed._state_dict_utils:_iterate_state_dict",
            "iter_object sharded_tensor_func dtensor_func tensor_func …",
            by.iterate_state_dict,
        ),
    ],
    ("tensors", "optimizers and gradient clipping over lists of distributed tensors at once (foreach)"): [
        ("torch.utils._foreach_utils:_foreach_supported_types", "list", lambda classes: [*classes, by.HOOKS.tensor]),
        ("torch.optim.optimizer:_foreach_supported_types", "list", lambda classes: [*classes, by.HOOKS.tensor]),
    ],
    ("tensors", "the backward of a compiled function of which a distributed result is unused"): [
        ("torch:Tensor.__coerce_same_metadata_as_tangent__", "absent", lambda _: by.HOOKS.coerce_tangent),
    ],
    ("tensors", f"{_CACHE}: its keys do not tell versions of this library apart"): [
        (f"{_AOT}.config:enable_autograd_cache", "bool", lambda value: False, ((2, 11), (2, 12))),
    ],
    ("tensors", "operators that torch decomposes by values, which it would read from a shard as if it were the whole"): [
        ("torch:ops.aten.one_hot.default", "self num_classes", by.composite_kernel),
        ("torch:ops.aten.tensor_split.tensor_indices_or_sections", "self tensor_indices_or_sections dim", by.composite_kernel),
        ("torch:ops.aten._pack_padded_sequence.default", "input lengths batch_first", by.composite_kernel),
        (
            "torch:ops.aten._pad_packed_sequence.default",
            "data batch_sizes batch_first padding_value total_length",
            by.composite_kernel,
        ),
    ],
    ("tensors", "kron and matrix_rank with out= of distributed tensors, to which torch writes nothing"): [
        ("torch:ops.aten.kron.out", "self other out", by.composite_kernel),
        ("torch:ops.aten.linalg_matrix_rank.out", "self tol hermitian out", by.composite_kernel),
        ("torch:ops.aten.linalg_matrix_rank.out_tol_tensor", "input tol hermitian out", by.composite_kernel),
        ("torch:ops.aten.linalg_matrix_rank.atol_rtol_tensor_out", "input atol rtol hermitian out", by.composite_kernel),
        ("torch:ops.aten.linalg_matrix_rank.atol_rtol_float_out", "self atol rtol hermitian out", by.composite_kernel),
    ],
    ("tracing", f"{_STEPS}: backward inside"): [
        (f"{_TENSOR}.method_backward", "self tx gradient retain_graph create_graph inputs", by.method_backward),
        (f"{_TENSOR}.var_getattr", "self tx name", by.tensor_getattr),
        (f"{_DYNAMO}.torch:_collect_tensors_with_sources", "var", by.collect_tensors),
        (f"{_DYNAMO}.torch:TorchInGraphFunctionVariable._get_handlers", "", by.get_handlers),
        ("torch._dynamo.side_effects:SideEffects.store_attr", "self item name value …", by.store_attr),
    ],
    ("tracing", f"{_STEPS}: optimizer.step inside"): [
        (f"{_OPTIMIZER}.var_getattr", "self tx name", by.optimizer_getattr),
        (f"{_OPTIMIZER}.call_method", "self tx name args kwargs", by.optimizer_call_method),
        (f"{_OPTIMIZER}.wrap_tensor", "self tx tensor_value", by.wrap_tensor),
        (f"{_OPTIMIZER}.graph_break_if_pending_mutation", "self tx", by.graph_break_if_pending_mutation),
    ],
    ("tracing", "captured optimizer steps that do not wait for a device to read a count of steps"): [
        (f"{_OPTIMIZER}._set_capturable", "self tx", by.set_capturable),
        (f"{_OPTIMIZER}.move_step_if_cpu", "self", by.move_step_if_cpu),
    ],
    ("tracing", "sw.remat with a policy inside compiled functions"): [
        (f"{_DYNAMO}.higher_order_ops:CheckpointHigherOrderVariable._call_function", "self tx args kwargs", by.call_checkpoint),
    ],
    ("tracing", "quick calls of compiled functions with many distributed tensors"): [
        (
            f"{_AOT}._aot_autograd.runtime_wrappers:runtime_unwrap_tensor_subclasses",
            "wrapped_args append_symints subclass_metas",
            by.unwrap_tensors,
        ),
    ],
    ("tracing", "compiled training: collectives in the same order on every rank, so that none hangs"): [
        (f"{_AOT}.partitioners:force_save_collectives", "joint_module", by.force_save_collectives),
        (f"{_AOT}.partitioners:_must_be_in_forward", "node", by.must_be_in_forward),
        (f"{_AOT}.partitioners:_must_be_in_backward", "node", by.must_be_in_backward),
    ],
    ("tracing", f"{_CACHE}: it would give the program of one rank to others, whose shards differ"): [
        (f"{_AOT}._aot_autograd.autograd_cache:AOTAutogradCache.save", "key entry remote", by.save_program),
    ],
    ("regions", "sw.remat around compiled functions"): [
        ("torch._inductor.output_code:CompiledFxGraph.__call__", "self inputs", by.call_region),
    ],
}
PATCHES = tuple(Patch(moment, feature, *row) for (moment, feature), rows in _TABLE.items() for row in rows)

_undo: dict[str, list[Callable[[], None]]] = {}
_installing = threading.RLock()


@constant_result
def install_patches(moment: str) -> None:
    """Install the patches of a moment, unless they are."""
    if moment in _undo:
        return
    with _installing:
        rows = [row for row in PATCHES if row.moment == moment and row.versions[0] <= _RUNNING <= row.versions[1]]
        for row in rows:
            row.find()  # all of them, or none
        if moment not in _undo:
            _undo[moment] = [row.install() for row in rows]


def install_for_regions() -> None:
    """Install what `remat` needs to see compiled regions, if there can be any: their module takes seconds to import."""
    if "torch._inductor.output_code" in sys.modules:
        install_patches("regions")


def uninstall() -> None:
    """Put torch's own back: for tests, and for whoever needs the rest of the process without this library."""
    with _installing:
        for moment in reversed(list(_undo)):
            for put_back in reversed(_undo.pop(moment)):
                put_back()
