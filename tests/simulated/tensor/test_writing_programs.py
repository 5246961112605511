"""Random programs that write: in-place operators on tensors and on views of them leave every alias as on one device.

A write that Shardwise refuses (to a view that data had to move for) is left out on one device too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise import OperatorError, Partial, Replicate, Shard
from tests.conftest import PROGRAMS, SEED
from tests.helpers.one_device import distributed, equal

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}]
Step = tuple[str, Callable[[list[Any]], Any]]

WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_(0.5)": lambda x: x.mul_(0.5),
    "add_(1.0)": lambda x: x.add_(1.0),
    "relu_()": lambda x: x.relu_(),
    "tanh_()": lambda x: x.tanh_(),
    "neg_()": lambda x: x.neg_(),
    "zero_()": lambda x: x.zero_(),
    "fill_(2.0)": lambda x: x.fill_(2.0),
    "clamp_(-1, 1)": lambda x: x.clamp_(-1.0, 1.0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0.5, -1.0),
    "cumsum_": lambda x: x.cumsum_(0) if x.ndim else x,
    "copy_ of its double": lambda x: x.copy_(x * 2.0),
    "add_ of itself": lambda x: x.add_(x),
    "setitem first": lambda x: x.__setitem__(0, 3.0) if x.ndim and x.shape[0] else None,
    "setitem last": lambda x: x.__setitem__((..., -1), 4.0) if x.ndim and x.shape[-1] else None,
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 5.0) if x.ndim and x.shape[0] else None,
}


def view_of(draw: Any, x: Tensor) -> tuple[str, Callable[[Any], Any]]:
    if not x.ndim:
        return "view_as itself", lambda x: x.view(())
    a, b = draw(st.integers(0, x.ndim - 1)), draw(st.integers(0, x.ndim - 1))
    low, high = sorted((draw(st.integers(0, x.shape[a])), draw(st.integers(0, x.shape[a]))))
    options: list[tuple[str, Callable[[Any], Any]]] = [
        (f"transpose({a}, {b})", lambda x: x.transpose(a, b)),
        (f"narrow({a}, {low}:{high})", lambda x: x.narrow(a, low, high - low)),
        (f"unsqueeze({a})", lambda x: x.unsqueeze(a)),
        (f"step slice of {a}", lambda x: x[(slice(None),) * a + (slice(low, None, 2),)]),
    ]
    if x.shape[a]:
        index = draw(st.integers(0, x.shape[a] - 1))
        options.append((f"select({a}, {index})", lambda x: x.select(a, index)))
        options.append((f"split({a})[0]", lambda x: x.split(2, a)[0]))
    if x.is_contiguous() and x.numel():
        options.append(("view(-1)", lambda x: x.view(-1)))
        n = draw(st.sampled_from([n for n in range(1, x.shape[a] + 1) if x.shape[a] % n == 0]))
        options.append((f"unflatten({a}, {n})", lambda x: x.unflatten(a, (n, x.shape[a] // n))))
    return draw(st.sampled_from(options))


@st.composite
def programs(draw: Any) -> Any:
    """A mesh, an input with its layout, and steps: views of what there is, writes, and writes of one value into another."""
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=3))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    options = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    placed = {axis: draw(st.sampled_from(options)) for axis in draw(st.permutations(list(mesh)))}
    pool, steps = [x.clone()], []
    for _ in range(draw(st.integers(4, 12))):
        i = draw(st.integers(0, len(pool) - 1))
        if draw(st.booleans()):
            name, view = view_of(draw, pool[i])
            pool.append(view(pool[i]))
            steps.append((f"v{len(pool) - 1} = v{i}.{name}", i, view, True))
        elif draw(st.booleans()):
            name = draw(st.sampled_from(sorted(WRITES)))
            steps.append((f"v{i}.{name}", i, WRITES[name], False))
        else:
            fits = [j for j, other in enumerate(pool) if other.shape == pool[i].shape]
            j = draw(st.sampled_from(fits))
            steps.append((f"v{i}.copy_(v{j} + 1)", i, j, False))
    return mesh, x, placed, steps


def check(program: Any) -> None:
    axes, x, placed, steps = program
    note("\n".join([f"mesh {axes}", f"v0 = {list(x.shape)} {placed}", *(text for text, *_ in steps)]))
    dense, spread = [x.clone()], [distributed(x, sw.init_mesh(**axes), placed)]
    for _, i, action, makes in steps:
        if makes:
            dense.append(action(dense[i]))
            spread.append(action(spread[i]))
            continue
        try:
            spread[i].copy_(spread[action] + 1) if isinstance(action, int) else action(spread[i])
        except OperatorError as refused:
            assert "would not reach the tensor" in str(refused), refused
            continue
        dense[i].copy_(dense[action] + 1) if isinstance(action, int) else action(dense[i])
    for i, (one, other) in enumerate(zip(spread, dense, strict=True)):
        equal(one, other, f"v{i}")


@seed(SEED)
@settings(
    max_examples=PROGRAMS, deadline=None, database=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)
@given(programs())
def test_programs_that_write_mean_what_they_mean_on_one_device(program: Any) -> None:
    check(program)
