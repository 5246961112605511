"""Save and restore the states of random number generators, so that a second run draws the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor

#: The state of each generator; None stands for the host's, a device for its own.
States = list[tuple[Any, Tensor]]


def get_states(devices: Iterable[torch.device] = (), generator: Generator | None = None) -> States:
    """The states of the host's generator, of those of some devices, and of one of the user's."""
    found: States = [(None, torch.get_rng_state())]
    found += [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]
    return found if generator is None else [*found, (generator, generator.get_state())]


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
    """In the block, draw from saved states of host and devices; afterwards these are as if nothing had been drawn.

    >>> _ = torch.manual_seed(0); before = get_states(); first = torch.rand(1)
    >>> with from_states(before):
    ...     again = torch.rand(1)
    >>> bool(again == first)
    True
    """
    now = get_states(of for of, _ in states if of is not None)
    set_states(states)
    try:
        yield
    finally:
        set_states(now)


def devices_of(values: Iterable[Any]) -> list[torch.device]:
    """The devices of tensors, and the one in use, that have generators of their own."""
    if not torch.cuda.is_initialized():
        return []
    found = {x.device for x in values if isinstance(x, Tensor) and x.device.type == "cuda"}
    return sorted(found | {torch.device("cuda", torch.cuda.current_device())}, key=str)
