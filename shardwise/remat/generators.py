"""Save and restore the states of random number generators, so that a second run draws the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor

#: The state of each generator; None stands for the host's, a device for its own.
States = list[tuple[Any, Tensor]]


def get_states(values: Iterable[Tensor] = (), generator: Generator | None = None) -> States:
    """The states of the generators of the host, of the devices of some tensors and the one in use, and of one of the user's."""
    devices = set[torch.device]()
    if torch.cuda.is_initialized():
        devices = {x.device for x in values if x.device.type == "cuda"} | {torch.device("cuda", torch.cuda.current_device())}
    every = [None, *sorted(devices, key=str), *([] if generator is None else [generator])]
    return [(of, _state(of)) for of in every]


def _state(of: Any) -> Tensor:
    if of is None:
        return torch.get_rng_state()
    return of.get_state() if isinstance(of, Generator) else torch.cuda.get_rng_state(of)


def set_states(states: States) -> None:
    """Restore saved states."""
    for of, state in states:
        if of is None:
            torch.set_rng_state(state)
        elif isinstance(of, Generator):
            of.set_state(state)
        else:
            torch.cuda.set_rng_state(state, of)


@contextlib.contextmanager
def from_states(states: States) -> Iterator[None]:
    """In the block, draw from saved states; afterwards generators are as if nothing had been drawn.

    >>> _ = torch.manual_seed(0); before = get_states(); first = torch.rand(1)
    >>> with from_states(before):
    ...     again = torch.rand(1)
    >>> bool(again == first)
    True
    """
    now = [(of, _state(of)) for of, _ in states]
    set_states(states)
    try:
        yield
    finally:
        set_states(now)
