"""Private names of torch's compiler (Dynamo, AOTAutograd, Inductor), each with the reason it is needed.

The compiler's modules are imported where something is compiled, since that takes seconds.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import itertools
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._guards
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBaseMeta as OpaqueBaseMeta
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils._pytree import treespec_dumps as treespec_dumps
from torch.utils._pytree import treespec_loads as treespec_loads
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import OperatorError, RematError
from .tensors import alias, below_autograd

_frames: Any = torch._C._dynamo.eval_frame
_What = TypeVar("_What")


def untraced(what: _What) -> _What:
    """A function, or a class with its methods, that Dynamo never compiles by itself, nor what it calls: where torch calls it,
    or code that runs uncompiled (a loop with a graph break, say). Inlined into a traced function it is traced as any other.
    `torch.compiler.disable` takes microseconds of each call."""
    skip = _frames._FrameAction.SKIP
    written = [what] if isinstance(what, FunctionType) else vars(what).values()
    inside = [getattr(value, name, None) for value in written for name in ("__func__", "fget", "fset")]
    for function in (*written, *inside):
        if isinstance(function, FunctionType):
            _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return what


def constant_result(function: _What) -> _What:
    """A function that Dynamo calls while it traces, for its result. (torch's `assume_constant_result` imports the compiler.)"""
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


class OldestFirst:
    """While one lives, Dynamo takes the oldest of several compiled programs that fit, not the last used: a call that is made a
    second time then takes the program that the first one took."""

    _count = 0
    _counting = threading.RLock()

    def __init__(self) -> None:
        self._add(1)

    def __del__(self) -> None:
        self._add(-1)

    @classmethod
    def _add(cls, change: int) -> None:
        with cls._counting:
            cls._count += change
            _frames._set_lru_cache(not cls._count)


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


def is_traced_whole(x: torch.Tensor) -> bool:
    """Whether `make_fx` is at work and follows this tensor, of whatever class, as one value: its own table tells."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return mode is not None and x in mode.tracer.tensor_tracker


#: Tells graph passes that an operator matters though nothing uses its result.
keep_alive: Any = torch.fx.node.has_side_effect

#: Whether torch asks tensors of a class like ours what a key of its cache of compiled programs should say of them. Where it
#: does not, the cache is off: a key without the library's own would outlive it.
HAS_KEYS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

#: The module that, while it traces a function of the user's, reads attributes of tensors on the user's behalf.
READS_ATTRIBUTES = "torch._dynamo.variables.tensor"

#: The module that looks which results of a traced function are views of others.
LOOKS_FOR_VIEWS = "torch._functorch._aot_autograd.collect_metadata_analysis"

#: The module that looks through the inputs of branches and loops (`torch.cond` and its like) for what they share.
TAKES_BRANCHES = "torch._higher_order_ops.utils"

#: The trace that is going on, if any: torch keeps it from the first operator to the compiled backward.
tracing_context: Any = torch._guards.TracingContext.try_get


def constant_type(cls: type) -> None:
    """Let objects of a class stand in traced programs as constants, like ints: what they are asked is answered while tracing.
    torch 2.11 wants classes of a metaclass of its own (`OpaqueBaseMeta`) for that."""
    own = ("__getitem__", "__or__", "__and__", "__invert__", "__eq__", "__ne__")
    names = [*dir(cls), *vars(cls).get("__annotations__", ())]  # attributes that only instances have are annotated
    members = {name: MemberType.USE_REAL for name in names if not name.startswith("_") or name in own}
    register_opaque_type(cls, typ="value", members=members)


def inductor_settings(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """The settings of Inductor that `torch.compile(mode=…, options=…)` means: only torch's own backend knows."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)


def compile_graph(gm: Any, inputs: Any, local: Callable[..., Any], settings: dict[str, Any], at_once: bool) -> Any:
    """A graph of Dynamo compiled by Inductor; `local(gm, inputs, **words)` compiles each local program that no cache has.
    `at_once`, the backward is compiled with the forward: by itself torch waits for the first backward."""
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
    compiled: Any = getattr(made, "current_callable", None)

    def call(*args: Any) -> Any:
        with below_autograd():  # torch's collectives look at autograd in Python
            return compiled(*args)

    if compiled is not None:
        made.current_callable = call
    return made, counters["fxgraph_cache_hit"] == before and not empty


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


def local_graphs(gm: Any, inputs: Any, build: Callable[[str, Any], Any], prepare: Callable[[Any], Any] = lambda gm: gm) -> Any:
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

    def compiler(part: str, graph: Any, _: Any) -> Any:
        function: Any = build(part, graph)
        function._boxed_call = True  # takes one list, which it empties
        return function

    forward, backward, inference = (functools.partial(compiler, part) for part in ("forward", "backward", "inference"))
    words = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference, "partition_fn": partition}
    return backend(gm, inputs, keep_inference_input_mutations=True, **words)


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
    methods = {"__call__": lambda self, graph: run(graph, table()), "uuid": lambda self: key}
    return type("Passes", (base,), {**methods, "__repr__": lambda self: f"Passes({key!r})"})()


def optimizer_hooks(optimizer: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The hooks before and after a step of an optimizer, those of all optimizers among them, in the order of their calls."""
    before = _global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
    return before, (optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values())


@constant_result
def has_traced_backward() -> bool:
    """Whether the graph that Dynamo is making now has a backward in it that used up the graph of gradients."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return module is not None and hasattr(module.InstructionTranslator.current_tx().output, "shardwise")
    except AttributeError:  # nothing is being traced
        return False


def has_backward_inside() -> bool:
    """Whether the program that is traced now asks for gradients itself, so that no backward of its own is made of it."""
    return getattr(tracing_context(), "shardwise_backward", False)


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
            what = f"{str(kept.dtype).removeprefix('torch.')}{list(kept.shape)}"
            raise RematError(
                f"a block of remat keeps {what} for its backward, and writes to it later; write to a clone of it, or do not "
                "keep it (save=)"
            )
        return kept.detach()

    return unchanged


# ── packages and artifact files ───────────────────────────────────────────────────────────────────────────────────────


def compile_package(program: Any, path: str, settings: dict[str, Any]) -> None:
    """Write an exported program, compiled ahead of time, to a file (a zip archive, `*.pt2`)."""
    compiler = importlib.import_module("torch._inductor").aoti_compile_and_package
    # The compiler writes what it finds out of this machine into its settings, which are part of the keys of all caches.
    written = importlib.import_module("torch._inductor.config").patch({"aot_inductor.metadata": {}})
    with warnings.catch_warnings(), written, _by_name(torch.ops.aten._grouped_mm.default), _numbered_dtypes():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of what it does itself
        compiler(program, package_path=path, inductor_configs=dict(settings))


def sizes_of_data() -> Any:
    """A block in which the tracer goes on behind operators whose results have a size that depends on data."""
    return importlib.import_module("torch._dynamo.config").patch(capture_dynamic_output_shape_ops=True)


def _by_name(operator: Any) -> Any:
    """In the block Inductor calls an operator by its name if it has no function for it: torch 2.11 takes one for granted."""
    importlib.import_module("torch._inductor.compile_fx")  # fills the table below
    lowering = importlib.import_module("torch._inductor.lowering")
    known = str(operator) in importlib.import_module("torchgen.aoti.fallback_ops").inductor_fallback_ops
    needed = not known and operator in lowering.lowerings
    return _with_entries(lowering.lowerings, {operator: lowering.fallback_handler(operator)} if needed else {})


#: The dtypes by their numbers in C++.
_NUMBERS = dict(
    enumerate(["uint8", "int8", "int16", "int32", "int64", "half", "float", "double", "complex32", "cfloat", "cdouble", "bool"])
) | {15: "bfloat16"}


def _numbered_dtypes() -> Any:
    """In the block an operator that is called by name is told dtypes by their numbers in C++: torch 2.11 reads them as these,
    and writes others, which makes float64 of float32 without an error."""
    table = importlib.import_module("torch._export.serde.serialize")._TORCH_TO_SERIALIZE_DTYPE
    numbers = {getattr(torch, name): number for number, name in _NUMBERS.items()}
    return _with_entries(table, numbers if torch.__version__.startswith("2.11.") else {})


@contextlib.contextmanager
def _with_entries(table: dict[Any, Any], entries: dict[Any, Any]) -> Iterator[None]:
    before = {key: table[key] for key in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(before)


def leaves_with_paths(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """What a nested value holds, each with where it is (`[0]['cache']`), and how it is nested."""
    leaves, structure = tree_flatten_with_path(value)
    return [(keystr(path), leaf) for path, leaf in leaves], structure


def open_package(path: str) -> Any:
    """What runs a compiled program on a list of tensors, which it empties: `boxed_run`. (torch's own imports the compiler.)"""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    return loader(path, "model", False, 1, -1)  # not only in one thread, by one runner, on this device


def read_artifacts(data: bytes) -> Any:
    """torch's artifacts as they were saved, by kind; None where torch cannot read them, or one would be kept outside the
    compiler's folder. (The public function warns of the first and looks at no name.)"""
    record = importlib.import_module("torch.compiler._cache").CacheArtifactManager
    log = logging.getLogger("torch.compiler._cache")
    log.disabled, before = True, log.disabled  # what it would warn of is raised
    try:
        found = record.deserialize(data)
    finally:
        log.disabled = before
    # Names are paths, but those of profiles, in which torch replaces slashes.
    names = [artifact.key for kind, several in (found or {}).items() if kind != "pgo" for artifact in several]
    return None if any(".." in re.split(r"[/\\]", name) or name[:1] in ("/", "\\") for name in names) else found


def keep_artifacts(found: Any) -> None:
    """Put artifacts into torch's caches, so that compiling the same again finds them."""
    importlib.import_module("torch.compiler._cache").CacheArtifactManager.populate_caches(found)
