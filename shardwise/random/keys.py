"""Random numbers of global tensors: the same on every rank, and on every mesh and layout.

Each random call has a number: how many such calls there were since torch was seeded. The seed and that number give two keys,
and an element's number is a function of these keys and of its index in the global tensor (`random/bits.py`): replicas agree,
shards differ, a rank makes no more than its own shard, and values do not depend on how the tensor is sharded.

The count lives in the state of torch's default CPU generator, in the field for a cached normal number in single precision,
which no operator of torch reads or writes (a test tries them all). So the count starts at zero with
`torch.manual_seed`, to the same seed or another; plain random calls, which may differ from rank to rank, leave it alone and
are left alone by it; and what saves and restores torch's state saves and restores the count: `torch.get_rng_state`,
`torch.random.fork_rng`, `torch.utils.checkpoint`, which runs a forward pass a second time and must draw the same numbers.

Ranks that seed torch differently would make replicas differ: at the first call after a seed was set, and at the first one on
each mesh, the ranks of the mesh compare seed and number, through `agree`; later calls compare nothing.

>>> _ = torch.manual_seed(0); first = next_key()
>>> _ = torch.manual_seed(0); next_key() == first
True
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Generator, Tensor

from .._torch.compiler import NotTraced, in_order, is_decomposing
from ..base.caches import memo
from ..comm.interception import watched
from ..errors import OperatorError
from ..layouts.layout import Factor, Layout, PerRank, contiguous_stride, dense_stride, whole
from ..layouts.mesh import Mesh
from .bits import Draw, Spans, bits, fill, index, recipe, values

#: How many bytes the state of a CPU generator has, and where among them `_Count` is.
SIZE, PLACE = 5056, 5048
#: Counts stay finite as floats, so that no copy of the field can change them.
MOST = 0x7F7FFFFF

Key = tuple[Any, Any]
_KEYS = struct.Struct(">qq")


class State(NamedTuple):
    """The seed of global random numbers, and how many random calls were made since it was set."""

    seed: int
    calls: int


class _Count(ctypes.Structure):
    """The field of a generator's state for a cached float, and whether there is one."""

    _fields_ = (("value", ctypes.c_int32), ("valid", ctypes.c_bool))


def _state() -> tuple[Tensor, _Count]:
    """A copy of the generator's state, and its count: in its memory, since operators on ten bytes take ten times as long."""
    state = torch.default_generator.get_state()
    if state.numel() != SIZE:
        raise OperatorError(
            f"the state of this torch's CPU generator has {state.numel()} bytes, not {SIZE}; torch {torch.__version__} is "
            "not supported, use 2.11 to 2.13"
        )
    return state, _Count.from_address(state.data_ptr() + PLACE)


def _set_count(state: Tensor, field: _Count, count: int) -> None:
    if count > MOST:
        raise OperatorError(f"more than {MOST} random calls since torch.manual_seed; seed it again")
    field.value, field.valid = count, True
    torch.default_generator.set_state(state)


def get_rng_state() -> State:
    """The seed, and how many random calls on DTensors were made since it was set.

    >>> _ = torch.manual_seed(3); get_rng_state()
    State(seed=3, calls=0)
    """
    _held, field = _state()
    return State(torch.initial_seed(), field.value if field.valid else 0)


def set_rng_state(state: State) -> None:
    """Go on from a state that `get_rng_state` gave, here or in another process. Seeds torch if its seed is another.

    >>> _ = torch.manual_seed(3); state = get_rng_state(); first = next_key()
    >>> set_rng_state(state); next_key() == first
    True
    """
    seed, count = state
    if seed != torch.initial_seed():
        torch.manual_seed(seed)
    _set_count(*_state(), count)


#: Called with what the numbers of a call are made of, and whether ranks that have not compared since it was set must do so now.
Agree = Callable[[str, bool], None]

#: Which seeds the ranks of each mesh have compared since torch was last seeded, and the last that was made of compared keys.
_seeds: WeakKeyDictionary[Mesh, set[int]] = WeakKeyDictionary()
_derived: set[int] = set()
#: The meshes whose ranks have compared a generator of the user's. Of so many the oldest leave: torch 2.11 has no weak ones.
_generators: dict[Generator, WeakSet[Mesh]] = {}
_MOST_GENERATORS = 256


def reseed(seed: int) -> None:
    """Seed torch with a number that every rank made of keys, on which the ranks have agreed.

    >>> reseed(7); get_rng_state()
    State(seed=7, calls=0)
    """
    torch.default_generator.manual_seed(seed)
    _set_count(*_state(), 0)
    _derived.clear()
    _derived.add(torch.initial_seed())


def next_key(generator: Generator | None = None, mesh: Mesh | None = None, agree: Agree | None = None) -> tuple[int, int]:
    """The keys of one random call; drawn from `generator` where the user gives one. A second run of a block, in which some
    calls may be left out, has the keys of the first. `agree` has the ranks of the mesh compare what they are made of."""
    return watched("random_key", "key", None, partial(_draw_key, generator, mesh, agree))


def _draw_key(generator: Generator | None, mesh: Mesh | None, agree: Agree | None) -> tuple[int, int]:
    if generator is not None:
        return _key_from(generator, mesh, agree)
    state, field = _state()
    count, seed = field.value if field.valid else 0, torch.initial_seed()
    if agree is not None and mesh is not None:
        if not field.valid:  # torch was seeded, perhaps with the same number
            _seeds.clear()
        known = _seeds.setdefault(mesh, set())
        agree(f"seed {seed}, random call {count}", seed not in _derived and seed not in known)
        known.add(seed)
    _set_count(state, field, count + 1)
    first, second = _KEYS.unpack(hashlib.blake2b(f"{seed}:{count}".encode(), digest_size=16).digest())
    return first, second


def _key_from(generator: Generator, mesh: Mesh | None, agree: Agree | None) -> tuple[int, int]:
    """Keys from a generator of the user's, of which the ranks compare the first numbers that they draw on a mesh."""
    first, second = torch.empty(2, dtype=torch.int64, device=generator.device).random_(generator=generator).tolist()
    if agree is not None and mesh is not None:
        compared = _generators.setdefault(generator, WeakSet())
        if len(_generators) > _MOST_GENERATORS:
            del _generators[next(iter(_generators))]
        agree(f"a generator with seed {generator.initial_seed()} that draws {first}", mesh not in compared)
        compared.add(mesh)
    return first, second


# ── where a shard lies ────────────────────────────────────────────────────────────────────────────────────────────────


class BoxSide(NamedTuple):
    """One side of the box of indices that a rank holds: its interval of a factor, `times` indices for each, in strides."""

    factor: Factor
    times: int
    stride: int

    def start(self, layout: Layout, place: int) -> int:
        """Where the interval of a place starts."""
        return self.factor.starts[layout.shard(self.factor, place)] * self.times

    def length(self, layout: Layout, place: int) -> int:
        """How many indices it has."""
        return self.factor.sizes[layout.shard(self.factor, place)] * self.times


def sides(layout: Layout) -> list[BoxSide]:
    """The sides of the boxes of a layout; what lies whole inside a factor is one with it.

    >>> from shardwise import Mesh, Shard, layout
    >>> [side[1:] for side in sides(layout((4, 6, 5), Mesh(("tp",), (2,), range(2), "cpu", "simulated"), [Shard(1)]))]
    [(1, 30), (5, 1)]
    """
    found: list[BoxSide] = []
    for dim, last in zip(layout.dims, contiguous_stride(layout.shape), strict=True):
        for i, factor in enumerate(dim):
            stride = math.prod([inner.size for inner in dim[i + 1 :]]) * last
            if found and not factor.axes:
                outer = found.pop()
                found.append(BoxSide(outer.factor, outer.times * factor.size, stride))
            else:
                found.append(BoxSide(factor, 1, stride))
    return found or [BoxSide(whole(1), 1, 1)]


@memo("boxes of ranks", limit=4096)
def box(layout: Layout) -> PerRank:
    """The indices that each rank holds."""
    several = sides(layout)

    def spans(place: int) -> Spans:
        return Spans(*zip(*((x.start(layout, place), x.length(layout, place), x.stride) for x in several), strict=True))

    return PerRank(spans)


# ── one rank's shard ──────────────────────────────────────────────────────────────────────────────────────────────────


def draw_shard(draw: Draw, layout: Layout, shape: Sequence[int], box: Spans, key: Key, device: torch.device) -> Tensor:
    """New random numbers: those of a rank's box, in its shape."""
    out = torch.empty_strided(shape, dense_stride(shape, layout.stride), dtype=layout.dtype, device=device)
    return fill_shard(out, draw, box, key)


def fill_shard(out: Tensor, draw: Draw, box: Spans, key: Key) -> Tensor:
    """Random numbers into a rank's shard."""
    if out.device.type == "meta":
        return out
    if not out.is_contiguous():
        return out.copy_(fill_shard(torch.empty_like(out, memory_format=torch.contiguous_format), draw, box, key))
    kernels = triton_kernels() if out.is_cuda else None
    if kernels is None or not kernels.fill(out, recipe(draw, out.dtype), box, key):
        fill(out, draw, box, key)
    return out


def drop_shard(x: Tensor, scale: float, keep: Draw, box: Spans, key: Key) -> tuple[Tensor, Tensor]:
    """A rank's shard with some elements set to zero and the others scaled, and which those are."""
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    kernels = triton_kernels() if x.is_cuda and x.is_contiguous() else None
    out = kernels.drop(x, kept, scale, recipe(keep, torch.bool), box, key) if kernels is not None else None
    if out is None:
        fill_shard(kept, keep, box, key)
        out = (x * kept).mul_(scale)
    return out, kept


@functools.cache
def triton_kernels() -> Any:
    """The kernels for GPUs, if Triton is here; it takes seconds to import."""
    module = importlib.import_module(".triton", __package__)
    return module if module.AVAILABLE else None


# ── in traced programs ────────────────────────────────────────────────────────────────────────────────────────────────

torch.library.define("shardwise::random_key", "(Tensor? after, str mesh) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.define(
    "shardwise::draw",
    "(Tensor key, Tensor[] starts, SymInt[] lengths, SymInt[] strides, SymInt[] shape, ScalarType dtype, Device device, "
    "str kind, Scalar[] numbers) -> Tensor",
)


def _draw_now(key: Tensor, starts: Any, lengths: Any, strides: Any, shape: Any, *facts: Any) -> Tensor:
    dtype, device, kind, numbers = facts
    box = Spans(tuple(starts), tuple(lengths), tuple(strides))
    return fill_shard(torch.empty(shape, dtype=dtype, device=device), Draw(kind, tuple(numbers)), box, tuple(key.tolist()))


torch.library.register_fake("shardwise::random_key", lambda after, mesh: torch.empty(2, dtype=torch.int64))
torch.library.impl("shardwise::draw", "CompositeExplicitAutograd", _draw_now)
torch.library.register_fake(
    "shardwise::draw",
    lambda key, starts, lengths, strides, shape, dtype, device, *_: torch.empty(shape, dtype=dtype, device=device),
)


def traced_key(mesh: Mesh, generator: Generator | None = None) -> Tensor:
    """The keys of one random call of a traced program, new ones whenever it runs; on the host, where the count is. Each follows
    the one before, so that no compiler puts them into another order."""
    if generator is not None:
        raise NotTraced(
            "random numbers with a generator in a compiled function: its state would be part of the program; leave it out, and "
            "seed with torch.manual_seed"
        )
    text = mesh.write_root()
    return in_order(lambda after: torch.ops.shardwise.random_key(after, text))


def traced_shard(draw: Draw, layout: Layout, shape: Sequence[int], box: Any, key: Tensor, device: torch.device) -> Tensor:
    """The same as `draw_shard` in a traced program: one operator, or what a compiler that fuses operators needs."""
    device = torch.device(device.type)
    made, (starts, lengths, strides) = recipe(draw, layout.dtype), box
    if not (is_decomposing() and made.fuses):
        facts = (layout.dtype, device, *draw)
        return torch.ops.shardwise.draw(key, list(starts), lengths, strides, shape, *facts)
    there = key.to(device)
    flat = bits(index(Spans(*box), device), there[0], there[1])
    return values(made, flat, layout.dtype).view(shape)
