"""The keys of torch's cache of compiled programs: one for all ranks and processes, another for whatever is another program."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.propagation import table
from shardwise.propagation.table import TABLE, rule
from tests.helpers.cache_keys import key_of
from tests.helpers.compiled_functions import fake_job

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch asks tensors for no key")


class Block(torch.nn.Module):
    """One layer of the demo's model, with its head and its loss."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.norm = torch.nn.Embedding(32, width), torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), targets.flatten())


def training_key(axes: dict[str, int] | None = None, width: int = 16, cut: str = "query") -> str:
    """The key of one training step of a transformer on this rank."""
    mesh = sw.init_mesh(**(axes or {"dp": 2, "tp": 4}))
    torch.manual_seed(0)
    model = Block(width)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        dim = {"out": 1, "down": 1, "embed": 0, "key": 0, "value": 0, "up": 0, cut: 0}.get(owner)
        placements = {} if dim is None or parameter.ndim <= dim else {"tp": Shard(dim)}
        spread = sw.distribute_tensor(parameter.detach(), mesh, placements)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(spread))
    tokens = sw.distribute_tensor(torch.arange(32).view(4, 8), mesh, {"dp": Shard(0)})
    return key_of(model, tokens, tokens)


def simulated_keys(ranks: range) -> set[str]:
    keys = set()
    for rank in ranks:
        with fake_job(rank, 8):
            keys.add(training_key())
    return keys


def test_one_key_on_eight_ranks(pool: Any) -> None:
    keys = simulated_keys(range(8)) | set(pool(8).run(training_key))
    assert len(keys) == 1, keys
    assert pool(8).run(training_key) == [*keys] * 8  # traced a second time


def test_the_same_key_in_another_process() -> None:
    code = "import tests.conftest, tests.compiled.programs.test_keys as t; print('key', *t.simulated_keys(range(3, 4)))"
    here = simulated_keys(range(1))
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("key")} == here


def test_whatever_makes_another_program_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_job(0, 8):
        keys = {
            "as it is": training_key(),
            "axis sizes": training_key({"dp": 4, "tp": 2}),
            "axis order": training_key({"tp": 4, "dp": 2}),
            "shape": training_key(width=32),
            "layout": training_key(cut="nothing"),
        }
        monkeypatch.setattr(table, "VERSION", "0.0.0")
        keys["version"] = training_key()
        monkeypatch.undo()
        monkeypatch.setitem(TABLE, "aten.gelu", TABLE["aten.relu"])
        keys["rule"] = training_key()
        monkeypatch.undo()
        assert training_key() == keys["as it is"]
    assert len(set(keys.values())) == len(keys), keys


def test_keys_without_a_distributed_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that makes its DTensors itself is known by mesh, placements and library, too."""

    def key(axes: dict[str, int], placements: Any) -> str:
        mesh = sw.init_mesh(**axes)

        def inside(x: torch.Tensor) -> torch.Tensor:
            return sw.DTensor.from_local(x, mesh, placements, run_check=False).sum().full_tensor()

        return key_of(inside, torch.ones(4))

    with fake_job(0, 4):
        keys = [
            key({"tp": 4}, [Shard(0)]),
            key({"tp": 4}, [Replicate()]),
            key({"dp": 4}, [Shard(0)]),
            key({"dp": 2, "tp": 2}, [Shard(0), Replicate()]),
        ]
        monkeypatch.setattr(table, "VERSION", "0.0.0")
        keys.append(key({"tp": 4}, [Shard(0)]))
    assert len(set(keys)) == len(keys)


def test_uneven_shards_are_keyed_by_coordinate() -> None:
    def key(rank: int, rows: int) -> str:
        with fake_job(rank, 4):
            x = sw.distribute_tensor(torch.ones(rows, 4), sw.init_mesh(tp=4), [Shard(0)])
            return key_of(lambda x: (x * 2).sum(), x)

    assert len({key(rank, 8) for rank in range(4)}) == 1
    assert len({key(rank, 7) for rank in range(4)}) == 4


def test_a_rule_of_the_users_changes_the_fingerprint() -> None:
    before = table.library_key()
    rule("aten.example_of_keys", "... -> ...")
    try:
        assert table.library_key() != before
    finally:
        TABLE.pop("aten.example_of_keys")
    assert table.library_key() == before
