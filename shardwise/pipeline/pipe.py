"""`pipeline`: modules as the stages of a pipeline along an axis of a mesh."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.argument_checks import a_function, a_module, choice, flag, number, optional, several
from ..comm import PerRank, transport
from ..errors import PipelineError
from ..layouts.from_placements import Placements, by_axis
from ..layouts.mesh import Mesh
from ..tensor.distribute import distribute
from ..tensor.dtensor import DTensor, from_shards
from ..tensor.gradients import deferred_gradients
from .link import Contract, StageLink, announce
from .run import BatchRun, Stage, check_same, is_here
from .schedule import Schedule, forwards, make_schedule
from .stage import Split, check_apart, onto, put_on_mesh
from .timeline import Span, Timeline

#: The divisor of each microbatch's loss, given their number, so that the losses add up to that of the batch.
_SCALES: dict[str, Callable[[int], int]] = {"mean": lambda count: count, "sum": lambda count: 1}
#: How many kinds of inputs are remembered, with the contracts of the stages for them.
_REMEMBERED = 256


def pipeline(
    stages: Sequence[nn.Module],
    mesh: Mesh | Any,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    placements: Placements | None = None,
    compile: bool | str = False,
) -> Pipeline:
    """Modules, each of which takes what the one before it gives, as the stages of a pipeline along an axis of a mesh.

    Stage i lives on `mesh["pp"].at(i)`, the ranks at coordinate i of the axis. What of it is already distributed over that mesh
    stays so, the rest is replicated there; the other ranks hold none of it. Its parameters are replaced: make optimizers later.

    schedule      "gpipe", "1f1b", or a `Schedule` of your own
    microbatches  into how many equal parts a batch is split along dim 0 (by default, one for each stage)
    placements    how batches that are plain tensors lie on the meshes of the first and last stage, as {"dp": Shard(0)}
    compile       compile each stage, as one graph, by torch.compile; a text names the backend. Stages may also come compiled

    >>> import shardwise as sw
    >>> mesh = sw.init_mesh(pp=2)
    >>> pipe = pipeline([nn.Linear(4, 8), nn.Linear(8, 2)], mesh["pp"], microbatches=4)
    >>> x, y = torch.randn(8, 4), torch.randn(8, 2)
    >>> pipe.step(x, target=y, loss=nn.functional.mse_loss)
    DTensor(f32[], mesh=(pp=2))
    >>> pipe.stages[1].weight.grad
    DTensor(f32[2, 8], mesh=(pp=1))
    """
    for stage in several(stages, "pipeline: stages", "several modules"):
        a_module(stage, "pipeline: each of stages")
    if isinstance(compile, str):
        choice(compile, "pipeline: compile (or it is True or False)", torch.compiler.list_backends(()))
    else:
        flag(compile, "pipeline: compile (or it is the name of a backend)")
    along, backend = Mesh.from_torch(mesh), compile if isinstance(compile, str) else "inductor"
    _check_stages(stages, along, placements)
    calls = [torch.compile(stage, backend=backend, fullgraph=True) if compile else stage for stage in stages]
    return Pipeline(stages, calls, along, make_schedule(schedule, len(stages), microbatches), placements)


def _check_stages(stages: Sequence[nn.Module], mesh: Mesh, placements: Placements | None) -> None:
    axis = mesh.named(None)
    if len(stages) != mesh.axis_sizes[axis]:
        raise PipelineError(
            f"axis {axis!r} of mesh {mesh.root} has {mesh.axis_sizes[axis]} coordinates and takes as many stages, "
            f"got {len(stages)} stages"
        )
    if not is_here(mesh.root):
        raise PipelineError(
            f"this rank is none of the {len(mesh.ranks)} ranks of mesh {mesh.root}, and has no stage: guard the code with "
            "`if mesh.coordinate(rank) is not None`"
        )
    check_apart(stages)
    if placements is not None:
        for end in (0, len(stages) - 1):
            by_axis(mesh.at(end), placements)


class Pipeline(nn.Module):
    """Stages on the ranks along an axis of a mesh; made by `pipeline`. A module: its parameters are those of all stages.

    >>> import shardwise as sw
    >>> pipe = pipeline([nn.Linear(4, 8), nn.Linear(8, 2)], sw.init_mesh(pp=2)["pp"], "gpipe", 3)
    >>> print(pipe.schedule)
    stage 0  F0 F1 F2 .  .  B0 B1 B2
    stage 1  .  F0 F1 F2 B0 B1 B2 .
    """

    def __init__(self, stages: Sequence[nn.Module], calls: list[Any], mesh: Mesh, schedule: Schedule, placements: Any) -> None:
        super().__init__()
        self.mesh, self.schedule, self.placements = mesh, schedule, placements
        self.stages = nn.ModuleList(stages)
        # Calls stand beside the modules, not in their place: names of parameters stay what they are.
        each = enumerate(zip(stages, calls, strict=True))
        self._stages = [Stage(i, module, call, mesh.at(i), is_here(mesh.at(i))) for i, (module, call) in each]
        self._links = [StageLink.between(mesh, index) for index in range(len(stages) - 1)]
        self._contracts: dict[Any, dict[int, Contract]] = {}
        self._results: dict[Any, tuple[Any, Any, Contract]] = {}
        self._recorded: list[Span] | None = None
        self._blanks: dict[nn.Parameter, Tensor] = {}
        #: for each stage, how many microbatches this process held at most in the last step
        self.most_held: tuple[int, ...] = ()
        for stage in self._stages:
            transport(stage.mesh).ready(stage.mesh)
            put_on_mesh(stage.module, stage.mesh, stage.index)

    # ── training and evaluating ───────────────────────────────────────────────────────────────────────────────────────

    def step(
        self, *inputs: Any, target: Any = None, loss: Callable[..., Tensor] | None = None, reduction: str = "mean"
    ) -> DTensor:
        """The loss of a batch, on every rank; gradients are then as after its `backward()` on one device.

        `loss(output, target)` is called for each microbatch (`loss(output)` without a target; without `loss`, the last stage
        gives it). Microbatches are equal, so the mean of their losses is that of the batch if `loss` is a mean over rows, all
        of the same weight; where it is a sum, say `reduction="sum"`.
        """
        choice(reduction, "Pipeline.step: reduction", _SCALES)
        optional(a_function, loss, "Pipeline.step: loss")
        first, last = (onto(value, self._stages[at].mesh, self.placements) for value, at in ((inputs, 0), (target, -1)))
        split = Split((first, last), self.schedule.microbatches)
        targets, scale = split.parts(last), _SCALES[reduction](split.microbatches)

        def finish(out: Any, microbatch: int) -> Tensor:
            found = out if loss is None else loss(out) if target is None else loss(out, targets[microbatch])
            if not isinstance(found, Tensor) or found.ndim:
                raise PipelineError(f"the loss of a microbatch is a tensor without dims, got {found!r}")
            return found / scale

        with deferred_gradients(self.own_parameters()), torch.enable_grad():
            total = self._run(self.schedule, split.parts(first), finish, lambda results: torch.stack(results).sum(), loss)
        # Parameters of other ranks' stages get gradients without data, so that the same program runs on every rank.
        own = set(self.own_parameters())
        for p in self.parameters():
            if p.requires_grad and p.grad is None and p not in own:
                p.grad = self._blanks[p] if p in self._blanks else self._blanks.setdefault(p, torch.zeros_like(p))
        return total.redistribute(self.mesh.root)

    def forward(self, *inputs: Any) -> Any:
        """What the last stage gives for a batch, without gradients: on the last stage's mesh, shapes on the other ranks."""
        first = onto(inputs, self._stages[0].mesh, self.placements)
        split = Split(first, self.schedule.microbatches)
        table = forwards(len(self.stages), split.microbatches)
        with torch.no_grad():
            return self._run(table, split.parts(first), lambda out, _: out, split.join)

    def _run(self, table: Schedule, batches: list[Any], finish: Any, join: Callable[[Any], Any], loss: Any = None) -> Any:
        """`join` of all microbatches' results, on the last stage's mesh; without data on other ranks."""
        inputs = Contract.of(batches[0])[0].filled(lambda spec: spec.layout.write())
        casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        key = repr((inputs, torch.is_grad_enabled(), [stage.training for stage in self.stages], casts))
        contracts = _remembered(self._contracts, key, dict)  # of earlier batches like this one
        run, last = BatchRun(self._stages, self._links, batches, contracts, finish), self._stages[-1]
        run.through(table, self._clock, self.mesh.root)
        if self._recorded is not None:
            self._recorded += run.spans
        self.most_held = tuple(run.most_held)
        with torch.no_grad():
            result = join(run.results) if last.here else None
        own = None if result is None else Contract.of(result)[0]
        # By identity; both are held, so that no other object gets their id. Every rank has seen the same functions before.
        pair = (id(contracts), id(loss))
        *_, known = _remembered(self._results, pair, lambda: (contracts, loss, announce(own, self.mesh, last.index)))
        if own is not None:
            check_same(last.index, own, known)
        if last.here:
            return result
        return known.filled(lambda spec: from_shards(torch.empty(0, dtype=spec.layout.dtype), spec.layout))

    def _clock(self) -> float:
        """The time, once the device has finished its work; 0 where nobody records."""
        if self._recorded is None:
            return 0.0
        if not self.mesh.device.startswith("cpu"):
            torch.accelerator.synchronize()
        return time.time()

    # ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of stages that this rank is in: an optimizer over these does no work on the shapes of others."""
        for stage in self._stages:
            yield from stage.module.parameters() if stage.here else ()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> DTensor:
        """Scale the gradients of all stages so that their norm together is at most `max_norm`; gives the norm before."""
        number(max_norm, "Pipeline.clip_grad_norm_: max_norm", least=0.0)
        number(norm_type, "Pipeline.clip_grad_norm_: norm_type", above=0.0)
        total: Any = torch.linalg.vector_norm(torch.stack([self._norm(stage, norm_type) for stage in self._stages]), norm_type)
        for stage in self._stages:
            there = total.redistribute(stage.mesh)
            if stage.here:
                nn.utils.clip_grads_with_norm_(stage.module.parameters(), max_norm, there)
        return total

    def _norm(self, stage: Stage, norm_type: float) -> Tensor:
        """The norm of a stage's gradients, on all ranks; its dtype follows from the parameters, which all ranks know."""
        parameters = list(stage.module.parameters())
        kind = functools.reduce(torch.promote_types, [p.dtype for p in parameters], torch.float32)
        norm: Any = distribute(torch.zeros((), dtype=kind, device=stage.mesh.device), stage.mesh, None, None)
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads and stage.here:
            norm = nn.utils.get_total_norm(grads, norm_type).to(kind)
        return norm.redistribute(self.mesh.root)

    # ── how long it takes ─────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Note when each entry of the steps inside starts and ends; on all ranks alike, `timeline` tells it afterwards."""
        recording, self._recorded = Recording(), []
        try:
            yield recording
            recording.timeline = _gathered(self._recorded, self.mesh)
        finally:
            self._recorded = None


def _remembered(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The entry of a key, made if it is missing; the oldest is dropped when there are many, on every rank the same."""
    if key not in known:
        if len(known) >= _REMEMBERED:
            del known[next(iter(known))]
        known[key] = make()
    return known[key]


class Recording:
    """The result of `Pipeline.record`: a timeline with a row for each rank, once the block has ended."""

    timeline: Timeline


def _gathered(spans: Sequence[Span], along: Mesh) -> Timeline:
    """The spans of all ranks: clocks of ranks on several machines have to agree."""
    root = along.root
    world = transport(root, "pipeline")

    def numbers(stage: int) -> Tensor:
        own = [("FB".index(kind), j, start, end) for row, kind, j, start, end in spans if row == stage]
        return torch.tensor(own, dtype=torch.float64, device=root.device).reshape(1, -1, 4)

    rows = world.each(numbers, root, PerRank(lambda place: along.coordinates[place][0]))
    table = world.plain(world.all_gather(rows, root, root.axes)).tolist()
    names = [f"rank {rank}, stage {at}" for rank, (at,) in zip(root.ranks, along.coordinates, strict=True)]
    found = [Span(at, "FB"[int(kind)], int(j), *times) for at, several in enumerate(table) for kind, j, *times in several]
    return Timeline(tuple(names), tuple(found))
