"""Every public callable, and what it must refuse: bad arguments generated from signatures.

`callables()` reads the public names, `CALLS` gives one right call of each, and every argument of that call is replaced by each
of `VALUES` in turn. A parameter's annotation (or, where that says too little, `NAMED`) says which of these are of its kind; all
others have to be refused by an error of Shardwise that names the parameter, quickly, and before anything is communicated.
"""

from __future__ import annotations

import inspect
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import shardwise as sw
from shardwise import Mesh, Partial, Replicate, Shard, debug, p2p, save
from shardwise.layouts.layout import Factor
from shardwise.package.manifest import Manifest, Slot
from shardwise.pipeline.schedule import gpipe
from shardwise.propagation.table import TABLE

#: Seconds within which a bad argument is refused.
SOON = 1.0


class World:
    """What right calls are made of."""

    def __init__(self, folder: Path) -> None:
        self.mesh = sw.init_mesh(dp=2, tp=2)
        self.row = sw.init_mesh(pp=4)
        other = "simulated" if self.mesh.world == "processes" else "processes"
        self.elsewhere = Mesh(("z",), (2,), range(2), "cpu", other)
        self.x = sw.distribute_tensor(torch.arange(32.0).view(8, 4), self.mesh, [Shard(0), Replicate()])
        self.line = sw.distribute_tensor(torch.arange(8.0), self.row, [Shard(0)])
        self.layout = sw.layout((8, 4), self.mesh, [Shard(0), Replicate()])
        self.want = sw.layout((8, 4), self.mesh, [Replicate(), Shard(1)])
        self.heads = sw.ones(1, 2, 8, 4, mesh=self.row, placements=[Shard(2)])
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.pipe = sw.pipeline([nn.Linear(2, 2) for _ in range(4)], self.row, microbatches=2)
        self.schedule = gpipe(2, 2)
        slot = Slot("weight", self.layout, (4, 4), (4, 1), torch.float32, "cpu")
        nothing = '[1, {"type": null, "context": null, "children_spec": []}]'
        self.package = sw.Package(Manifest({}, (slot,), (), nothing, (), (), nothing, ()), None, self.mesh)


# ── the public surface ────────────────────────────────────────────────────────────────────────────────────────────────


def callables() -> Iterator[str]:
    """The names of the public functions and classes, and of the public methods of these, that take arguments."""
    for prefix, module in (("", sw), ("debug.", debug), ("p2p.", p2p), ("save.", save)):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and not issubclass(value, Exception):
                yield from _of_class(f"{prefix}{name}", value)
            elif isinstance(value, types.FunctionType) and inspect.signature(value).parameters:
                yield f"{prefix}{name}"


def _of_class(name: str, cls: type) -> Iterator[str]:
    if "__init__" in vars(cls) or "__new__" in vars(cls):
        yield from [name] if inspect.signature(cls).parameters else []
    for method, value in vars(cls).items():
        inner = getattr(value, "__func__", value)
        named = not method.startswith("_") or method == "__getitem__"
        if named and callable(inner) and not isinstance(inner, type):
            taken = len(inspect.signature(inner).parameters) - (not isinstance(value, staticmethod))
            yield from [f"{name}.{method}"] if taken else []


@torch.library.custom_op("arguments::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def unruled() -> str:
    """An operator of the user's that has no rule."""
    TABLE.pop("arguments.twice.default", None)
    return "arguments::twice"


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return function, args, kwargs


def spread(x: Any = None, *rest: Any, **more: Any) -> Any:
    return x.relu() if isinstance(x, torch.Tensor) else x


def loss(out: torch.Tensor, *rest: Any) -> torch.Tensor:
    return out.sum()


class Anything:
    """A class that takes anything."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


#: One right call of every public callable that takes arguments.
CALLS: dict[str, Callable[[World], tuple[Any, ...]]] = {
    "Bundle": lambda w: call(sw.Bundle, [torch.ones(2)] * 4, requires_grad=False, stride=None),
    "DTensor.from_local": lambda w: call(
        sw.DTensor.from_local, w.x.to_local(), w.mesh, [Shard(0), Replicate()], shape=(8, 4), stride=(4, 1)
    ),
    "DTensor.to_local": lambda w: call(w.x.to_local, grad_placements=[Shard(0), Replicate()]),
    "DTensor.redistribute": lambda w: call(w.x.redistribute, w.mesh, [Replicate(), Shard(0)], max_bytes=2**20),
    "DTensor.full_tensor": lambda w: call(w.x.full_tensor, grad_placements=[Partial(), Replicate()]),
    "DTensor.numpy": lambda w: call(w.x.numpy, force=True),
    "DTensor.requires_grad_": lambda w: call(w.x.detach().requires_grad_, True),
    "Layout.of": lambda w: call(sw.Layout.of, w.mesh, [[Factor(8, ("dp",), (4, 4))]], [("tp", "sum")], torch.float32, (1,)),
    "Layout.replace": lambda w: call(w.layout.replace, dtype=torch.float64),
    "Layout.without": lambda w: call(w.layout.without, ["dp"]),
    "Layout.axes_of": lambda w: call(w.layout.axes_of, 0),
    "Layout.local_shape": lambda w: call(w.layout.local_shape, 0),
    "Layout.runs": lambda w: call(w.layout.runs, 0, 0),
    "Layout.offset": lambda w: call(w.layout.offset, 0),
    "Layout.held": lambda w: call(w.layout.held, 0),
    "Layout.read": lambda w: call(sw.Layout.read, w.layout.write()),
    "Mesh": lambda w: call(Mesh, ("a", "b"), (2, 2), range(4), "cpu", "simulated", None, ("a",), "auto"),
    "Mesh.__getitem__": lambda w: call(w.mesh.__getitem__, "dp"),
    "Mesh.from_torch": lambda w: call(Mesh.from_torch, w.mesh),
    "Mesh.read": lambda w: call(Mesh.read, w.mesh.text),
    "Mesh.size": lambda w: call(w.mesh.size, "dp"),
    "Mesh.named": lambda w: call(w.mesh.named, "dp"),
    "Mesh.alias": lambda w: call(w.mesh.alias, ("dp",)),
    "Mesh.flatten": lambda w: call(w.mesh.flatten, "dp", "tp"),
    "Mesh.at": lambda w: call(w.row.at, 1),
    "Mesh.usable": lambda w: call(w.mesh.usable, ("dp", "tp")),
    "Mesh.size_of": lambda w: call(w.mesh.size_of, "dp"),
    "Mesh.place": lambda w: call(w.mesh.place, 0),
    "Mesh.coordinate": lambda w: call(w.mesh.coordinate, 0),
    "Mesh.peers": lambda w: call(w.mesh.peers, 0, ("dp",)),
    "Mesh.get_group": lambda w: call(w.mesh.get_group, "dp"),
    "Mesh.get_local_rank": lambda w: call(w.mesh.get_local_rank, "dp"),
    "Mesh.groups": lambda w: call(w.mesh.groups, ("dp",)),
    "Mesh.sorted_axes": lambda w: call(w.mesh.sorted_axes, ("tp", "dp")),
    "Package.bind": lambda w: call(w.package.bind, {"weight": w.x}),
    "Partial": lambda w: call(sw.Partial, "sum"),
    "Pipeline.step": lambda w: call(w.pipe.step, torch.ones(4, 2), loss=loss, reduction="mean"),
    "Pipeline.forward": lambda w: call(w.pipe.forward, torch.ones(4, 2)),
    "Pipeline.clip_grad_norm_": lambda w: call(w.pipe.clip_grad_norm_, 1.0, 2.0),
    "Placement.is_shard": lambda w: call(Shard(0).is_shard, 0),
    "Placement.is_partial": lambda w: call(sw.Partial().is_partial, "sum"),
    "Program": lambda w: call(sw.Program, spread),
    "Schedule": lambda w: call(sw.Schedule, w.schedule.rows),
    "Schedule.read": lambda w: call(sw.Schedule.read, "F0 .  .  B0", ".  F0 B0 ."),
    "Schedule.bubble": lambda w: call(w.schedule.bubble, 1.0, 2.0),
    "Schedule.timeline": lambda w: call(w.schedule.timeline, 1.0, 2.0),
    "Schedule.draw": lambda w: call(w.schedule.draw, 2.0, 96),
    "Schedule.svg": lambda w: call(w.schedule.svg, w.folder / "picture.svg", 2.0),
    "Shard": lambda w: call(Shard, 0, (4, 4)),
    "StridedShard": lambda w: call(sw.StridedShard, 0, "_*4@tp", split_factor=1),
    "cache_clear": lambda w: call(sw.cache_clear, "plans"),
    "calibrate": lambda w: call(sw.calibrate, w.mesh),
    "capture": lambda w: call(sw.capture, spread),
    "communication": lambda w: call(sw.communication, "forbid", over_bytes=10),
    "compile": lambda w: call(sw.compile, spread, timeout=10.0, fullgraph=True),
    "debug.visualize_sharding": lambda w: call(debug.visualize_sharding, w.x, "", False),
    "debug_mode": lambda w: call(sw.debug_mode, 10.0, True),
    "distribute_module": lambda w: call(sw.distribute_module, nn.Linear(4, 4), w.mesh),
    "distribute_tensor": lambda w: call(sw.distribute_tensor, torch.ones(8, 4), w.mesh, [Shard(0), Replicate()]),
    "each_rank": lambda w: call(sw.each_rank, spread, w.x.to_local()),
    "empty": lambda w: call(sw.empty, 8, 4, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.float32),
    "export": lambda w: call(sw.export, spread, (w.x,), w.mesh, w.folder / "model.pt2", kwargs={}, options={}),
    "full": lambda w: call(sw.full, (8, 4), 1.0, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.float32),
    "grouped_mm": lambda w: call(
        sw.grouped_mm, torch.ones(3, 2), torch.ones(2, 2, 2), offs=torch.tensor([1, 3], dtype=torch.int32)
    ),
    "init_device_mesh": lambda w: call(sw.init_device_mesh, "cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    "init_mesh": lambda w: call(sw.init_mesh, device="cpu", ranks=range(4), slow="dp", groups="auto", dp=2, tp=2),
    "int_pow": lambda w: call(sw.int_pow, torch.tensor([2]), 3),
    "layout": lambda w: call(sw.layout, (8, 4), w.mesh, [Shard(0), Replicate()], torch.float32, (4, 1)),
    "load_artifacts": lambda w: call(sw.load_artifacts, w.folder / "missing", w.mesh),
    "load_package": lambda w: call(sw.load_package, w.folder / "missing", {}, w.mesh),
    "ones": lambda w: call(sw.ones, 8, 4, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.float32),
    "p2p.P2POp": lambda w: call(p2p.P2POp, torch.distributed.isend, torch.ones(2), 0, None, 0),
    "p2p.all_to_all_v": lambda w: call(p2p.all_to_all_v, w.heads.to_local().flatten(), [4, 4, 4, 4], mesh=w.row, axis="pp"),
    "p2p.batch": lambda w: call(
        p2p.batch, [p2p.send(torch.ones(2), mesh=w.row, shift=1), p2p.recv((2,), mesh=w.row, shift=-1)]
    ),
    "p2p.batch_isend_irecv": lambda w: call(p2p.batch_isend_irecv, [p2p.P2POp(torch.distributed.isend, torch.ones(2), 0)]),
    "p2p.halo_exchange": lambda w: call(p2p.halo_exchange, w.line, 0, 1, 1, mesh=w.row, axis="pp", wrap=False),
    "p2p.peer": lambda w: call(p2p.peer, w.row, "pp", shift=1, wrap=True),
    "p2p.permute": lambda w: call(p2p.permute, w.line, [1, 2, 3, 0], mesh=w.row, axis="pp"),
    "p2p.recv": lambda w: call(p2p.recv, (2,), torch.float32, None, requires_grad=False, mesh=w.row, shift=1),
    "p2p.send": lambda w: call(p2p.send, torch.ones(2), None, mesh=w.row, shift=1),
    "p2p.shift": lambda w: call(p2p.shift, w.line, 1, mesh=w.row, axis="pp", wrap=True),
    "p2p.wait": lambda w: call(p2p.wait, torch.ones(2)),
    "pipeline": lambda w: call(sw.pipeline, [nn.Linear(2, 2) for _ in range(4)], w.row, "1f1b", 4, None, False),
    "plan": lambda w: call(sw.plan, w.layout, w.want, 2**20, ("exchange",)),
    "rand": lambda w: call(sw.rand, 8, 4, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.float32),
    "randint": lambda w: call(sw.randint, 0, 9, (8, 4), mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.int64),
    "randn": lambda w: call(sw.randn, 8, 4, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.float32),
    "randperm": lambda w: call(sw.randperm, 8, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.int64),
    "relabel": lambda w: call(sw.relabel, w.row, (w.line, [Shard(0)]), among=range(4)),
    "remat": lambda w: call(sw.remat, spread, torch.ones(2), save=save.matmuls),
    "remat_module": lambda w: call(sw.remat_module, w.model, "0", save.matmuls),
    "ring_attention": lambda w: call(sw.ring_attention, w.heads, w.heads, w.heads, is_causal=True, scale=0.5, enable_gqa=False),
    "rule": lambda w: call(sw.rule, unruled(), "... -> ...", samples=[(torch.ones(3, 2),)], linear=((0,),)),
    "save_artifacts": lambda w: call(sw.save_artifacts, w.folder / "programs", timeout=10.0),
    "save.by": lambda w: call(save.by, spread),
    "save.operators": lambda w: call(save.operators, torch.ops.aten.mm, "aten.sin"),
    "save.regions": lambda w: call(save.regions, "blocks.*"),
    "save.up_to": lambda w: call(save.up_to, 1024),
    "simulate": lambda w: call(sw.simulate, 4),
    "zeros": lambda w: call(sw.zeros, 8, 4, mesh=w.mesh, placements=[Shard(0), Replicate()], dtype=torch.float32),
}

#: How a text calls a parameter, where not by its name.
SAID = {"grad_placements": "placements", "mesh_dim": "axis", "mesh_shape": "axis"}
#: Those that nobody calls, and why.
NOT_CALLED = {
    **{f"DTensor.{name}": "refused whatever is given" for name in ("apply_", "map_", "map2_", "share_memory_", "storage")},
    "Layout.interval": "for kernels, which go through the factors of a layout",
    "Layout.shard": "for kernels, which go through the factors of a layout",
    "Layout.shard_at": "so is this",
    "Package": "made by load_package",
    "Pipeline": "made by pipeline",
    "p2p.Peer": "a record, made by p2p.peer and checked by p2p.batch",
    "p2p.Receive": "a record, made by p2p.recv and checked by p2p.batch",
    "p2p.Send": "a record, made by p2p.send and checked by p2p.batch",
    "save.Choice": "an enum of Python's",
    "save.Made": "a record, made by remat for each operator that a block calls",
    "save.Policy.choose": "called by remat, for each operator that a block calls",
}

# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────────

VALUES: dict[str, Callable[[World], Any]] = {
    "None": lambda w: None,
    "a text": lambda w: "nope",
    "an empty text": lambda w: "",
    "a dtype as text": lambda w: "float32",
    "-1": lambda w: -1,
    "0": lambda w: 0,
    "10**9": lambda w: 10**9,
    "2**31": lambda w: 2**31,
    "2**63": lambda w: 2**63,
    "2.5": lambda w: 2.5,
    "-0.5": lambda w: -0.5,
    "nan": lambda w: float("nan"),
    "inf": lambda w: float("inf"),
    "True": lambda w: True,
    "an object": lambda w: object(),
    "a function": lambda w: spread,
    "a class": lambda w: Anything,
    "nothing in a list": lambda w: [],
    "a text in a list": lambda w: ["nope"],
    "-1 in a list": lambda w: [-1],
    "2.5 in a list": lambda w: [2.5],
    "None in a tuple": lambda w: (None,),
    "2**63 in a tuple": lambda w: (2**63, 2**63),
    "a generator": lambda w: (n for n in [1]),
    "a dict": lambda w: {"nope": 1},
    "a tensor": lambda w: torch.ones(3),
    "a DTensor": lambda w: w.x,
    "a layout": lambda w: w.layout,
    "a mesh of another world": lambda w: w.elsewhere,
    "a dtype": lambda w: torch.complex64,
    "a placement": lambda w: Shard(7),
    "a module": lambda w: nn.Identity(),
    "a folder": lambda w: w.folder,
    "a file that is not there": lambda w: w.folder / "nowhere" / "file",
}

TEXTS = {"a text", "an empty text", "a dtype as text"}
WHOLE = {"-1", "0", "10**9", "2**31", "2**63"}
REAL = {"2.5", "-0.5", "nan", "inf"}
LISTS = {"nothing in a list", "a text in a list", "-1 in a list", "2.5 in a list", "None in a tuple", "2**63 in a tuple"}
TENSORS = {"a tensor", "a DTensor"}
#: What may be taken, or refused for another reason, as a value of a kind; all else has to be refused.
KINDS: dict[str, set[str]] = {
    "integer": WHOLE,
    "natural": WHOLE - {"-1"},
    "positive": WHOLE - {"-1", "0"},
    "dim": {"-1", "0"},  # of a tensor with dims
    "place": {"0"},
    "number": WHOLE | REAL - {"nan"},
    "span": WHOLE - {"-1", "0"} | {"2.5", "inf"},  # of time
    "any-number": WHOLE | REAL | {"True"},
    "flag": {"True"},
    "text": TEXTS,
    "name": set(),  # one of a few texts
    "axis": set(),
    "axes": {"nothing in a list"},
    "sizes": {"nothing in a list", "a generator"},
    "integers": {"nothing in a list", "-1 in a list", "2**63 in a tuple", "a generator"},
    "dtype": {"a dtype"},
    "device": set(),
    "tensor": TENSORS,
    "dtensor": {"a DTensor"},
    "layout": {"a layout"},
    "mesh": {"a mesh of another world"},
    "placements": {"nothing in a list", "a placement", "a layout"},
    "function": {"a function", "a class", "a module"},
    "module": {"a module"},
    "path": TEXTS | {"a folder", "a file that is not there"},
    "policy": set(),
    "cost": WHOLE - {"-1"} | {"2.5", "inf"},
    "own": set(),  # of a kind that no value here is of
    "list": LISTS | {"a generator"},
    "dict": {"a dict"},
    "anything": set(VALUES),
    "None": {"None"},
}

#: What a part of an annotation says.
ANNOTATED = {
    "None": "None",
    "int": "integer",
    "bool": "flag",
    "float": "number",
    "str": "text",
    "torch.dtype": "dtype",
    "Tensor": "tensor",
    "Layout": "layout",
    "Mesh": "mesh",
    "Placements": "placements",
    "Sequence[int]": "integers",
    "Iterable[int]": "integers",
    "Iterable[str]": "axes",
    "tuple[int, ...]": "integers",
    "tuple[str, ...]": "axes",
    "nn.Module": "module",
    "Policy": "policy",
    "Path": "path",
    "os.PathLike[str]": "path",
    "dict[str, Any]": "dict",
    "Mapping[str, Any]": "dict",
}
#: What the name of a parameter says besides, for all callables or for one.
NAMED = {
    "size": "sizes natural",
    "shape": "sizes",
    "mesh": "mesh",
    "dim": "dim",
    "place": "place",
    "axis": "axis",
    "timeout": "span",
    "max_bytes": "natural",
    "over_bytes": "natural",
    "device": "device",
    "groups": "name",
    "function": "function",
    "path": "path",
    "shards": "own",
    "Mesh.__getitem__:axes": "axes axis",
    "Mesh.size:axis": "axis dim",
    "Mesh:of": "None",
    "Mesh:device": "device",
    "world": "name",
    "dtensor": "dtensor",
    "Bundle:stride": "integers None",
    "dims": "own",
    "partials": "axes",
    "changes": "dtype",
    "factor": "own",
    "point": "own",
    "device_mesh": "mesh",
    "layout": "own",
    "device_type": "device",
    "mesh_shape": "sizes",
    "mesh_dim_names": "axes None",
    "StridedShard:dim": "integer",
    "StridedShard:parts": "text",
    "StridedShard:split_factor": "positive",
    "partition_fn": "function None",
    "input_fn": "function None",
    "output_fn": "function None",
    "Pipeline.step:inputs": "tensor",
    "Pipeline.forward:inputs": "tensor",
    "target": "anything",
    "loss": "function",
    "rows": "own",
    "forward": "cost",
    "backward": "cost",
    "model": "function",
    "export:model": "function",
    "remat_module:model": "module",
    "options": "dict",
    "compile:options": "flag None",
    "args": "anything",
    "kwargs": "anything",
    "export:kwargs": "dict",
    "example_inputs": "list",
    "fill_value": "any-number",
    "Shard:dim": "integer",
    "Placement.is_shard:dim": "integer",
    "rule:op": "own",
    "p2p.P2POp:op": "own",
    "group": "own",
    "source": "natural",
    "to": "natural",
    "along": "mesh",
    "going": "tensor integers",
    "ops": "own",
    "p2p_op_list": "own",
    "stages": "own",
    "schedule": "own",
    "moves": "own",
    "samples": "own",
    "words": "own",
}


class Trial(NamedTuple):
    """One call with one argument that is another than in the right call."""

    name: str
    parameter: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}({self.parameter}={self.value})"


def kind_of(name: str, parameter: inspect.Parameter) -> set[str]:
    told = NAMED.get(f"{name}:{parameter.name}")
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "Any")
    parts = set(re.split(r" \| ", text)) - {"Any"} if " | " in text else {text}
    optional = {"None"} if "None" in parts or parameter.default is None else set()
    if told is None and parameter.name in NAMED:
        told = NAMED[parameter.name]
        optional |= {"None"} if parameter.default is None else set()
    if told is not None:
        return set(told.split()) | optional
    found = {ANNOTATED.get(part) for part in parts}
    if None in found:
        raise KeyError(f"{name}: NAMED has to say what {parameter.name}: {text!r} takes")
    return found | optional


def trials() -> Iterator[Trial]:
    for name in CALLS:
        for parameter in signature_of(name).parameters:
            several = (Trial(name, parameter, value) for value in VALUES)
            yield from (trial for trial in several if name not in ONLY_REFUSED or must_be_refused(trial))


@cache
def signature_of(name: str) -> inspect.Signature:
    """The signature of a public callable as it is called: of a method without its first parameter."""
    scope, found = [("debug.", debug), ("p2p.", p2p), ("save.", save), ("", sw)], None
    prefix, module = next((prefix, module) for prefix, module in scope if name.startswith(prefix))
    first, _, method = name.removeprefix(prefix).partition(".")
    found = inspect.signature(getattr(getattr(module, first), method) if method else getattr(module, first))
    own = method and not isinstance(vars(getattr(module, first))[method], staticmethod)
    return found.replace(parameters=list(found.parameters.values())[1:]) if own else found


@cache
def must_be_refused(trial: Trial) -> bool:
    kinds = kind_of(trial.name, signature_of(trial.name).parameters[trial.parameter])
    return trial not in ACCEPTED and not any(trial.value in KINDS[kind] for kind in kinds)


def changed(world: World, trial: Trial) -> tuple[Callable[[], Any], str]:
    """The right call with another argument, and the word for that."""
    function, args, kwargs = CALLS[trial.name](world)
    bound = inspect.signature(function).bind(*args, **kwargs)
    kind, word = bound.signature.parameters[trial.parameter].kind, trial.parameter
    given = VALUES[trial.value](world)
    if kind is inspect.Parameter.VAR_POSITIONAL:
        given = (given,)
    elif kind is inspect.Parameter.VAR_KEYWORD:
        before = bound.arguments.get(trial.parameter, {"more": 0})
        word = next(iter(before))
        given = {**before, word: given}
    bound.arguments[trial.parameter] = given
    return lambda: _entered(function(*bound.args, **bound.kwargs)), word


def _entered(found: Any) -> None:
    """A block checks what it was given when it is entered."""
    if isinstance(found, AbstractContextManager) and not isinstance(found, Mesh):
        with found:
            pass


class Outcome(NamedTuple):
    """What a call did wrong, if anything, and what it raised."""

    trial: Trial
    verdict: str
    text: str


def judge(world: World, trial: Trial) -> Outcome:
    """What becomes of a call; one that took long may have waited for its turn on a busy machine, and is tried again."""
    found = _judged(world, trial)
    return _judged(world, trial) if found.verdict == "slow" else found


def _judged(world: World, trial: Trial) -> Outcome:
    refused = must_be_refused(trial)
    run, word = changed(world, trial)
    verdict, text, start = "", "", time.monotonic()
    with sw.trace_comm() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
            verdict = "taken" if refused else ""
        except sw.ShardwiseError as error:
            text = f"{type(error).__name__}: {error}"
            if refused:
                verdict = "communicated" if log.records else "" if word in text or SAID.get(word, word) in text else "unnamed"
        except Exception as error:
            verdict, text = "raw", f"{type(error).__name__}: {error}"
    slow = time.monotonic() - start > SOON
    return Outcome(trial, "slow" if slow else verdict, text)


#: What is taken though it is of another kind, and why.
ACCEPTED: dict[Trial, str] = {
    Trial("Mesh.peers", "place", "True"): "for Python True is 1, also as a key of a cache",
    **{Trial(f"Layout.{name}", "dim", "True"): "for Python True is 1" for name in ("axes_of", "runs", "held")},
    Trial("Layout.of", "partials", "an empty text"): "there are none in it",
    Trial("Layout.of", "partials", "a DTensor"): "it is refused, after its rows were looked at",
    Trial("Layout.of", "dims", "a DTensor"): "so is this",
    Trial("rule", "words", "nothing in a list"): "linear=[]: an operator that is linear in nothing",
}
#: Those of which no call is right in a world of one process, or without a file that was written before.
NOT_RIGHT_HERE = {"Mesh.get_group", "Mesh.get_local_rank", "load_artifacts", "load_package", "p2p.batch_isend_irecv"}
#: Callables of which only what must be refused is tried, and why.
ONLY_REFUSED = {
    "export": "it compiles what is right",
    "distribute_module": "the functions raise what they like about their arguments",
    "Pipeline.step": "the modules of the stages raise what they like about inputs that are tensors",
    "Pipeline.forward": "so here",
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm"), "it makes what is right"),
}
