"""Every private torch name used in Shardwise, each with the reason it is needed.

Supported: torch 2.11 to 2.13. Nothing outside of this folder touches `torch._*`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._decomp  # the table of decompositions is filled on import
import torch._guards
import torch._meta_registrations  # Python meta kernels give output shapes of many operators
import torch.distributed._functional_collectives  # gives the collective operators their fake kernels, for tracing
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBaseMeta
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import OperatorError

__all__ = [
    "HAS_KEYS",
    "LOOKS_FOR_VIEWS",
    "READS_ATTRIBUTES",
    "Function",
    "HigherOrderOperator",
    "NotTraced",
    "OpOverload",
    "OpOverloadPacket",
    "OpaqueBaseMeta",
    "TorchDispatchMode",
    "alias",
    "artifacts_of_block",
    "base_of",
    "below_autograd",
    "collectives",
    "compile_graph",
    "compile_local",
    "compiler_caches",
    "compiler_folder",
    "composite",
    "constant_type",
    "context_of_backward",
    "decompositions",
    "dispatch_modes",
    "excludes",
    "flex_operators",
    "foreach_type",
    "format_like",
    "hint",
    "in_order",
    "inductor_pass",
    "inductor_settings",
    "is_alias",
    "is_batched",
    "is_decomposing",
    "is_kept",
    "is_traced_whole",
    "is_transforming",
    "is_wrapper",
    "keep_alive",
    "keeps_graph",
    "known",
    "knows_conjugates",
    "make_wrapper",
    "no_dispatch",
    "no_modes",
    "no_torch_function",
    "order_kept",
    "overloads",
    "probe",
    "quick_call",
    "quotient",
    "raw_call",
    "rebuilt",
    "rule_for",
    "runs_on_hosts",
    "schema",
    "storage_of",
    "trace_local",
    "tracing_context",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unseen",
    "untraced",
    "veto_cache",
]

#: The only constructor of a tensor subclass that holds no memory of its own. In the order size, strides, storage offset, memory
#: format, dtype, layout, device its arguments are parsed in three quarters of the time that names take.
make_wrapper = torch.Tensor._make_wrapper_subclass

#: Turning the Python torch-function protocol off halves the cost of an operator on a subclass.
no_torch_function: Any = torch._C._disabled_torch_function_impl

#: Operator → a Python function of other operators; serves operators that have no rule.
decompositions: dict[Any, Any] = torch._decomp.decomposition_table

#: In the block operators skip what autograd would do, which costs more than some of them.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd

#: Which memory format the strides of a tensor are like, contiguous or not; the public function asks for one and for both.
format_like: Any = torch._prims_common.suggest_memory_format

#: How many dispatch modes (tracers, say) see the operators that run now; no public function tells.
dispatch_modes: Any = torch._C._len_torch_dispatch_stack

#: Given a key and False: in the block operators see that key again, which dispatch to a subclass hides from what it calls.
excludes: Any = torch._C._SetExcludeDispatchKeyGuard


#: Whether a class of tensors wraps others, and says which.
is_wrapper: Any = is_traceable_wrapper_subclass_type

#: Whether the backward that runs now leaves the graph as it is, so that another can follow.
keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph


_frames: Any = torch._C._dynamo.eval_frame
_What = TypeVar("_What")


def untraced(what: _What) -> _What:
    """A function, or a class with its methods, that Dynamo never compiles by itself, nor what it calls: where torch calls it,
    or code that runs uncompiled (a loop with a graph break, say). Inlined into a traced function it is traced as any other.
    `torch.compiler.disable` takes microseconds of each call."""
    skip = _frames._FrameAction.SKIP
    for function in [what] if isinstance(what, FunctionType) else _functions(what):
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return what


def _functions(cls: Any) -> list[Any]:
    """The functions that a class is written with: methods of all kinds, and those of its properties."""
    parts = [(value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset"))) for value in vars(cls).values()]
    return [part for several in parts for part in several if isinstance(part, FunctionType)]


class NotTraced(OperatorError, UnsupportedOperatorException):
    """What cannot be a part of a traced program. Dynamo breaks the graph there; where it may not, it shows the text, which it
    takes for the operator's name."""

    def __init__(self, text: str) -> None:
        RuntimeError.__init__(self, text)
        self.func: Any = text


class Function(torch.autograd.Function):
    """An autograd function whose forward and backward Dynamo leaves alone where autograd calls them."""

    def __init_subclass__(cls) -> None:
        untraced(cls)


def alias(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, for use below autograd, where views would not see the writes to one another."""
    with excludes(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


@contextlib.contextmanager
def knows_conjugates() -> Iterator[None]:
    """In the block a tensor that is marked as a conjugate or a negative is read as one: for operators that make such tensors
    themselves, and run where dispatch to a subclass has hidden that."""
    with excludes(torch._C.DispatchKey.Conjugate, False), excludes(torch._C.DispatchKey.Negative, False):
        yield


#: Whether two tensors share memory, also of those that have none of their own while a program is traced.
is_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]


def context_of_backward() -> contextvars.Context | None:
    """In a thread in which autograd runs a backward: the context of the thread that asked for it, as torch keeps it. None where
    there is none."""
    found = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    return found if isinstance(found, contextvars.Context) else None


def storage_of(x: torch.Tensor) -> int:
    """Which storage a tensor lies in, as a number: tensors without data that stand for others in a trace have storages too."""
    return int(x.untyped_storage()._cdata)


#: Runs an operator on a wrapper itself, not on what it wraps: how the sizes of a wrapper change in place.
no_dispatch: Any = torch._C._DisableTorchDispatch

#: The compiled function under an overload: calling it saves a Python frame.
raw_call: Any = attrgetter("_op")


def foreach_type(cls: type) -> None:
    """Let optimizers and clipping work on lists of tensors of a class at once: they look for it in tables of their own."""
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        known = importlib.import_module(module)._foreach_supported_types
        if cls not in known:
            known.append(cls)


def is_batched(x: torch.Tensor) -> bool:
    """Whether a tensor is many at once, by `vmap` or by `is_grads_batched`: only its dispatch keys tell."""
    return "Batched" in repr(torch._C._dispatch_keys(x))


def is_transforming() -> bool:
    """Whether a function is being transformed by `torch.func`: no tensor may be asked for gradients then."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_traced_whole(x: torch.Tensor) -> bool:
    """Whether `make_fx` is at work and follows this tensor, of whatever class, as one value: its own table tells."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return mode is not None and x in mode.tracer.tensor_tracker


def flex_operators() -> list[tuple[Any, Callable[..., Any]]]:
    """The operators of flex attention, each with what it means in terms of others. They take functions, so they have no schema,
    and ask each class of tensors for a function of its own."""
    found: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    return [(found.flex_attention, found.math_attention), (found.flex_attention_backward, found.sdpa_dense_backward)]


def rule_for(operator: Any, cls: type) -> Callable[..., Any]:
    """What an operator that takes functions does with tensors of a class."""
    return operator.python_key_table[cls]


class _Reached(Exception):
    """Carries the operator that a probe met, and with which arguments."""


class _Probe(torch.Tensor):
    """Stops at the first operator it meets, and tells which. (A dispatch mode could, but imports the compiler: two seconds.)"""

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _Reached(func, _by_id(args), _by_id(kwargs or {}))


def _by_id(value: Any) -> Any:
    """The value with tensors replaced by what tells them apart, so that it can be compared."""
    if isinstance(value, dict):
        return {name: _by_id(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_by_id(item) for item in value]
    return id(value) if isinstance(value, torch.Tensor) else value


def _reached(call: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        call(*args, **kwargs)
    except _Reached as reached:
        return reached.args
    except (RuntimeError, TypeError, ValueError):
        return None
    return None


def probe(shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor for `quick_call`."""
    return make_wrapper(_Probe, shape, stride, dtype=dtype, device=torch.device("cpu"))


def quick_call(func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The quickest way to call an operator with arguments of these kinds (probes stand for tensors): torch's generated binding,
    which parses them in less than half the time, if with them it reaches this overload first, and hands on the same: its
    defaults may differ (`torch._C._nn.mse_loss` does not reduce)."""
    name = func._schema.name.partition("::")[2]
    wanted = _reached(func._op, args, kwargs)
    for holder in (torch, torch._C._nn, torch.Tensor) if func.namespace == "aten" else ():
        binding = getattr(holder, name, None)
        if binding is not None and wanted is not None and _reached(binding, args, kwargs) == wanted:
            return binding
    return func._op


#: Tells graph passes that an operator matters though nothing uses its result.
keep_alive: Any = torch.fx.node.has_side_effect

#: Which arguments an operator writes to is told by its schema only.
schema: Any = attrgetter("_schema")

#: The collectives that trace and that Inductor knows; the public ones do neither under every transform.
collectives: Any = torch.ops._c10d_functional


def composite(func: OpOverload) -> bool:
    """Whether an operator is only a composition of others (seen as itself under inference mode and inside programs)."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def runs_on_hosts(func: OpOverload) -> bool:
    """Whether an operator has a kernel for tensors of the CPU, its own or by composition."""
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"))


def overloads(func: OpOverload, name: str) -> list[OpOverload]:
    """The overloads of the operator of that name in the namespace of `func`."""
    packet = getattr(getattr(torch.ops, func.namespace), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


#: Whether torch asks tensors of a class like ours what a key of its cache of compiled programs should say of them. Where it
#: does not, the cache is off: a key without the library's own would outlive it.
HAS_KEYS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
if not HAS_KEYS:
    importlib.import_module("torch._functorch.config").enable_autograd_cache = False  # type: ignore[attr-defined]

#: The module that, while it traces a function of the user's, reads attributes of tensors on the user's behalf.
READS_ATTRIBUTES = "torch._dynamo.variables.tensor"

#: What a tensor is a view of; autograd alone knows.
base_of: Any = torch.Tensor._base

#: The module that looks which results of a traced function are views of others.
LOOKS_FOR_VIEWS = "torch._functorch._aot_autograd.collect_metadata_analysis"

#: The trace that is going on, if any: torch keeps it from the first operator to the compiled backward.
tracing_context: Any = torch._guards.TracingContext.try_get


@functools.cache
def veto_cache(refused: Callable[[], bool]) -> None:
    """From now on torch's cache of compiled programs keeps none for which `refused()`. Its key is made before a program is
    traced, and nothing else can tell it that the trace found something that the key does not say."""
    cache = importlib.import_module("torch._functorch._aot_autograd.autograd_cache").AOTAutogradCache
    save = cache.save

    def save_unless_refused(*args: Any, **kwargs: Any) -> Any:
        return None if refused() else save(*args, **kwargs)

    cache.save = staticmethod(save_unless_refused)


def constant_type(cls: type) -> None:
    """Let objects of a class stand in traced programs as constants, like ints: what they are asked is answered while tracing.
    torch 2.11 wants classes of a metaclass of its own (`OpaqueBaseMeta`) for that."""
    own = ("__getitem__", "__or__", "__and__", "__invert__", "__eq__", "__ne__")
    names = [*dir(cls), *vars(cls).get("__annotations__", ())]  # attributes that only instances have are annotated
    members = {name: MemberType.USE_REAL for name in names if not name.startswith("_") or name in own}
    register_opaque_type(cls, typ="value", members=members)


# ── the compiler: imported where something is compiled, since that takes seconds ──


def inductor_settings(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """The settings of Inductor that `torch.compile(mode=…, options=…)` means: only torch's own backend knows."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)


def compile_graph(gm: Any, inputs: Any, local: Callable[..., Any], settings: dict[str, Any], at_once: bool) -> Any:
    """A graph of Dynamo compiled by Inductor; `local(gm, inputs, **words)` compiles each local program that no cache has.

    `at_once`, the backward is compiled with the forward: by itself torch waits for the first backward.
    """
    inductor = importlib.import_module("torch._inductor.compile_fx")
    with importlib.import_module("torch._functorch.config").patch(force_non_lazy_backward_lowering=at_once):
        return inductor.compile_fx(gm, inputs, inner_compile=local, config_patches=settings)


#: What Inductor adds to the words of a local program before it makes a key of them.
_WORDS = {"cpp_wrapper": False, "fx_wrapper": False, "is_backward": False, "is_inference": False, "static_input_idxs": ()}
_WORDS |= dict.fromkeys(("boxed_forward_device_index", "cudagraphs", "extern_node_serializer", "graph_id", "layout_opt"))


def _is_empty(gm: Any) -> bool:
    """Whether a program calls nothing: Inductor does not compile it then."""
    return not any(node.op.startswith("call") for node in gm.graph.nodes)


def is_kept(gm: Any, inputs: Any, words: dict[str, Any]) -> bool:
    """Whether Inductor's cache in this process's folder has a local program. (A wrong no is possible: it costs time only.)"""
    if _is_empty(gm):
        return True
    words = {**_WORDS, **words}
    for index in words["static_input_idxs"]:
        if isinstance(inputs[index], torch.Tensor) and inputs[index].device.type != "cpu":
            inputs[index]._is_inductor_static = True  # as Inductor does before it makes the key
    checked = importlib.import_module("torch._inductor.compile_fx").get_input_idxs_to_check(inputs, words["static_input_idxs"])
    cache = importlib.import_module("torch._inductor.codecache").FxGraphCache
    key, _ = cache.prepare_key(gm, inputs, words, checked, False)
    return key is not None and os.path.isdir(cache._get_tmp_dir_for_key(key[0]))


def compile_local(gm: Any, inputs: Any, words: dict[str, Any]) -> tuple[Any, bool]:
    """A local program compiled by Inductor, and whether that was work: its counters tell what its cache had."""
    counters = importlib.import_module("torch._dynamo.utils").counters["inductor"]
    before, empty = counters["fxgraph_cache_hit"], _is_empty(gm)
    made = importlib.import_module("torch._inductor.compile_fx").compile_fx_inner(gm, inputs, **words)
    if getattr(made, "current_callable", None) is not None:
        made.current_callable = _below_autograd(made.current_callable)
    return made, counters["fxgraph_cache_hit"] == before and not empty


def _below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without a look at autograd by each operator: torch's collectives do that in Python."""

    def call(*args: Any) -> Any:
        with below_autograd():
            return function(*args)

    return call


def compiler_caches() -> bool:
    """Whether Inductor keeps what it compiles."""
    settings = importlib.import_module("torch._inductor.config")
    return bool(settings.fx_graph_cache and not importlib.import_module("torch.compiler.config").force_disable_caches)


def compiler_folder() -> str:
    """Where Inductor keeps what it compiles."""
    return importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()


@contextlib.contextmanager
def artifacts_of_block() -> Iterator[Callable[[], bytes]]:
    """In the block torch's record of artifacts starts empty; yields what saves it. After the block it has everything again: the
    public functions know one record, of all that the process compiled."""
    record = importlib.import_module("torch.compiler._cache").CacheArtifactManager
    with record.with_fresh_cache():
        yield lambda: (record.serialize() or (b"", None))[0]
        inside = list(record._seen_artifacts)
    for artifact in inside:
        if artifact not in record._seen_artifacts:
            record._seen_artifacts.add(artifact)
            record._new_cache_artifacts[artifact.type()].append(artifact)


def hit_recompile_limit(error: Exception) -> bool:
    """Whether Dynamo refused to trace a function once more; its class lies in a module that takes seconds to import."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def local_graphs(
    gm: Any, inputs: Any, build: Callable[[str, Any], Callable[[list[Any]], Any]], prepare: Callable[[Any], Any] = lambda gm: gm
) -> Any:
    """A function that does what a graph over tensors of any class does, by graphs over the plain tensors that they wrap:
    `build` makes a function of a list from each; `prepare` sees forward and backward while they are still one graph. Only
    AOTAutograd traces through subclasses."""
    backend = importlib.import_module("torch._functorch.aot_autograd").aot_module_simplified
    partitioners = importlib.import_module("torch._functorch.partitioners")

    def partition(joint: Any, *args: Any, **kwargs: Any) -> Any:
        if not partitioners.has_recomputable_ops(joint):
            return partitioners.default_partition(prepare(joint), *args, **kwargs)
        for node in joint.graph.nodes:  # without a compiler that fuses nothing is cheap enough to be computed again unasked
            if not partitioners.must_recompute(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return partitioners.min_cut_rematerialization_partition(prepare(joint), *args, **kwargs)

    def compiler(part: str) -> Any:
        def made(graph: Any, _: Any) -> Any:
            function = build(part, graph)
            function._boxed_call = True  # type: ignore[attr-defined]  # takes one list, which it empties
            return function

        return made

    return backend(
        gm,
        inputs,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def hint(size: Any) -> int:
    """A size at hand, also where it is a symbol of a trace, without making the trace one of this size only."""
    return size if type(size) is int else size.node.hint if isinstance(size, torch.SymInt) else int(size)


def known(size: Any) -> Any:
    """A size as a number if the trace is of this size only."""
    value = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return size if value is None else value


def no_modes() -> Any:
    """In the block no tracer sees what is done: what a decision finds out about shapes is no part of a traced program."""
    return torch.utils._python_dispatch._disable_current_modes()


def unseen() -> Any:
    """In the block the tracer does not see what is done with symbols. If it saw a symbol come out of a longer expression (a
    size divided, or one less and one more), it would look for the symbol there, though that is made of it, and never end; it
    finds by itself what a symbol is."""
    return importlib.import_module("torch.fx.experimental.proxy_tensor").disable_proxy_modes_tracing()


def quotient(size: Any, count: int) -> Any:
    """`size // count`, also of a symbol."""
    if not isinstance(size, torch.SymInt):
        return size // count
    with unseen():
        return size // count


def rebuilt(size: Any, known_sizes: Iterable[Any]) -> Any:
    """A symbolic size made anew out of others, two at a time: the tracer then knows how. By itself it forgets a third."""
    atoms = {other.node.expr: other for other in known_sizes if isinstance(other, torch.SymInt)}

    def build(expr: Any) -> Any:
        if expr in atoms or expr.is_Integer:
            return atoms[expr] if expr in atoms else int(expr)
        parts = [build(part) for part in expr.args] if expr.is_Mul or expr.is_Add else [None]
        if any(part is None for part in parts):
            return None
        return functools.reduce(operator.mul if expr.is_Mul else operator.add, parts)

    found = build(size.node.expr) if isinstance(size, torch.SymInt) else size
    return size if found is None else found


def is_decomposing() -> bool:
    """Whether what is traced is for a compiler that wants operators in small shards, to fuse them: `gelu_backward`, say."""
    module = importlib.import_module("torch.fx.experimental.proxy_tensor")
    if hasattr(module, "CURRENT_DECOMPOSITION_TABLE"):  # of torch 2.11; in 2.12 one for each context
        table = module.CURRENT_DECOMPOSITION_TABLE
        table = table.get({}) if isinstance(table, contextvars.ContextVar) else table
    else:
        table = getattr(module.get_proxy_mode(), "decomposition_table", ())
    return torch.ops.aten.gelu_backward.default in table


def in_order(operator: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor:
    """What an operator gives that takes its own last result in the same trace, so that its calls stay in order. What one trace
    has in common is the mode that sees its operators; the first of the traces of a function has none, and needs no order."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    found = operator(getattr(mode, "shardwise_last", None))
    if mode is not None:
        mode.shardwise_last = found
    return found


@contextlib.contextmanager
def order_kept() -> Iterator[None]:
    """In the block `in_order` starts no new order: what runs there, runs a second time."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    last = getattr(mode, "shardwise_last", None)
    try:
        yield
    finally:
        if mode is not None:
            mode.shardwise_last = last


# ── graph passes ──


def trace_local(function: Callable[[torch.Tensor], torch.Tensor], x: Any, decompositions: dict[Any, Any] | None = None) -> Any:
    """The graph of the operators that a function of one fake tensor calls, decomposed as the table says."""
    tracer = importlib.import_module("torch.fx.experimental.proxy_tensor")
    with x.fake_mode:  # numbers that become tensors on the way are to be fakes as well
        return tracer.make_fx(function, decomposition_table=decompositions)(x).graph


def inductor_pass(run: Callable[[Any, dict[Any, Any]], object], key: str) -> Any:
    """`run(graph, decompositions)` as a pass of Inductor, which keeps programs under its key; new nodes are to be decomposed as
    the table says. Only an object of Inductor's own class is taken for one whose programs may be kept."""
    base = importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    table = importlib.import_module("torch._inductor.decomposition").select_decomp_table

    def call(self: Any, graph: Any) -> None:
        run(graph, table())

    return type("Passes", (base,), {"__call__": call, "uuid": lambda self: key, "__repr__": lambda self: f"Passes({key!r})"})()
