"""Bad arguments of every public callable, in a simulated world (see tests/helpers/arguments.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.base.argument_checks import integer, number, shown
from tests.helpers.arguments import CALLS, NOT_CALLED, NOT_RIGHT_HERE, ONLY_REFUSED, World, callables, judge, trials


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)  # where a text is taken for a path
    return World(tmp_path)


def test_every_public_callable_has_its_right_call(world: World) -> None:
    assert sorted(callables()) == sorted((*CALLS, *NOT_CALLED))
    for name in CALLS.keys() - NOT_RIGHT_HERE - ONLY_REFUSED.keys():
        function, args, kwargs = CALLS[name](world)
        function(*args, **kwargs)


def test_bad_arguments_are_refused_by_our_errors(world: World) -> None:
    outcomes = [judge(world, trial) for trial in trials()]
    assert len(outcomes) > 600
    wrong = [f"{done.verdict}: {done.trial}: {done.text}" for done in outcomes if done.verdict]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(wrong[:50])


MESH = sw.init_mesh(dp=2, tp=2)
X = sw.ones(8, 4, mesh=MESH, placements=[sw.Shard(0), sw.Replicate()])
TEXTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a part of a rank": (lambda: sw.init_mesh(dp=2.5), r"init_mesh: axis dp is an integer from 1 to 1,048,576, got 2\.5"),
    "more ranks than there are": (lambda: sw.init_mesh(dp=2**31), r"axis dp is an integer .*, got 2147483648"),
    "no device": (lambda: sw.init_mesh(dp=2, device="nope"), r"device is the name of a device, such as 'cpu' .*, got 'nope'"),
    "a dtype as text": (
        lambda: sw.layout((8, 4), MESH, [sw.Shard(0), sw.Replicate()], dtype="float32"),
        r"layout: dtype is a torch\.dtype, such as torch\.float32, got 'float32'",
    ),
    "a negative size": (
        lambda: sw.layout((-8, 16), MESH, [sw.Shard(0), sw.Replicate()]),
        r"layout: shape is an integer from 0 to .*, got -8",
    ),
    "sizes as text": (lambda: sw.zeros("4", mesh=MESH), r"size is several integers of at least 0, got '4'"),
    "no tensor": (lambda: sw.distribute_tensor(None, MESH), r"distribute_tensor: tensor is a tensor, got None"),
    "an order of complex numbers": (
        lambda: sw.layout((8,), MESH, {"dp": sw.Partial("max")}, torch.complex64),
        r"torch\.complex64 has no max, and so no Partial\('max'\) on axis 'dp'",
    ),
    "tensors for layouts": (
        lambda: sw.plan(X, X),
        r"plan: have is a Layout, such as x\.layout .*, got a DTensor float32\[8, 4\]",
    ),
    "no function": (lambda: sw.capture(3), r"capture: function is a function, a module or an optimizer's step, got 3"),
    "shards of two dtypes": (
        lambda: sw.Bundle([torch.ones(2), torch.ones(2, dtype=torch.int64)]),
        r"the shards of a Bundle are plain tensors of one dtype, .*got Tensor torch\.float32 on cpu and Tensor torch\.int64",
    ),
    "a halo wider than a shard": (
        lambda: sw.p2p.halo_exchange(X, 0, 5, axis="dp"),
        r"halo_exchange: 5 rows before and 1 after, of a shard with 4 rows in dim 0",
    ),
    "a folder for a file": (
        lambda: sw.export(torch.relu, (X,), MESH, Path()),
        r"export: path is a file to write, got the folder '\.'; name a file in it",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    call, text = TEXTS[name]
    with pytest.raises(sw.ShardwiseError, match=text):
        call()


def test_values_are_shown_without_addresses_and_in_short() -> None:
    assert shown([object()] * 20) == "[" + "an object, " * 8 + "…]"
    assert shown("x" * 100) == "'" + "x" * 59 + "…" and shown(len) == "the function len"
    with pytest.raises(sw.ArgumentError, match=r"a is an integer from 1 to 4, got True"):
        integer(True, "a", 1, 4)
    with pytest.raises(TypeError, match=r"a is a number above 0, got nan"):
        number(float("nan"), "a", 0)
