"""Random numbers of global tensors: the same on every rank, and on every mesh and layout.

Each random call has a number: how many such calls there were since torch was seeded. A generator made from the seed and that
number fills the *whole* tensor on every rank, of which a rank keeps its shard: replicas agree, shards differ, and the values do
not depend on how the tensor is cut.

The count lives in the state of torch's default CPU generator, in the field for a cached normal number in single precision,
which no operator of torch reads or writes (`tests/simulated/test_random.py` tries them all). So the count starts at zero with
`torch.manual_seed`, to the same seed or another; plain random calls, which may differ from rank to rank, leave it alone and
are left alone by it; and what saves and restores torch's state saves and restores the count: `torch.get_rng_state`,
`torch.random.fork_rng`, `torch.utils.checkpoint`, which runs a forward pass a second time and must draw the same numbers.

>>> _ = torch.manual_seed(0); first = sample((2,), torch.float32, "cpu", uniform)
>>> _ = torch.manual_seed(0); torch.equal(sample((2,), torch.float32, "cpu", uniform), first)
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ._torch import tracing_context
from .errors import OperatorError

#: Where the state of a CPU generator holds a cached float, and whether it does; the last fields of 5,056 bytes.
SIZE, VALUE, VALID = 5056, slice(5048, 5052), 5052
#: Counts stay finite as floats, so that no copy of the field can change them.
MOST = 0x7F7FFFFF


class State(NamedTuple):
    """The seed of global random numbers, and how many random calls were made since it was set."""

    seed: int
    calls: int


def _torch_state() -> Tensor:
    state = torch.get_rng_state()
    if state.numel() != SIZE:
        raise OperatorError(
            f"the state of this torch's CPU generator has {state.numel()} bytes, not {SIZE}; torch {torch.__version__} is "
            "not supported, use 2.11 to 2.13"
        )
    return state


def _count(state: Tensor) -> int:
    return int(state[VALUE].view(torch.int32)) if state[VALID] else 0


def _set_count(state: Tensor, count: int) -> None:
    if count > MOST:
        raise OperatorError(f"more than {MOST} random calls since torch.manual_seed; seed it again")
    state[VALUE].view(torch.int32).fill_(count)
    state[VALID] = 1
    torch.set_rng_state(state)


def get_rng_state() -> State:
    """The seed, and how many random calls on DTensors were made since it was set.

    >>> _ = torch.manual_seed(3); get_rng_state()
    State(seed=3, calls=0)
    """
    return State(torch.initial_seed(), _count(_torch_state()))


def set_rng_state(state: State) -> None:
    """Go on from a state that `get_rng_state` gave, here or in another process. Seeds torch if its seed is another.

    >>> _ = torch.manual_seed(3); state = get_rng_state(); first = sample((2,), torch.float32, "cpu", uniform)
    >>> set_rng_state(state); torch.equal(sample((2,), torch.float32, "cpu", uniform), first)
    True
    """
    seed, count = state
    if seed != torch.initial_seed():
        torch.manual_seed(seed)
    _set_count(_torch_state(), count)


def next_seed(generator: Generator | None = None) -> int:
    """A seed for one random call; drawn from `generator` where the user gives one."""
    if generator is not None:
        return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
    state = _torch_state()
    count = _count(state)
    _set_count(state, count + 1)
    text = f"{torch.initial_seed()}:{count}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Fill(NamedTuple):
    """How random numbers are drawn: an operator, and its numbers after the tensor."""

    operator: str
    numbers: tuple[float | int | bool, ...] = ()

    def __call__(self, out: Tensor, generator: Generator) -> Tensor:
        """Fill a tensor."""
        name, overload = self.operator.split(".")
        filled = getattr(getattr(torch.ops.aten, name), overload)(out, *self.numbers, generator=generator)
        return out if filled is out else out.copy_(filled)


#: Numbers from 0 to 1, and standard normal numbers.
uniform, normal = Fill("uniform_.default"), Fill("normal_.default")


def sample(shape: Sequence[int], dtype: torch.dtype, device: Any, fill: Fill, generator: Generator | None = None) -> Tensor:
    """A plain tensor that is the same on every rank, filled by `fill`. A traced program draws anew whenever it runs."""
    if tracing_context() is None:
        return _sample(shape, dtype, device, fill, generator)
    if generator is not None:
        raise OperatorError(
            f"{fill.operator} with a generator in a compiled function: its state would be part of the program; leave it out, "
            "and seed with torch.manual_seed"
        )
    drawn: Tensor = torch.ops.shardwise.sample(shape, dtype, torch.device(torch.device(device).type), *fill)
    return drawn


def _sample(shape: Sequence[int], dtype: torch.dtype, device: Any, fill: Fill, generator: Generator | None = None) -> Tensor:
    own = Generator(device).manual_seed(next_seed(generator))
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    return fill(out, own)


torch.library.define(
    "shardwise::sample",
    "(SymInt[] shape, ScalarType dtype, Device device, str operator, Scalar[] numbers) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _sample_now(shape: Sequence[int], dtype: torch.dtype, device: torch.device, operator: str, numbers: Any) -> Tensor:
    return _sample(shape, dtype, device, Fill(operator, tuple(numbers)))


def _sample_fake(shape: Sequence[int], dtype: torch.dtype, device: torch.device, operator: str, numbers: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


torch.library.impl("shardwise::sample", "CompositeExplicitAutograd", _sample_now)
torch.library.register_fake("shardwise::sample", _sample_fake)
