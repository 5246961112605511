"""`compile`: torch.compile, where each program is compiled by one rank for the whole job.

Dynamo and AOTAutograd run on every rank, and give the same program on all ranks that hold shards of the same shape. Only when
torch's caches do not have it, and Inductor would start, do the ranks communicate: of those with the same local program one
compiles, forward and backward; the others wait, install the result in torch's cache of local programs, and find it there. So a
warm start needs no communication, ranks with warm caches never wait for others, and a rank only ever runs what torch found
under that rank's own key.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..._torch.compiler import artifacts_of_block, compile_graph, compile_local, compiler_caches, inductor_settings, is_kept
from ..._torch.patches import install_patches
from ...base.argument_checks import a_function, flag, number, optional
from ...comm import transport
from ...comm.failures import in_job
from ...comm.tracing import tracing
from ...errors import CompileError
from ...layouts.text import form_of
from ...propagation.table import library_key
from ...tensor.dtensor import DTensor
from ..passes.order import inductor_pass
from ..training_step import align_leaves, traceable, whole_steps
from .election import Election
from .serialize import CompiledPrograms, install, loaded_libraries, pack, processor, read_libraries, unpack

#: Seconds that a rank waits, as a rule, for another one to compile.
TIMEOUT = 600.0


class Compilation(NamedTuple):
    """One graph that went through `compile` in this process.

    key       of the program: the same on every rank and in every process that compiles the same
    how       "compiled" here, "loaded" from the rank that compiled it, a "hit" in this rank's own cache, or "failed" where that
              rank did not deliver
    seconds   from Dynamo's graph to the compiled function, waiting included
    """

    key: str
    how: str
    seconds: float


_report: deque[Compilation] = deque(maxlen=1000)


def compile_report() -> tuple[Compilation, ...]:
    """What `compile` did in this process, the latest last (of very many, the last thousand).

    >>> all(done.how in ("compiled", "loaded", "hit", "failed") for done in compile_report())
    True
    """
    return tuple(_report)


def compile(model: Callable[..., Any] | None = None, *, timeout: float = TIMEOUT, **options: Any) -> Any:
    """`torch.compile` with Inductor, where each program is compiled by one rank of the job and loaded by the others.

    Takes what `torch.compile` takes: a function, a module, or nothing, to be used as a decorator; `fullgraph`, `dynamic`,
    `mode`, `options`. A rank waits at most `timeout` seconds for the one that compiles, and raises a `CompileError`, sooner if
    that one fails or dies. One process alone compiles as `torch.compile` does. `compile_report` tells what happened. As with
    `capture`, a training step may be compiled whole.

    >>> double = compile(lambda x: x * 2, fullgraph=True, disable=True)
    >>> double(3)
    6
    """
    if "backend" in options:
        raise CompileError("sw.compile is a backend around Inductor; for another backend call torch.compile itself")
    number(timeout, "compile: timeout", above=0.0)
    for name in ("fullgraph", "dynamic", "disable"):
        optional(flag, options.get(name), f"compile: {name}")
    optional(a_function, model, "compile: model", "a function or a module")
    if model is None:
        return lambda model: compile(model, timeout=timeout, **options)
    install_patches("tracing")
    traced = model if isinstance(model, torch.nn.Module) else functools.update_wrapper(traceable(model), model)
    return torch.compile(traced, backend=Backend(float(timeout), options.get("dynamic")), **options)


@whole_steps("compiled")
@dataclass(frozen=True)
class Backend:
    """What `torch.compile` calls with each graph; equal ones share what Dynamo compiled."""

    timeout: float
    dynamic: bool | None

    def __call__(
        self, gm: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        start = time.monotonic()
        gm = align_leaves(gm, inputs)
        settings = {"post_grad_custom_pre_pass": inductor_pass(), **inductor_settings(mode, options, self.dynamic)}
        alone = any(isinstance(x, DTensor) and transport(x.mesh).holds_all for x in inputs)
        shared = in_job() and compiler_caches() and not alone
        work = _Work(program_key(gm, inputs, settings), self.timeout, shared)
        with artifacts_of_block() as artifacts, tracing(whole_moves=True):
            made = work.run(gm, inputs, settings, artifacts)
        _report.append(Compilation(work.key, work.how, time.monotonic() - start))
        return made


class _Work:
    """The compilation of one graph by Inductor, here or on another rank where others may need the same program."""

    def __init__(self, key: str, timeout: float, shared: bool) -> None:
        self.key, self._timeout, self._shared = key, timeout, shared
        self._election: Election | None = None
        self.how = "hit"

    def run(self, gm: GraphModule, inputs: Sequence[Any], settings: dict[str, Any], artifacts: Callable[[], bytes]) -> Any:
        """The compiled function; if the rank that compiles it failed, a function that raises its error."""
        before = loaded_libraries() if self._shared else frozenset()
        try:
            made = compile_graph(gm, inputs, self._local, settings, at_once=self._shared)
            if self._election is not None and self._election.leads:
                saved, facts = artifacts(), {"processor": processor()}  # nothing where all of it came from a cache
                self._election.publish(pack(CompiledPrograms(facts, (saved,) if saved else (), read_libraries(before))))
            return made
        except CompileError as error:
            self.how = "failed"
            return functools.partial(_fail, error)  # what a backend raises, Dynamo would wrap in an error of its own
        except BaseException as error:
            if self._election is not None:
                self._election.fail(error)
            raise
        finally:
            if self._election is not None:
                self._election.end()

    def _local(self, gm: GraphModule, inputs: Sequence[Any], **words: Any) -> Any:
        """Compile one local program (forward or backward) that torch's cache of whole programs does not have."""
        if self._shared and self._election is None and not is_kept(gm, inputs, words):
            self._election = Election(_digest(self.key, _text(gm), *map(_fact, inputs)), self._timeout)
            if not self._election.leads:
                source = "what another rank compiled"
                install(unpack(self._election.wait(), source, lambda facts: None), source)
                self.how = "loaded"
        made, worked = compile_local(gm, inputs, words)
        if worked:
            self.how = "compiled"
        return made


def _fail(error: CompileError, *args: Any) -> Any:
    raise error.with_traceback(None)  # raised at every call: the traceback must not grow


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def program_key(gm: GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> str:
    """A digest of Dynamo's graph, what is known of its inputs, the compiler's settings, and the versions of torch and this
    library: the same in every process, with no rank and no address in it."""
    about = (torch.__version__, library_key(), repr(sorted(settings.items())), str(torch.is_grad_enabled()))
    return _digest(*about, _text(gm), *map(_fact, inputs))


def _digest(*texts: str) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", "\0".join(texts))  # where Python keeps an object
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(gm: GraphModule) -> str:
    parts = [part for part in gm.modules() if isinstance(part, GraphModule)]
    policies = [getattr(part.meta.get("_checkpoint_context_fn"), "cache_hash", "") for part in parts]  # of `remat`
    return "\n".join(f"{part.code}{policy}" for part, policy in zip(parts, policies, strict=True))


def _fact(value: Any) -> str:
    """The properties of one input that a compiled program depends on, as text."""
    if isinstance(value, DTensor):
        facts = (form_of(value.layout).text, tuple(value.shape), value.stride(), value.requires_grad)
        return f"{facts} {_fact(value._local)}"
    if isinstance(value, Tensor):
        stride = value.stride() if value.layout is torch.strided else ()
        return f"{value.dtype} {tuple(value.shape)} {stride} {value.device.type} {value.layout} {value.requires_grad}"
    return str(value) if isinstance(value, int | float | bool | str | torch.SymInt | torch.SymFloat) else type(value).__name__
