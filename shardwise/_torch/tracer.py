"""What torch's tracer is taught: whole training steps as one graph, tensors taken apart quickly, collectives kept in order;
and what its functions on state dicts and its composite operators are taught.

These change torch's own classes and functions, once, and only what they do for the backends and operators of this library.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import RematError
from .compiler import tracing_context
from .tensors import alias, excludes


def optimizer_hooks(optimizer: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The hooks before and after a step of an optimizer, those of all optimizers among them, in the order of their calls."""
    before = _global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
    return before, (optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values())


def has_traced_backward() -> bool:
    """Whether the graph that Dynamo is making now has a backward in it that used up the graph of gradients."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return module is not None and hasattr(module.InstructionTranslator.current_tx().output, "shardwise")
    except AttributeError:  # nothing is being traced
        return False


torch.compiler.assume_constant_result(has_traced_backward)


def has_backward_inside() -> bool:
    """Whether the program that is traced now asks for gradients itself, so that no backward of its own is made of it."""
    return getattr(tracing_context(), "shardwise_backward", False)


def teach_checkpoint(contexts: Callable[..., Any], key: Callable[..., str]) -> None:
    """Let Dynamo take `functools.partial(contexts, *facts)`, made in a traced function, as the `context_fn` of a checkpoint
    whose program is kept under `key(*facts)`. By itself it keeps no such program, and guards the identity of the facts."""
    _teach_checkpoint(contexts, key)


torch.compiler.assume_constant_result(teach_checkpoint)


@functools.cache
def _teach_checkpoint(contexts: Callable[..., Any], key: Callable[..., str]) -> None:
    found = importlib.import_module("torch._dynamo.variables.higher_order_ops").CheckpointHigherOrderVariable
    partial = importlib.import_module("torch._dynamo.variables.functions").FunctoolsPartialVariable
    call = found._call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = kwargs["context_fn"].realize() if "context_fn" in kwargs else None
        if isinstance(given, partial) and getattr(given.func, "fn", None) is contexts:
            facts = [getattr(fact, "real_obj", fact) for fact in (arg.as_python_constant() for arg in given.args)]
            made = _Named(functools.partial(contexts, *facts), key(*facts))
            given.guard_as_python_constant = lambda: made  # policies have guards of their own: on what they are, not which
            kwargs = {**kwargs, "context_fn": given}
        return call(self, tx, args, kwargs)

    found._call_function = call_function


class _Named:
    """A function that is known, and pickled, by its key alone: torch's keys are made of pickles."""

    def __init__(self, function: Callable[[], Any], key: str) -> None:
        self._function, self.cache_hash = function, key

    def __call__(self) -> Any:
        return self._function()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.cache_hash,)


@functools.cache
def trace_whole_steps(step: Callable[..., Any], zero_grad: Callable[..., Any]) -> None:
    """Let Dynamo trace `Tensor.backward`, and these functions in place of an optimizer's methods, for backends with an
    attribute `whole_steps`: it can do the first, behind a setting, and it knows optimizers, whose gradients it takes from the
    parameters, but not yet gradients that a backward in the same graph made."""
    tensors = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable
    _trace_backward(tensors)
    _keep_gradients_with_their_tensor(tensors)
    optimizers = importlib.import_module("torch._dynamo.variables.optimizer").OptimizerVariable
    _trace_optimizer(optimizers, {"step": step, "zero_grad": zero_grad})
    _keep_steps_on_host(optimizers)


def _kind(tx: Any) -> str:
    """What the backend of a trace says of itself: "captured", "compiled", or nothing."""
    return _kind_of(tx.output)


def _kind_of(output: Any) -> str:
    return getattr(getattr(getattr(output, "compiler_fn", None), "compiler_fn", None), "whole_steps", "")


def _trace_backward(found: Any) -> None:
    settings = importlib.import_module("torch._dynamo.config")
    functions: Any = importlib.import_module("torch._dynamo.variables.torch")
    constant = importlib.import_module("torch._dynamo.variables.constant").ConstantVariable
    backward, attribute, collect = found.method_backward, found.var_getattr, functions._collect_tensors_with_sources

    def collect_tensors(variable: Any) -> Any:
        value = variable.as_proxy().node.meta.get("example_value") if isinstance(variable, found) else None
        if is_traceable_wrapper_subclass(value):
            return [(value, variable.source and variable.source.name)]  # before torch 2.13 these are refused
        return collect(variable)

    def trace_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not _kind(tx):
            return backward(self, tx, *args, **kwargs)
        # Parameters that were met in an optimizer first are no inputs in Dynamo's list of these.
        leaves = tx.output.leaf_var_creation_order
        own = list(leaves)
        leaves.extend(tx.output.side_effects.id_to_variable.values())
        leaves[:] = [x for x in leaves if not isinstance(x, found) or x.as_proxy().node.graph is tx.output.graph]  # in no block
        tx.output.tracing_context.shardwise_backward = True
        if "retain_graph" not in kwargs and len(args) < 2:
            tx.output.shardwise = "spent"
        try:
            with settings.patch(trace_autograd_ops=True):
                return backward(self, tx, *args, **kwargs)
        finally:
            leaves[:] = own

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        if name == "grad" and _kind(tx):
            self = _written_to(self, tx.output.side_effects)
        result = attribute(self, tx, name)
        if name == "grad" and result is constant.create(None):
            result.source = None  # the one None of all traces has just been told where this trace found it
        return result

    found.method_backward, found.var_getattr = trace_backward, get_attribute
    functions._collect_tensors_with_sources = collect_tensors
    handlers = functions.TorchInGraphFunctionVariable._get_handlers()
    handlers[torch.autograd.grad] = _with_setting(handlers[torch.autograd.grad], settings)


def _with_setting(handler: Callable[..., Any], settings: Any) -> Callable[..., Any]:
    def trace_grad(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not _kind(tx):
            return handler(self, tx, *args, **kwargs)
        tx.output.tracing_context.shardwise_backward = True
        with settings.patch(trace_autograd_ops=True):
            return handler(self, tx, *args, **kwargs)

    return trace_grad


def _keep_gradients_with_their_tensor(found: Any) -> None:
    """After `p -= x` Dynamo takes `p` for a new tensor, and loses a gradient that it is given or freed from."""
    effects = importlib.import_module("torch._dynamo.side_effects").SideEffects
    store = effects.store_attr

    def store_attribute(self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "grad" and isinstance(item, found) and _kind_of(self.output_graph_weakref()):
            item = _written_to(item, self)
        return store(self, item, name, *args, **kwargs)

    effects.store_attr = store_attribute


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


def _trace_optimizer(found: Any, methods: dict[str, Callable[..., Any]]) -> None:
    bound = importlib.import_module("torch._dynamo.variables.functions").UserMethodVariable
    attribute, call, wrap = found.var_getattr, found.call_method, found.wrap_tensor
    refuse = found.graph_break_if_pending_mutation
    made: dict[int, Any] = {}  # what stands for a gradient, to the gradient in the graph

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        if name not in methods or not _kind(tx):
            return attribute(self, tx, name)
        self.value._opt_called = True  # what schedulers look for; Dynamo loses attributes that a traced function gives here
        return bound(methods[name], self)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """While torch sets up the optimizer's state, parameters stand for their own gradients, of the same shapes."""
        partials = list(_pending_gradients(self.value, tx)) if name == "_init_group" and _kind(tx) else []
        if any(gradient is None for _, gradient in partials):
            refuse(self, tx)  # torch would look at the gradient that the parameter had before
        before = [(p, p.grad) for p, _ in partials]
        try:
            for p, gradient in partials:
                p.grad = p.detach()
                made[id(p.grad)] = gradient
            return call(self, tx, name, args, kwargs)
        finally:
            for p, gradient in before:
                made.pop(id(p.grad), None)
                p.grad = gradient

    def wrap_tensor(self: Any, tx: Any, value: Any) -> Any:
        return made[id(value)] if id(value) in made else wrap(self, tx, value)

    def check_partial(self: Any, tx: Any) -> None:
        if not made:
            refuse(self, tx)

    found.var_getattr, found.call_method, found.wrap_tensor = get_attribute, call_method, wrap_tensor
    found.graph_break_if_pending_mutation = check_partial


def _keep_steps_on_host(found: Any) -> None:
    capturable, move, call = found._set_capturable, found.move_step_if_cpu, found.call_method

    def set_capturable(self: Any, tx: Any) -> None:
        """Counts of steps stay on the host, if they can: what reads them there need not wait for a device."""
        before = [group.get("capturable") for group in self.value.param_groups]
        capturable(self, tx)
        for group, value in zip(self.value.param_groups, before, strict=True):
            if _kind(tx) == "captured" and "capturable" in group:
                group["capturable"] = value

    def move_steps(self: Any) -> None:
        if not getattr(self, "steps_stay", False):
            move(self)

    def call_method(self: Any, tx: Any, *args: Any) -> Any:
        self.steps_stay = _kind(tx) == "captured"
        return call(self, tx, *args)

    found._set_capturable, found.move_step_if_cpu, found.call_method = set_capturable, move_steps, call_method


@functools.cache
def unwrap_quickly(kind: type, attribute: str) -> None:
    """Let compiled functions take tensors of this class, which wrap one plain tensor, apart by reading it: before torch 2.13
    what they do for each of them costs more than some operators."""
    module: Any = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    unwrap = getattr(module, "runtime_unwrap_tensor_subclasses", None)
    if unwrap is None:
        return
    read = attrgetter(attribute)

    def is_plain(meta: Any) -> bool:
        """Whether a plain tensor is inside, and sizes and strides are numbers; what is known is kept with the description."""
        known = getattr(meta, "shardwise", None)
        if known is None:
            inner = [type(value).__name__ for value in getattr(meta, "attrs", {}).values()]
            sizes = (*getattr(meta, "outer_size", ()), *getattr(meta, "outer_stride", ()))
            known = meta.shardwise = inner == ["PlainTensorMeta"] and all(type(n) is int and n >= 0 for n in sizes)
        return bool(known)

    def quick(args: Any, *, append_symints: bool, subclass_metas: Any = None) -> list[Any]:
        taken: list[Any] = []
        for i, x in enumerate(args):
            if type(x) is torch.Tensor:
                taken.append(x)
            elif type(x) is kind and subclass_metas is not None and is_plain(subclass_metas[i]):
                taken.append(read(x))
            else:
                own = None if subclass_metas is None else subclass_metas[i : i + 1]
                taken += unwrap([x], append_symints=append_symints, subclass_metas=own)
        return taken

    module.runtime_unwrap_tensor_subclasses = quick


def _pending_gradients(optimizer: Any, tx: Any) -> Iterator[tuple[Any, Any]]:
    """Parameters and the gradients that they have in Dynamo's graph only; None where they had one, and have none there."""
    effects = tx.output.side_effects
    tensors = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        variable = effects.id_to_variable.get(id(p))
        if variable is not None and effects.has_pending_mutation_of_attr(variable, "grad"):
            gradient = effects.load_attr(variable, "grad", deleted_ok=True)
            if isinstance(gradient, tensors):
                yield p, gradient
            elif p.grad is not None:
                yield p, None


@functools.cache
def keep_in_their_part(differs: Callable[[], bool]) -> None:
    """Let communication that a forward asked for stay in the forward, and that of a backward in the backward. AOTAutograd would
    put it into either, or both, by what it keeps between them: that depends on sizes, so on the rank, and ranks would wait for
    each other for ever. A block of `remat` may ask for it a second time, but not where ranks have programs of their own, of
    which `differs` tells."""
    module: Any = importlib.import_module("torch._functorch.partitioners")
    forward, backward = module._must_be_in_forward, module._must_be_in_backward
    save = module.force_save_collectives

    def force_save(joint: Any) -> None:
        for node in joint.graph.nodes if differs() else ():
            if "recompute" in node.meta and _communicates(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        save(joint)

    def is_of(node: Any, part: bool) -> bool:
        again = getattr(node.meta.get("recompute"), "name", "") in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")
        in_backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        return in_backward is part and not again and _communicates(node)

    module.force_save_collectives = force_save
    module._must_be_in_forward = lambda node: forward(node) or is_of(node, False)
    module._must_be_in_backward = lambda node: backward(node) or is_of(node, True)


def _communicates(node: Any) -> bool:
    """Whether a node is a communication of this library."""
    name = str(node.target)
    if name.startswith("_c10d_functional.wait_tensor") or node.target is operator.getitem:
        return _communicates(node.args[0]) if isinstance(node.args[0], torch.fx.Node) else False
    if name.startswith("_c10d_functional."):
        return any(isinstance(arg, str) and arg.startswith("sw:") for arg in node.args)
    return name.startswith(("shardwise.move", "shardwise.exchange", "shardwise.messages", "shardwise.rows"))


def see_regions(watch: Any) -> None:
    """Show every region that Inductor compiled to the modes of a class that see operators now, the innermost first: its calls
    pass no dispatcher. Does nothing before something was compiled; its modules take seconds to import."""
    if "torch._dynamo" in sys.modules:
        _see_regions(watch)


@functools.cache
def _see_regions(watch: Any) -> None:
    compiled = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    modes: Any = importlib.import_module("torch.utils._python_dispatch")._get_current_dispatch_mode_stack
    run = compiled.__call__
    # Of several programs that fit, the oldest is taken, not the last: a second run takes the one that the first took.
    frames: Any = torch._C._dynamo.eval_frame
    frames._set_lru_cache(False)

    def call(self: Any, inputs: Any) -> Any:
        result = functools.partial(run, self, inputs)
        if _modes():
            name, writes = (self._fx_graph_cache_key or "")[:8], sorted(self.mutated_input_idxs)
            for mode in modes():
                if isinstance(mode, watch):
                    result = functools.partial(mode.region, self, f"compiled {name}", list(inputs), writes, result)
        return result()

    compiled.__call__ = call


_modes: Any = torch._C._len_torch_dispatch_stack


# ── values that are computed a second time ──


@contextlib.contextmanager
def saved_hooks() -> Iterator[None]:
    """In the block autograd calls hooks on saved tensors, also while AOTAutograd traces: it does not by itself."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def traced_graph() -> Any:
    """The graph that an operator called now becomes a part of, if any."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer.graph


def is_joint(graph: Any) -> bool:
    """Whether a graph that is being traced will be parted into forward and backward: it takes gradients then, by this name."""
    places = itertools.takewhile(lambda node: node.op == "placeholder", () if graph is None else graph.nodes)
    return any("tangents" in str(node.target) for node in places)


def snapshot(value: Any) -> Callable[[], Any]:
    """What gives the same tensors again, detached, as they are now. A trace turns writes into new values, and has the old;
    elsewhere what has been written to is gone."""
    if isinstance(value, list | tuple):
        parts = [snapshot(item) for item in value]
        return lambda: type(value)(part() for part in parts)
    if not isinstance(value, torch.Tensor):
        return lambda: value
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inner = {name: snapshot(getattr(value, name)) for name in names}
        rebuild, size, stride = type(value).__tensor_unflatten__, value.shape, value.stride()
        return lambda: rebuild({name: again() for name, again in inner.items()}, context, size, stride)
    functional = importlib.import_module("torch._subclasses.functional_tensor").FunctionalTensor
    if isinstance(value, functional):
        held = value.from_functional()
        return lambda: functional.to_functional(held)
    version, kept = value._version, alias(value)

    def unchanged() -> torch.Tensor:
        if kept._version != version:
            raise RematError(_WRITTEN.format(list(kept.shape), str(kept.dtype).removeprefix("torch.")))
        return kept.detach()

    return unchanged


_WRITTEN = (
    "a block of remat keeps {1}{0} for its backward, and writes to it later; write to a clone of it, or do not keep it (save=)"
)


# ── what torch does before operators reach tensors of Python classes ──────────────────────────────────────────────────

#: The module that looks through the inputs of branches and loops (`torch.cond` and its like) for what they share.
TAKES_BRANCHES = "torch._higher_order_ops.utils"

_ATEN = torch.library.Library("aten", "IMPL")


def before_taken_apart(op: Any, kernel: Callable[..., Any]) -> None:
    """Have `kernel(go_on, *args)` called for tensors of Python classes before torch takes an operator apart. It is for those
    that read values on the way: what is left of them does not tell which values are valid. The key is the first that only
    such tensors have; no operator has a kernel of its own there."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonTLSSnapshot)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(functools.partial(op.redispatch, keys & after), *args, **kwargs)

    _ATEN.impl(op, run, "PythonTLSSnapshot", with_keyset=True)


def reader(name: str) -> Callable[[Any], Any]:
    """A method of tensors that gives a number, also inside `torch.tensor([…])`, which keeps operators from tensors of Python
    classes while it reads its list: it would read memory that they do not have."""
    read = getattr(torch.Tensor, name)

    def method(self: Any) -> Any:
        with excludes(torch._C.DispatchKey.Python, False), excludes(torch._C.DispatchKey.PythonTLSSnapshot, False):
            return read(self)

    return method


# ── state dicts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def teach_state_dicts(cls: type, gather: Callable[[Any], Any], copy: Callable[[Any], Any]) -> None:
    """Let torch's functions on state dicts gather and copy tensors of a class as they do those of `torch.distributed.tensor`.

    They ask for torch's own classes and have no hook: `get_model_state_dict(full_state_dict=True)` would pass the others on as
    they are, and whoever saves them on rank 0 would save one shard of each. All of them go through `_iterate_state_dict`.
    """
    module: Any = importlib.import_module("torch.distributed._state_dict_utils")
    iterate, ours = module._iterate_state_dict, {"_gather_state_dict": gather, "_create_cpu_state_dict": copy}

    @functools.wraps(iterate)
    def taught(value: Any, sharded: Any, distributed: Any, plain: Any, **words: Any) -> Any:
        own = ours.get(distributed.__qualname__.partition(".")[0]) if isinstance(value, cls) else None
        return iterate(value, sharded, distributed, plain if own is None else lambda x, *_: own(x), **words)

    module._iterate_state_dict = taught
