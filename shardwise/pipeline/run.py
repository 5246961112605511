"""`Run`: one batch on its way through the stages, as a table says.

The loop is the same text on every rank. An entry runs where the rank is in its stage; after each tick, neighbours send
each other what they made in it. Sends do not wait, and what is received is waited for when an entry needs it, so each rank goes
through its row at its own pace; all ranks that meet, meet in the order of ticks.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tensors import tree_leaves, tree_map_only
from ..comm import transport
from ..errors import PipelineError
from ..layouts.mesh import Mesh
from ..p2p import wait
from ..random.keys import reseed
from ..tensor.distribute import distribute
from ..tensor.dtensor import DTensor, from_shards
from ..tensor.toolbox import key_on
from .link import Contract, Link, Message, Wire, announce
from .schedule import Cell, Schedule
from .timeline import Span


@dataclass(frozen=True, slots=True)
class Stage:
    """What computes, the mesh of its ranks, and whether this rank is one of them."""

    index: int
    call: Callable[..., Any]
    mesh: Mesh
    here: bool


class Held(NamedTuple):
    """What a stage keeps of a microbatch for its backward: the inputs and outputs through which gradients flow."""

    inputs: list[DTensor]
    outputs: list[DTensor]


class Run:
    """One batch on its way.

    contracts  what each stage gives for inputs like these; filled where it is not known yet
    finish     what is made of the last stage's result for a microbatch
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        links: Sequence[Link],
        batches: Sequence[Any],
        contracts: dict[int, Contract],
        finish: Callable[[Any, int], Any],
    ) -> None:
        self.stages, self.links, self.batches, self.contracts, self.finish = stages, links, batches, contracts, finish
        self.backward = torch.is_grad_enabled()
        self.results: list[Any] = [None] * len(batches)
        self.held: dict[tuple[int, int], Held] = {}
        self.spans: list[Span] = []
        self.most_held = [0] * len(stages)
        # What the stages made in this tick, what is on its way to them, and what was sent in the last ticks.
        self._made: dict[tuple[str, int], tuple[Contract | None, list[DTensor]]] = {}
        self._coming: dict[tuple[str, int, int], list[Tensor]] = {}
        self._sent: deque[list[Tensor]] = deque()

    def through(self, table: Schedule, clock: Callable[[], float], whole: Mesh) -> None:
        """Run the table; `whole` is the mesh of all stages."""
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
        value = contract.filled(lambda wire: link.land(next(shards), wire.layout, 1).requires_grad_(wire.flows))
        return value if isinstance(value, tuple) else (value,)

    def _forward(self, stage: Stage, microbatch: int, given: Any) -> None:
        out = stage.call(*given)
        last = stage.index == len(self.stages) - 1
        if last:
            out = tree_map_only(Tensor, lambda x: _on(x, stage.mesh), self.finish(out, microbatch))
            self.results[microbatch] = tree_map_only(Tensor, torch.Tensor.detach, out)
        else:
            out = tree_map_only(Tensor, lambda x: _reduced(_on(x, stage.mesh)), out)
        contract, outputs = Contract.of(out)
        if not last:
            self._agree(stage, contract, outputs)
        if self.backward:
            inputs = [x for x in tree_leaves(given) if isinstance(x, DTensor) and x.requires_grad]
            self.held[stage.index, microbatch] = Held(inputs, [x for x in outputs if x.requires_grad])
            count = sum(index == stage.index for index, _ in self.held)
            self.most_held[stage.index] = max(self.most_held[stage.index], count)

    def _agree(self, stage: Stage, contract: Contract, outputs: list[DTensor]) -> None:
        """Leave what a stage made for the next one, if it is what that one waits for."""
        check_same(stage.index, contract, self.contracts.get(stage.index, contract))
        self._made["F", stage.index] = contract, outputs

    def _gradients(self, stage: Stage, microbatch: int) -> list[DTensor] | None:
        """What came back for the outputs of a stage; nothing for the last."""
        if stage.index == len(self.stages) - 1:
            return None
        link, wires = self.links[stage.index], self.contracts[stage.index].flowing
        shards = self._coming.pop(("B", stage.index, microbatch))
        return [link.land(shard, wire.layout, 0) for shard, wire in zip(shards, wires, strict=True)]

    def _backward(self, stage: Stage, microbatch: int, given: list[DTensor] | None) -> None:
        inputs, outputs = self.held.pop((stage.index, microbatch))
        if outputs:
            torch.autograd.backward(outputs, given)
        found: Any = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        self._made["B", stage.index] = None, found

    # ── what neighbours send each other after a tick ──────────────────────────────────────────────────────────────────

    def _exchange(self, index: int, before: Cell, after: Cell) -> None:
        """Activations of the stage before a link go on, gradients of the stage after it go back."""
        link, (first, second) = self.links[index], self.stages[index : index + 2]
        forth = back = list[Message]()
        if before is not None and before.kind == "F":
            forth = self._messages("F", first, self._contract(index).wires)
        if after is not None and after.kind == "B":
            back = self._messages("B", second, self._contract(index).flowing)
        came, returned = link.exchange(forth, back)
        for kind, cell, tensors, goal in (("F", before, came, second), ("B", after, returned, first)):
            if cell is not None and cell.kind == kind and goal.here:
                self._coming[kind, goal.index, cell.microbatch] = tensors
            else:
                self._sent[-1] += tensors

    def _contract(self, index: int) -> Contract:
        """What a stage gives. The first time, it tells the next one."""
        if index not in self.contracts:
            said, _ = self._made.get(("F", index), (None, []))
            self.contracts[index] = announce(said, self.links[index].mesh, 0)
        return self.contracts[index]

    def _messages(self, kind: str, stage: Stage, wires: list[Wire]) -> list[Message]:
        """What a stage sends; on ranks that are not in it, what it is like."""
        made = self._made[kind, stage.index][1] if stage.here else [None] * len(wires)
        return [Message(x, wire.layout.replace(mesh=stage.mesh)) for x, wire in zip(made, wires, strict=True)]

    def _let_go(self, ticks: int) -> None:
        """Wait for what was sent before the last so many ticks: it was received by now, unless a rank is that far behind."""
        while len(self._sent) > ticks:
            for x in self._sent.popleft():
                wait(x)


def is_here(mesh: Mesh) -> bool:
    """Whether this rank is in a mesh."""
    return transport(mesh).place(mesh) >= 0


def _on(x: Tensor, mesh: Mesh) -> DTensor:
    """A result of a stage as a tensor on its mesh."""
    return x if isinstance(x, DTensor) else distribute(x, mesh, None, None)


def _reduced(x: DTensor) -> DTensor:
    """A tensor with nothing partial: the next stage would reduce it for each of its uses."""
    return x.redistribute(placements=x.layout.reduced())


def check_same(stage: int, given: Contract, known: Contract) -> None:
    """Refuse what other ranks do not expect of a stage."""
    if given != known:
        raise PipelineError(
            f"stage {stage} gives {_shown(given)}, and gave {_shown(known)} for inputs of the same shapes: other ranks wait "
            "for that; what a stage gives may depend on the shapes of its inputs, not on values"
        )


def _shown(contract: Contract) -> str:
    return repr(contract.filled(lambda wire: wire.layout))


# ── the end, and the clock ────────────────────────────────────────────────────────────────────────────────────────────


def spread(result: Any, contract: Contract, mesh: Mesh) -> Any:
    """What the last stage gave, on all ranks: outside its mesh, shapes."""
    if is_here(mesh):
        return result
    return contract.filled(lambda wire: from_shards(torch.empty(0, dtype=wire.layout.dtype), wire.layout))


@contextlib.contextmanager
def _seeds(mesh: Mesh) -> Iterator[Callable[[int, int], None]]:
    """Random numbers that depend on the stage and the microbatch, not on the order of entries or on who runs them; afterwards
    the generator is as if one random call had been made, on every rank."""
    first, second = key_on(mesh)
    after = torch.default_generator.get_state()

    def seed(stage: int, microbatch: int) -> None:
        digest = hashlib.blake2b(f"{first}:{second}:{stage}:{microbatch}".encode(), digest_size=7).digest()
        reseed(int.from_bytes(digest))

    try:
        yield seed
    finally:
        torch.default_generator.set_state(after)


def synchronised(device: str) -> Callable[[], float]:
    """A clock that waits for what a device still computes."""
    if device.startswith("cpu"):
        return time.time

    def now() -> float:
        torch.accelerator.synchronize()
        return time.time()

    return now
