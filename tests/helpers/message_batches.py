"""Batches of messages drawn at random, as data: what each place sends, to whom, and what must arrive, forward and backward.

What must arrive is found by looking at routes place by place, and not by Shardwise. The same letters are run in a simulated
world and on processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise import Mesh, p2p

DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@dataclass(frozen=True)
class Letter:
    """One send of every place with its receive: `goals[i]` is where place i sends, -1: nowhere; and how both are said."""

    goals: tuple[int, ...]
    shards: tuple[Tensor, ...]
    shapes: Any
    dtype: torch.dtype
    to: dict[str, Any]
    source: dict[str, Any]

    def arrives(self, place: int) -> Tensor:
        """What a place receives."""
        if place in self.goals:
            return self.shards[self.goals.index(place)]
        shape = self.shapes[place] if isinstance(self.shapes, list) else self.shapes
        return torch.zeros(shape, dtype=self.dtype)

    def operations(self, x: Tensor, mesh: Mesh) -> tuple[Any, Any]:
        """The send and the receive of a local value."""
        return p2p.send(x, mesh=mesh, **self.to), p2p.recv(self.shapes, self.dtype, mesh=mesh, **self.source)


def draw(seed: int, mesh: Mesh) -> list[Letter]:
    """Up to four letters."""
    chance = random.Random(seed)
    return [_letter(chance, mesh) for _ in range(chance.randint(1, 4))]


def _letter(chance: random.Random, mesh: Mesh) -> Letter:
    route = chance.choice([_shift, _permutation, _by_rank])
    goals, to, source = route(chance, mesh)
    dtype = chance.choice(DTYPES)
    count = len(mesh.ranks)
    shape = tuple(chance.randint(0 if chance.random() < 0.1 else 1, 4) for _ in range(chance.randint(0, 3)))
    if shape and chance.random() < 0.3:
        shapes = [(chance.randint(0, 4), *shape[1:]) for _ in range(count)]  # each place has its own number of rows
        coming: Any = [shapes[goals.index(place)] if place in goals else shapes[place] for place in range(count)]
    else:
        shapes, coming = [shape] * count, shape
    make = torch.Generator().manual_seed(chance.randrange(2**31))
    shards = tuple((torch.randn(each, generator=make) * 8).to(dtype) for each in shapes)
    return Letter(goals, shards, coming, dtype, to, source)


def _along(mesh: Mesh, axis: str, other: Callable[[int], int]) -> tuple[int, ...]:
    at = mesh.axes.index(axis)
    found = []
    for place, point in enumerate(mesh.coordinates):
        there = other(point[at])
        found.append(-1 if there < 0 else mesh.coordinates.index((*point[:at], there, *point[at + 1 :])))
        assert place == mesh.coordinates.index(point)
    return tuple(found)


def _shift(chance: random.Random, mesh: Mesh) -> Any:
    axis, by, wrap = chance.choice(mesh.axes), chance.randint(-3, 3), chance.random() < 0.5
    size = mesh.axis_sizes[axis]

    def other(at: int) -> int:
        return (at + by) % size if wrap else at + by if 0 <= at + by < size else -1

    told = {"axis": axis, "wrap": wrap}
    return _along(mesh, axis, other), {"shift": by, **told}, {"shift": -by, **told}


def _permutation(chance: random.Random, mesh: Mesh) -> Any:
    axis = chance.choice(mesh.axes)
    size = mesh.axis_sizes[axis]
    order = [there if chance.random() < 0.7 else -1 for there in chance.sample(range(size), size)]
    back = [order.index(at) if at in order else -1 for at in range(size)]
    return _along(mesh, axis, order.__getitem__), {"permutation": order, "axis": axis}, {"permutation": back, "axis": axis}


def _by_rank(chance: random.Random, mesh: Mesh) -> Any:
    count = len(mesh.ranks)
    goals = tuple(there if chance.random() < 0.6 else -1 for there in chance.sample(range(count), count))
    pairs = {mesh.ranks[one]: mesh.ranks[other] for one, other in enumerate(goals) if other >= 0}
    return goals, {"to": pairs}, {"source": {other: one for one, other in pairs.items()}}


def run(letters: list[Letter], mesh: Mesh, local: Callable[[tuple[Tensor, ...]], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What is received, and the gradients of what is sent for gradients that count the places."""
    sent = [local(letter.shards).requires_grad_(letter.dtype.is_floating_point) for letter in letters]
    pairs = [letter.operations(x, mesh) for letter, x in zip(letters, sent, strict=True)]
    out = p2p.batch([send for send, _ in pairs] + [receive for _, receive in pairs])
    flows = [i for i, letter in enumerate(letters) if letter.dtype.is_floating_point]
    grads = []
    if flows:
        given = [local(tuple(weight(letters[i], place) for place in range(len(mesh.ranks)))) for i in flows]
        grads = list(torch.autograd.grad([out[i] for i in flows], [sent[i] for i in flows], given))
    return [p2p.wait(x.detach()) for x in out], grads


def weight(letter: Letter, place: int) -> Tensor:
    """The gradient of what a place receives."""
    return torch.full_like(letter.arrives(place), place + 1)


def gradient(letter: Letter, place: int) -> Tensor:
    """The gradient of what a place sends."""
    return torch.full_like(letter.shards[place], letter.goals[place] + 1)


def spoil(seed: int, letters: list[Letter], mesh: Mesh) -> list[Any]:
    """The operations of a batch, of which one side of a message is another one; a batch in which somebody sends something."""
    chance = random.Random(seed)
    letters = [letter for letter in letters if any(goal >= 0 for goal in letter.goals)]
    index = chance.randrange(len(letters))
    letter = letters[index]
    kind = chance.choice(["no receive", "no send", "dtype", "peer", "twice"])
    operations = [list(each.operations(torch.zeros(each.shards[0].shape, dtype=each.dtype), mesh)) for each in letters]
    if kind == "no receive":
        del operations[index][1]
    elif kind == "no send":
        del operations[index][0]
    elif kind == "dtype":
        other = torch.float16 if letter.dtype is not torch.float16 else torch.int8
        operations[index][1] = replace(letter, dtype=other).operations(operations[index][0].x, mesh)[1]
    elif kind == "peer":
        somebody = next(place for place, goal in enumerate(letter.goals) if goal >= 0)
        ranks = [rank for place, rank in enumerate(mesh.ranks) if place != letter.goals[somebody]]
        pairs = {mesh.ranks[somebody]: chance.choice(ranks)}
        operations[index][0] = p2p.send(operations[index][0].x, to=pairs, mesh=mesh)
    else:
        operations[index].append(operations[index][0])
    return [each for several in operations for each in several]
