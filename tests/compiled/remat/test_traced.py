"""Blocks of `remat` in compiled and captured programs: gradients bit for bit those without it, and what is kept is what the
policy says."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import shardwise as sw
from shardwise import Shard, remat, save
from shardwise.programs.passes.graph import is_view
from tests.helpers.cache_keys import key_of
from tests.helpers.compiled_functions import fake_job

Axes = dict[str, int]
AXES: list[Axes] = [{}, {"tp": 2}, {"dp": 2, "tp": 2}]


def gelus(op: Any, args: Any, made: save.Made) -> str:
    return "must_save" if "gelu" in made.operator else "recompute"


POLICIES = {
    "nothing": save.nothing,
    "everything": save.everything,
    "matmuls": save.matmuls,
    "matmuls and collectives": save.matmuls | save.collectives,
    "default": save.default,
    "small matmuls": save.matmuls & save.up_to(1600),
    "a function": save.by(gelus),
}


class Block(nn.Module):
    """Attention, a feed-forward part, dropout after each."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), 0.25)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.25)


CUT = {"query": 0, "key": 0, "value": 0, "up": 0, "out": 1, "down": 1}


class Model:
    """Blocks whose parameters are sharded by tp, and a batch that is sharded by dp; plain tensors without axes."""

    def __init__(self, axes: Axes, policy: save.Policy | None, layers: int = 1, rows: int = 4, length: int = 6) -> None:
        torch.manual_seed(0)
        self.policy, self.blocks, self.x = policy, nn.ModuleList(Block() for _ in range(layers)), torch.randn(rows, length, 16)
        mesh = sw.init_mesh(**axes) if axes else None
        for name, p in list(self.blocks.named_parameters()) if mesh is not None else ():
            owner, _, leaf = name.rpartition(".")
            dim = CUT.get(owner.rpartition(".")[2])
            placements = {} if dim is None or dim >= p.ndim or "tp" not in axes else {"tp": Shard(dim)}
            spread = nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placements))
            setattr(self.blocks.get_submodule(owner), leaf, spread)
        if mesh is not None:
            self.x = sw.distribute_tensor(self.x, mesh, {"dp": Shard(0)} if "dp" in axes else {})
        self.x.requires_grad_()

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.policy is None else remat(block, x, save=self.policy)
        return x.square().mean()

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        loss.backward()
        return loss

    def values(self, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What a function gives for a loss, and the gradients, from the same seed."""
        torch.manual_seed(1)
        loss = function(self.x)
        if self.x.grad is None:
            loss.backward()
        return [whole(t) for t in (loss.detach(), *(t.grad for t in (self.x, *self.blocks.parameters())))]


def whole(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, sw.DTensor) else t


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def compiled(backend: str, axes: Axes, policy: save.Policy | None) -> list[Tensor]:
    torch._dynamo.reset()
    model = Model(axes, policy)
    return model.values(torch.compile(model.loss, backend=backend, fullgraph=True))


@functools.cache
def expected(how: str, axes: tuple[tuple[str, int], ...]) -> list[Tensor]:
    """The same without remat."""
    if how in ("step", "loss"):
        model = Model(dict(axes), None)
        return model.values(sw.capture(getattr(model, how)))
    return compiled(how, dict(axes), None)


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def cases(*quick: tuple[str, int]) -> list[Any]:
    """Every policy on every mesh; all but the quick ones, by the number of axes, on request: each takes seconds."""
    every = [(name, axes) for name in POLICIES for axes in AXES[1:]]
    return [pytest.param(*case, marks=() if (case[0], len(case[1])) in quick else pytest.mark.slow) for case in every]


@pytest.mark.parametrize("name", POLICIES)
def test_compiled_gradients_of_plain_tensors_are_the_same(name: str) -> None:
    assert same(compiled("aot_eager", {}, POLICIES[name]), expected("aot_eager", ()))


@pytest.mark.parametrize(("name", "axes"), cases(("small matmuls", 1)), ids=str)
def test_compiled_gradients_are_the_same(name: str, axes: Axes) -> None:
    assert same(compiled("aot_eager", axes, POLICIES[name]), expected("aot_eager", tuple(axes.items())))


@pytest.mark.parametrize(("name", "axes"), cases(("nothing", 1), ("default", 2)), ids=str)
def test_captured_gradients_are_the_same(name: str, axes: Axes) -> None:
    model = Model(axes, POLICIES[name])
    assert same(model.values(sw.capture(model.loss)), expected("loss", tuple(axes.items())))


@pytest.mark.parametrize(("name", "axes"), cases(("nothing", 1)), ids=str)
def test_gradients_of_a_captured_step_are_the_same(name: str, axes: Axes) -> None:
    """With the backward inside the program."""
    model = Model(axes, POLICIES[name])
    assert same(model.values(sw.capture(model.step)), expected("step", tuple(axes.items())))


@pytest.mark.parametrize(
    ("name", "axes"), [("default", {}), pytest.param("matmuls and collectives", {"tp": 2}, marks=pytest.mark.slow)]
)
def test_gradients_by_machine_code_are_the_same(name: str, axes: Axes) -> None:
    assert same(compiled("inductor", axes, POLICIES[name]), expected("inductor", tuple(axes.items())))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "matmuls and collectives"])
def test_gradients_of_a_compiled_step_are_the_same(name: str) -> None:
    model, plain = Model({"tp": 2}, POLICIES[name]), Model({"tp": 2}, None)
    torch.testing.assert_close(model.values(sw.compile(model.step)), plain.values(sw.compile(plain.step)))


def run_block(block: Callable[..., Any], how: str, policy: save.Policy) -> None:
    """A block of two tensors gives the same gradients with remat and without."""
    found = []
    for wrap in (functools.partial(remat, save=policy), lambda f, *args: f(*args)):
        x, w = (torch.randn(4, 4, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (0, 1))

        def loss(x: Tensor, w: Tensor, wrap: Any = wrap) -> Tensor:
            return wrap(block, x, w).square().sum()

        def step(x: Tensor, w: Tensor, loss: Any = loss) -> Tensor:
            value = loss(x, w)
            value.backward()
            return value

        torch.manual_seed(2)
        value = sw.capture(step if how == "step" else loss)(x, w)
        if how == "loss":
            value.backward()
        found.append([value.detach(), x.grad, w.grad])
    assert same(*found)


def nested(x: Tensor, w: Tensor) -> Tensor:
    return torch.cos(remat(lambda x, w: torch.sin(x @ w) @ w, x, w, save=save.nothing) @ w).exp()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y, z = x @ w, (x @ w).clone()
    y.add_(1)
    z[1:3] = 0
    return (y.sin() * z.mul_(2)).relu_()


def dropped(x: Tensor, w: Tensor) -> Tensor:
    y = F.dropout(torch.sin(x @ w), 0.5)
    return y * torch.rand_like(y).mul_(2) * torch.empty_like(y).uniform_().neg_()


def attended_with_dropout(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (t.view(1, 1, 4, 4) for t in (x @ w, x, w))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sin()


@pytest.mark.parametrize("how", ["loss", "step"])
@pytest.mark.parametrize("block", [nested, in_place, dropped, attended_with_dropout], ids=lambda f: f.__name__)
def test_blocks(block: Callable[..., Any], how: str) -> None:
    for policy in (save.nothing, save.matmuls):
        run_block(block, how, policy)


def test_a_block_without_gradients() -> None:
    x = torch.randn(4, 4)
    program = sw.capture(lambda x: remat(lambda x: F.dropout(x.sin(), 0.5) @ x, x, save=save.nothing))
    assert program(x).shape == (4, 4)
    assert [part for part, _ in program.captured] == ["inference"]


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


def captured(name: str | None, how: str, axes: Axes, layers: int) -> dict[str, GraphModule]:
    """The local programs of one rank of a job, by their part."""
    with fake_job(0, math.prod(axes.values())):
        model = Model(axes, name and POLICIES[name], layers, rows=8, length=32)
        program = sw.capture(getattr(model, how))
        model.values(program)
    return {part: gm for part, gm in program.captured}


def collectives(gm: GraphModule) -> int:
    targets = [str(node.target) for node in gm.graph.nodes]
    return sum(target.startswith("_c10d_functional.") and "wait_tensor" not in target for target in targets)


def test_saved_tensors_and_collectives_are_what_the_policy_says() -> None:
    names = (None, "nothing", "default", "matmuls and collectives", "everything")
    programs = {name: captured(name, "loss", {"tp": 4}, 1) for name in names}
    saved = {name: len(found["backward"].graph.find_nodes(op="placeholder")) for name, found in programs.items()}
    assert saved["nothing"] < saved["default"] < saved["matmuls and collectives"] < saved["everything"] <= saved[None]
    asked = {name: collectives(found["backward"]) for name, found in programs.items()}
    assert {name: collectives(found["forward"]) for name, found in programs.items()} == dict.fromkeys(names, 2)
    assert asked["nothing"] > asked[None]
    assert asked["default"] == asked["matmuls and collectives"] == asked["everything"] == asked[None]


def peak(gm: GraphModule) -> int:
    """The most bytes that a program holds at once, beside its inputs."""
    owner: dict[Any, Any] = {}
    last: dict[Any, int] = {}
    for i, node in enumerate(gm.graph.nodes):
        owner[node] = owner[node.all_input_nodes[0]] if is_view(node) else node
        last |= {owner[used]: i for used in node.all_input_nodes}
    live = most = 0
    for i, node in enumerate(gm.graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and owner[node] is node and isinstance(value, Tensor):
            live += value.nbytes
        most = max(most, live)
        ended = {owner[used] for used in node.all_input_nodes if last[owner[used]] == i and owner[used].op == "call_function"}
        live -= sum(used.meta["val"].nbytes for used in ended if isinstance(used.meta["val"], Tensor))
    return most


def test_a_whole_step_holds_what_the_policy_says() -> None:
    """Blocks are computed a second time inside the program, and no pass puts both together."""
    programs = {name: captured(name, "step", {"tp": 2}, 2)["inference"] for name in (None, "nothing", "default", "matmuls")}
    counts = {name: Counter(str(node.target) for node in gm.graph.nodes) for name, gm in programs.items()}
    assert [found["aten.gelu.default"] for found in counts.values()] == [2, 4, 4, 4]
    assert [found["aten._scaled_dot_product_flash_attention_for_cpu.default"] for found in counts.values()] == [2, 4, 2, 4]
    assert counts["matmuls"]["aten.mm.default"] == counts[None]["aten.mm.default"] < counts["nothing"]["aten.mm.default"]
    assert counts["nothing"]["shardwise.random_key.default"] == 4  # no mask is drawn twice
    assert collectives(programs["default"]) <= collectives(programs[None])
    held = {name: peak(gm) for name, gm in programs.items()}
    assert held["nothing"] < held["default"] < held["matmuls"] < held[None]
    assert held["nothing"] < 0.75 * held[None]


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_policy_is_another_program() -> None:
    programs = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        programs.append(gm)
        return gm.forward

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor, policy: save.Policy) -> Tensor:
        return remat(torch.sin, x, save=policy | save.random)

    x = torch.ones(2, requires_grad=True)
    for policy, count in ((save.matmuls, 1), (save.up_to(3), 2), (save.up_to(3), 2), (save.matmuls, 2), (save.up_to(4), 3)):
        function(x, policy)
        assert len(programs) == count, policy
    assert (
        len({part.meta["_checkpoint_context_fn"].cache_hash for gm in programs for part in gm.modules() if part is not gm}) == 3
    )


def policy_keys() -> list[str]:
    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    policies = [save.nothing, save.matmuls & save.up_to(3), save.matmuls & save.up_to(4), save.by(gelus)]
    return [key_of(lambda x, w, p=policy: remat(torch.matmul, x, w, save=p), x, w) for policy in policies]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch keeps no such program")
def test_policies_are_in_the_keys_of_caches() -> None:
    """One for each policy, the same in another process."""
    keys = policy_keys()
    assert len(set(keys)) == len(keys)
    code = "import tests.conftest; from tests.compiled.remat.test_traced import policy_keys as s; print('keys', *s())"
    words = {"capture_output": True, "text": True, "check": True, "env": {**os.environ, "PYTHONHASHSEED": "1"}}
    done = subprocess.run([sys.executable, "-c", code], **words)
    assert done.stdout.split("keys")[1].split() == keys
