"""What stands in for functions of torch: each function here takes torch's own and gives its replacement.

`patches.py` says which function of torch each is for. For programs and tensors that are not this library's a replacement does
what torch's own function does. The library's own objects come by `HOOKS`.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from .tensors import dispatch_modes


@dataclass
class Hooks:
    """What replacements use of the folders above, which this one does not import: each sets its own when it is imported."""

    #: the class of distributed tensors, how one is gathered, and how a plain gradient of a compiled program becomes one
    tensor: Any = None
    gather: Any = None
    coerce_tangent: Any = None
    #: operator → `kernel(go_on, *args)`, called for tensors of Python classes before torch decomposes the operator
    composites: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    #: whether the program that is traced belongs to one rank only, and whether a cache would give it to others
    is_of_one_rank: Any = None
    is_misleading: Any = None
    #: the `context_fn` of a traced `remat`, the key of its program, and the class of modes that see compiled regions
    remat_contexts: Any = None
    remat_key: Any = None
    sees_regions: Any = None
    #: what is traced in place of an optimizer's methods, by their names
    optimizer_methods: dict[str, Callable[..., Any]] = field(default_factory=dict)


HOOKS = Hooks()


def _tensor_variable() -> Any:
    return importlib.import_module("torch._dynamo.variables.tensor").TensorVariable


def _kind(output: Any) -> str:
    """What the backend of a trace says of itself: "captured", "compiled", or nothing."""
    return getattr(getattr(getattr(output, "compiler_fn", None), "compiler_fn", None), "whole_steps", "")


# ── Dynamo: backward inside a traced function ─────────────────────────────────────────────────────────────────────────


def method_backward(original: Any) -> Any:
    """Traces `Tensor.backward` for this library's backends: Dynamo can, behind a setting."""
    tensor, settings = _tensor_variable(), importlib.import_module("torch._dynamo.config")

    def trace_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not _kind(tx.output):
            return original(self, tx, *args, **kwargs)
        # Parameters that were met in an optimizer first are no inputs in Dynamo's list of these.
        leaves = tx.output.leaf_var_creation_order
        own = list(leaves)
        leaves.extend(tx.output.side_effects.id_to_variable.values())
        own_graph = tx.output.graph  # not that of a checkpoint or another function inside
        leaves[:] = [x for x in leaves if not isinstance(x, tensor) or x.as_proxy().node.graph is own_graph]
        tx.output.tracing_context.shardwise_backward = True
        if "retain_graph" not in kwargs and len(args) < 2:
            tx.output.shardwise = "spent"
        try:
            with settings.patch(trace_autograd_ops=True):
                return original(self, tx, *args, **kwargs)
        finally:
            leaves[:] = own

    return trace_backward


def get_handlers(original: Any) -> Any:
    """Traces `torch.autograd.grad`, too."""
    settings, handlers = importlib.import_module("torch._dynamo.config"), dict(original())
    handle = handlers[torch.autograd.grad]

    def trace_grad(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not _kind(tx.output):
            return handle(self, tx, *args, **kwargs)
        tx.output.tracing_context.shardwise_backward = True
        with settings.patch(trace_autograd_ops=True):
            return handle(self, tx, *args, **kwargs)

    handlers[torch.autograd.grad] = trace_grad
    return staticmethod(lambda: handlers)


def collect_tensors(original: Any) -> Any:
    """Lets a backward start at tensors that wrap others, which torch before 2.13 refuses."""
    tensor = _tensor_variable()

    def collect(variable: Any) -> Any:
        value = variable.as_proxy().node.meta.get("example_value") if isinstance(variable, tensor) else None
        if is_traceable_wrapper_subclass(value):
            return [(value, variable.source and variable.source.name)]
        return original(variable)

    return collect


def tensor_getattr(original: Any) -> Any:
    """Reads the gradient of a tensor that was written to in place from that tensor."""
    constant = importlib.import_module("torch._dynamo.variables.constant").ConstantVariable

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        if name == "grad" and _kind(tx.output):
            self = _written_to(self, tx.output.side_effects)
        result = original(self, tx, name)
        if name == "grad" and result is constant.create(None):
            result.source = None  # the one None of all traces has just been told where this trace found it
        return result

    return get_attribute


def store_attr(original: Any) -> Any:
    """Stores the gradient with the tensor: after `p -= x` Dynamo takes `p` for a new one, and loses its gradient."""
    tensor = _tensor_variable()

    def store_attribute(self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "grad" and isinstance(item, tensor) and _kind(self.output_graph_weakref()):
            item = _written_to(item, self)
        return original(self, item, name, *args, **kwargs)

    return store_attribute


_IN_PLACE = {getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul")}


def _written_to(variable: Any, effects: Any) -> Any:
    """The variable of the tensor that operators in place have given back as this one."""
    node = variable.as_proxy().node
    while node.target in _IN_PLACE or (node.op == "call_method" and re.fullmatch(r"[a-z]\w*[^_]_", node.target)):
        node = node.args[0]
    if node is variable.as_proxy().node:
        return variable
    known = [v for v in effects.id_to_variable.values() if isinstance(v, type(variable)) and v.as_proxy().node is node]
    return known[0] if known else variable


# ── Dynamo: optimizers ────────────────────────────────────────────────────────────────────────────────────────────────

#: While torch sets up an optimizer's state: the id of what stands for a gradient, to the gradient in the graph.
_gradients: dict[int, Any] = {}


def optimizer_getattr(original: Any) -> Any:
    """Traces the library's own functions in place of an optimizer's methods, which break the graph on purpose."""
    bound = importlib.import_module("torch._dynamo.variables.functions").UserMethodVariable

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        if name not in HOOKS.optimizer_methods or not _kind(tx.output):
            return original(self, tx, name)
        self.value._opt_called = True  # what schedulers look for; Dynamo loses attributes that a traced function gives here
        return bound(HOOKS.optimizer_methods[name], self)

    return get_attribute


def optimizer_call_method(original: Any) -> Any:
    """Lets parameters stand for their own gradients, of the same shapes, while torch sets up the optimizer's state."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.steps_stay = _kind(tx.output) == "captured"
        traced = list(_traced_gradients(self.value, tx)) if name == "_init_group" and _kind(tx.output) else []
        if any(gradient is None for _, gradient in traced):
            self.graph_break_if_pending_mutation(tx)  # torch would look at the gradient that the parameter had before
        before = [(p, p.grad) for p, _ in traced]
        try:
            for p, gradient in traced:
                p.grad = p.detach()
                _gradients[id(p.grad)] = gradient
            return original(self, tx, name, args, kwargs)
        finally:
            for p, gradient in before:
                _gradients.pop(id(p.grad), None)
                p.grad = gradient

    return call_method


def _traced_gradients(optimizer: Any, tx: Any) -> Iterator[tuple[Any, Any]]:
    """Parameters and the gradients that they have in Dynamo's graph only; None where they had one, and have none there."""
    effects, tensor = tx.output.side_effects, _tensor_variable()
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        variable = effects.id_to_variable.get(id(p))
        if variable is not None and effects.has_pending_mutation_of_attr(variable, "grad"):
            gradient = effects.load_attr(variable, "grad", deleted_ok=True)
            if isinstance(gradient, tensor):
                yield p, gradient
            elif p.grad is not None:
                yield p, None


def wrap_tensor(original: Any) -> Any:
    """Gives the gradient in the graph for what stands for it."""
    return lambda self, tx, value: _gradients[id(value)] if id(value) in _gradients else original(self, tx, value)


def graph_break_if_pending_mutation(original: Any) -> Any:
    """Does not break the graph where gradients in it are known."""
    return lambda self, tx: None if _gradients else original(self, tx)


def set_capturable(original: Any) -> Any:
    """Keeps counts of steps on the host, if they can be there: what reads them need not wait for a device."""

    def keep_on_host(self: Any, tx: Any) -> None:
        before = [group.get("capturable") for group in self.value.param_groups]
        original(self, tx)
        for group, value in zip(self.value.param_groups, before, strict=True):
            if _kind(tx.output) == "captured" and "capturable" in group:
                group["capturable"] = value

    return keep_on_host


def move_step_if_cpu(original: Any) -> Any:
    """Moves counts of steps to the device only where they do not stay on the host."""
    return lambda self: None if getattr(self, "steps_stay", False) else original(self)


# ── Dynamo: remat ─────────────────────────────────────────────────────────────────────────────────────────────────────


def call_checkpoint(original: Any) -> Any:
    """Takes `functools.partial(remat_contexts, *facts)`, made in a traced function, as the `context_fn` of a checkpoint whose
    program is kept under `remat_key(*facts)`. Dynamo keeps no such program, and guards the identity of the facts."""
    partial = importlib.import_module("torch._dynamo.variables.functions").FunctoolsPartialVariable

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = kwargs["context_fn"].realize() if "context_fn" in kwargs else None
        if isinstance(given, partial) and getattr(given.func, "fn", given) is HOOKS.remat_contexts:
            facts = [getattr(fact, "real_obj", fact) for fact in (arg.as_python_constant() for arg in given.args)]
            made = _Keyed(functools.partial(HOOKS.remat_contexts, *facts), HOOKS.remat_key(*facts))
            given.guard_as_python_constant = lambda: made  # policies have guards of their own: on what they are, not which
            kwargs = {**kwargs, "context_fn": given}
        return original(self, tx, args, kwargs)

    return call_function


class _Keyed:
    """A function that is known, and pickled, by its key alone: torch's keys are made of pickles."""

    def __init__(self, function: Callable[[], Any], key: str) -> None:
        self._function, self.cache_hash = function, key

    def __call__(self) -> Any:
        return self._function()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.cache_hash,)


# ── AOTAutograd ───────────────────────────────────────────────────────────────────────────────────────────────────────


def unwrap_tensors(original: Any) -> Any:
    """Takes distributed tensors apart by reading their local tensor: torch before 2.13 takes longer than some operators."""
    tensor = HOOKS.tensor

    def is_plain(meta: Any) -> bool:
        """Whether a plain tensor is inside, and sizes and strides are numbers; the answer is kept with the description."""
        known = getattr(meta, "shardwise", None)
        if known is None:
            inner = [type(value).__name__ for value in getattr(meta, "attrs", {}).values()]
            sizes = (*getattr(meta, "outer_size", ()), *getattr(meta, "outer_stride", ()))
            known = meta.shardwise = inner == ["PlainTensorMeta"] and all(type(n) is int and n >= 0 for n in sizes)
        return bool(known)

    def unwrap(args: Any, *, append_symints: bool, subclass_metas: Any = None) -> list[Any]:
        taken: list[Any] = []
        for i, x in enumerate(args):
            if type(x) is torch.Tensor:
                taken.append(x)
            elif type(x) is tensor and subclass_metas is not None and is_plain(subclass_metas[i]):
                taken.append(x._local)
            else:
                own = None if subclass_metas is None else subclass_metas[i : i + 1]
                taken += original([x], append_symints=append_symints, subclass_metas=own)
        return taken

    return unwrap


def force_save_collectives(original: Any) -> Any:
    """Saves what communication gives where ranks have programs of their own: a second time some would not ask for it."""

    def force_save(joint: Any) -> None:
        for node in joint.graph.nodes if HOOKS.is_of_one_rank() else ():
            if "recompute" in node.meta and _communicates(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        original(joint)

    return force_save


def must_be_in_forward(original: Any) -> Any:
    """Keeps communication of a forward in the forward. AOTAutograd would put it into either part, or both, by what it keeps
    between them: that depends on sizes, so on the rank, and ranks would wait for each other forever."""
    return lambda node: original(node) or _is_of(node, backward=False)


def must_be_in_backward(original: Any) -> Any:
    """Keeps communication of a backward in the backward."""
    return lambda node: original(node) or _is_of(node, backward=True)


def _is_of(node: Any, *, backward: bool) -> bool:
    again = getattr(node.meta.get("recompute"), "name", "") in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")
    in_backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
    return in_backward is backward and not again and _communicates(node)


def _communicates(node: Any) -> bool:
    """Whether a node is a communication of this library."""
    name = str(node.target)
    if name.startswith("_c10d_functional.wait_tensor") or node.target is operator.getitem:
        return _communicates(node.args[0]) if isinstance(node.args[0], torch.fx.Node) else False
    if name.startswith("_c10d_functional."):
        return any(isinstance(arg, str) and arg.startswith("sw:") for arg in node.args)
    return name.startswith(("shardwise.move", "shardwise.exchange", "shardwise.messages", "shardwise.rows"))


def save_program(original: Any) -> Any:
    """Keeps no program that would mislead other ranks: a key is made before its program is traced, and nothing else can tell
    the cache that the trace found something that the key does not say."""
    return staticmethod(lambda *args, **kwargs: None if HOOKS.is_misleading() else original(*args, **kwargs))


# ── Inductor ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def call_region(original: Any) -> Any:
    """Shows every region that Inductor compiled to the modes of `remat` that see operators now, the innermost first: its calls
    pass no dispatcher."""

    def call(self: Any, inputs: Any) -> Any:
        result = functools.partial(original, self, inputs)
        if dispatch_modes():
            name, writes = (self._fx_graph_cache_key or "")[:8], sorted(self.mutated_input_idxs)
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, HOOKS.sees_regions):
                    result = functools.partial(mode.region, self, f"compiled {name}", list(inputs), writes, result)
        return result()

    return call


# ── outside of the compiler ───────────────────────────────────────────────────────────────────────────────────────────


def iterate_state_dict(original: Any) -> Any:
    """Gathers and copies distributed tensors in torch's functions on state dicts: these ask for torch's own classes."""
    ours = {"_gather_state_dict": HOOKS.gather, "_create_cpu_state_dict": lambda x: x.detach().clone()}

    @functools.wraps(original)
    def iterate(value: Any, sharded: Any, distributed: Any, plain: Any, **words: Any) -> Any:
        own = ours.get(distributed.__qualname__.partition(".")[0]) if isinstance(value, HOOKS.tensor) else None
        return original(value, sharded, distributed, plain if own is None else lambda x, *_: own(x), **words)

    return iterate


def composite_kernel(operator: Any) -> Any:
    """A kernel of `HOOKS.composites`, for the first dispatch key that only tensors of Python classes have. It is for operators
    that read values on the way: what is left of them once torch has decomposed them does not tell which values are valid."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonTLSSnapshot)
    kernel = HOOKS.composites[operator]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(functools.partial(operator.redispatch, keys & after), *args, **kwargs)

    return run
