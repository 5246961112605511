"""`BatchRun`: runs one batch through the stages of a pipeline in the order of a schedule.

The loop is the same on every rank. An entry runs on the ranks of its stage; after each tick, neighbours send each other the
results of that tick. Sends do not wait, and received tensors are waited for when an entry needs them, so each rank goes through
its row at its own pace; ranks communicate in the order of ticks.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.tensors import tree_leaves, tree_map_only
from ..comm import transport
from ..errors import PipelineError
from ..layouts.mesh import Mesh
from ..p2p import wait
from ..random.keys import reseed
from ..tensor.distribute import distribute
from ..tensor.dtensor import DTensor
from ..tensor.toolbox import key_on
from .link import Contract, Outgoing, OutputSpec, StageLink, announce
from .schedule import Cell, Schedule
from .timeline import Span


@dataclass(frozen=True, slots=True)
class Stage:
    """A module and what calls it, the mesh of its ranks, and whether this rank is one of them."""

    index: int
    module: nn.Module
    call: Callable[..., Any]
    mesh: Mesh
    here: bool


class BatchRun:
    """One batch on its way through the stages.

    contracts  the outputs of each stage for inputs like these; filled in when they are known
    finish     a function of the last stage's result and the number of the microbatch (the loss, say)
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        links: Sequence[StageLink],
        batches: Sequence[Any],
        contracts: dict[int, Contract],
        finish: Callable[[Any, int], Any],
    ) -> None:
        self.stages, self.links, self.batches, self.contracts, self.finish = stages, links, batches, contracts, finish
        self.backward = torch.is_grad_enabled()
        self.results: list[Any] = [None] * len(batches)
        # By stage and microbatch, the inputs and outputs through which gradients flow: a stage holds them for its backward.
        self.held: dict[tuple[int, int], tuple[list[DTensor], list[DTensor]]] = {}
        self.spans: list[Span] = []
        self.most_held = [0] * len(stages)
        # Results of this tick, tensors that are being received, and tensors that were sent in the last ticks.
        self._made: dict[tuple[str, int], tuple[Contract | None, list[DTensor]]] = {}
        self._coming: dict[tuple[str, int, int], list[Tensor]] = {}
        self._sent: deque[list[Tensor]] = deque()

    def through(self, table: Schedule, clock: Callable[[], float], whole: Mesh) -> None:
        """Run a schedule; `whole` is the mesh of all stages."""
        with _seeds(whole) as seed:
            for column in table.columns:
                for stage, cell in zip(self.stages, column, strict=True):
                    if cell is not None and stage.here:
                        self._run(stage, cell, seed, clock)
                self._sent.append([])
                for index, link in enumerate(self.links):
                    if is_here(link.mesh):
                        self._exchange(index, column[index], column[index + 1])
                self._made.clear()
                self._let_go(len(self.stages))
        self._let_go(0)

    # ── entries ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, stage: Stage, cell: Any, seed: Callable[[int, int], None], clock: Callable[[], float]) -> None:
        enter, work = (self._arguments, self._forward) if cell.kind == "F" else (self._gradients, self._backward)
        given = enter(stage, cell.microbatch)  # waiting for it is no work
        seed(stage.index, cell.microbatch)
        start = clock()
        try:
            work(stage, cell.microbatch, given)
        except Exception as error:  # the ranks of other stages wait for what this one gives
            whole = stage.mesh.root
            transport(whole).report(error, whole, f"stage {stage.index} of a pipeline", alone=len(self.stages) > 1)
            raise
        self.spans.append(Span(stage.index, cell.kind, cell.microbatch, start, clock()))

    def _arguments(self, stage: Stage, microbatch: int) -> Any:
        """What a stage is called with."""
        if stage.index == 0:
            return self.batches[microbatch]
        link, contract = self.links[stage.index - 1], self.contracts[stage.index - 1]
        shards = iter(self._coming.pop(("F", stage.index, microbatch)))
        value = contract.filled(lambda spec: link.land(next(shards), spec.layout, 1).requires_grad_(spec.flows))
        return value if isinstance(value, tuple) else (value,)

    def _forward(self, stage: Stage, microbatch: int, given: Any) -> None:
        out, last = stage.call(*given), stage.index == len(self.stages) - 1
        out = self.finish(out, microbatch) if last else out
        out = tree_map_only(Tensor, lambda x: x if isinstance(x, DTensor) else distribute(x, stage.mesh, None, None), out)
        if not last:  # nothing partial: the next stage would reduce it for each of its uses
            out = tree_map_only(DTensor, lambda x: x.redistribute(placements=x.layout.reduced()), out)
        contract, outputs = Contract.of(out)
        if last:
            self.results[microbatch] = tree_map_only(Tensor, torch.Tensor.detach, out)
        else:
            check_same(stage.index, contract, self.contracts.get(stage.index, contract))
            self._made["F", stage.index] = contract, outputs
        if self.backward:
            inputs = [x for x in tree_leaves(given) if isinstance(x, DTensor) and x.requires_grad]
            self.held[stage.index, microbatch] = inputs, [x for x in outputs if x.requires_grad]
            count = sum(index == stage.index for index, _ in self.held)
            self.most_held[stage.index] = max(self.most_held[stage.index], count)

    def _gradients(self, stage: Stage, microbatch: int) -> list[DTensor] | None:
        """The gradients of a stage's outputs, from the next stage; None for the last stage."""
        if stage.index == len(self.stages) - 1:
            return None
        link, specs = self.links[stage.index], self.contracts[stage.index].specs(flowing=True)
        shards = self._coming.pop(("B", stage.index, microbatch))
        return [link.land(shard, spec.layout, 0) for shard, spec in zip(shards, specs, strict=True)]

    def _backward(self, stage: Stage, microbatch: int, given: list[DTensor] | None) -> None:
        inputs, outputs = self.held.pop((stage.index, microbatch))
        if outputs:
            torch.autograd.backward(outputs, given)
        found: Any = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        self._made["B", stage.index] = None, found

    # ── what neighbours send each other after a tick ──────────────────────────────────────────────────────────────────

    def _exchange(self, index: int, before: Cell, after: Cell) -> None:
        """Send activations of the stage before a link forward, and gradients of the stage after it back."""
        link, (first, second) = self.links[index], self.stages[index : index + 2]
        forth = back = list[Outgoing]()
        if before is not None and before.kind == "F":
            forth = self._messages("F", first, self._contract(index).specs())
        if after is not None and after.kind == "B":
            back = self._messages("B", second, self._contract(index).specs(flowing=True))
        came, returned = link.exchange(forth, back)
        for kind, cell, tensors, goal in (("F", before, came, second), ("B", after, returned, first)):
            if cell is not None and cell.kind == kind and goal.here:
                self._coming[kind, goal.index, cell.microbatch] = tensors
            else:
                self._sent[-1] += tensors

    def _contract(self, index: int) -> Contract:
        """The outputs of a stage; the first time, it announces them to the next one."""
        if index not in self.contracts:
            self.contracts[index] = announce(self._made.get(("F", index), (None, []))[0], self.links[index].mesh, 0)
        return self.contracts[index]

    def _messages(self, kind: str, stage: Stage, specs: list[OutputSpec]) -> list[Outgoing]:
        """The tensors that a stage sends; without data on ranks that are not in it."""
        made = self._made[kind, stage.index][1] if stage.here else [None] * len(specs)
        return [(x, spec.layout.replace(mesh=stage.mesh)) for x, spec in zip(made, specs, strict=True)]

    def _let_go(self, ticks: int) -> None:
        """Wait for the sends before the last so many ticks: they are done by now, unless a rank is that far behind."""
        while len(self._sent) > ticks:
            for x in self._sent.popleft():
                wait(x)


def is_here(mesh: Mesh) -> bool:
    """Whether this rank is in a mesh."""
    return transport(mesh).place(mesh) >= 0


def check_same(stage: int, given: Contract, known: Contract) -> None:
    """Refuse outputs of a stage that differ from those that other ranks expect."""
    if given != known:
        gives, gave = (contract.filled(lambda spec: spec.layout) for contract in (given, known))
        raise PipelineError(
            f"stage {stage} gives {gives!r}, and gave {gave!r} for inputs of the same shapes: other ranks wait "
            "for that; what a stage gives may depend on the shapes of its inputs, not on values"
        )


@contextlib.contextmanager
def _seeds(mesh: Mesh) -> Iterator[Callable[[int, int], None]]:
    """Seeds for random numbers that depend on stage and microbatch only, not on the order of entries or on the rank; afterwards
    the generator is as after one random call, on every rank."""
    first, second = key_on(mesh)
    after = torch.default_generator.get_state()

    def seed(stage: int, microbatch: int) -> None:
        digest = hashlib.blake2b(f"{first}:{second}:{stage}:{microbatch}".encode(), digest_size=7).digest()
        reseed(int.from_bytes(digest))

    try:
        yield seed
    finally:
        torch.default_generator.set_state(after)
