"""torch.compile over DTensors: one graph, the same on every rank, and the same values as operator by operator."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise._torch.compiler import HAS_KEYS, local_graphs
from tests.helpers.compiled_functions import AXES, UNEVEN, assert_same, fake_job, functions, inputs, values


def compare(axes: dict[str, int], backend: str, names: list[str] | None = None) -> int:
    """Run each function compiled and as it is on this rank; gives how many."""
    mesh = sw.init_mesh(**axes)
    chosen = {name: f for name, f in functions(mesh).items() if names is None or name in names}
    for name, function in chosen.items():
        torch._dynamo.reset()
        assert_same(values(torch.compile(function, backend=backend, fullgraph=True), mesh), values(function, mesh), name)
    return len(chosen)


@pytest.mark.parametrize(("ranks", "axes"), AXES)
def test_compiled_functions_mean_what_they_mean(ranks: int, axes: dict[str, int], pool: Any) -> None:
    assert set(pool(ranks).run(compare, axes, "aot_eager")) == {20 + HAS_KEYS}


def without_gradients(backend: str) -> float:
    """Only the first rank needs the maximum and the sum, in which all take part."""
    mesh = sw.init_mesh(tp=4)
    x, w = inputs(mesh)
    function = functions(mesh)["chosen"]
    compiled = sw.capture(function) if backend == "captured" else torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        return abs(compiled(x, w).item() - function(x, w).item())


@pytest.mark.parametrize(
    "backend", ["captured", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_no_rank_leaves_out_a_collective(backend: str, pool: Any) -> None:
    assert max(pool(4).run(without_gradients, backend)) < 1e-5


@pytest.mark.parametrize("axes", [{"tp": 4}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_in_a_simulated_world(axes: dict[str, int]) -> None:
    compare(axes, "aot_eager")


def test_with_inductor(pool: Any) -> None:
    names = ["products", "updated", "through_local", "spread_out", "sliced", "softmax"]
    assert set(pool(2).run(compare, {"tp": 2}, "inductor", names)) == {6}


@pytest.mark.parametrize("placements", [{}, {"tp": Shard(0)}, {"tp": Shard(1)}], ids=str)
def test_results_that_are_views_of_each_other(placements: Any) -> None:
    mesh = sw.init_mesh(tp=2)

    def views(x: DTensor) -> list[Any]:
        y = x.neg()
        row = y.select(0, 2)
        return [y, row, row.flatten(), y[1:3], x.select(1, 1), x.select(1, 1).flatten(), *y.chunk(2)]

    x = sw.distribute_tensor(torch.randn(4, 4, 3), mesh, placements)
    for function in (torch.compile(views, backend="aot_eager", fullgraph=True), sw.capture(views)):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        got, want = function(leaves[0]), views(leaves[1])
        assert len(got) == len(want) == 8
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            torch.testing.assert_close(one.detach().full_tensor(), other.detach().full_tensor(), msg=f"result {i}")
        for several in (got, want):
            sum((i + 1) * value.square().sum() for i, value in enumerate(several)).backward()
        torch.testing.assert_close(leaves[0].grad.full_tensor(), leaves[1].grad.full_tensor())


# ── one program for every rank ────────────────────────────────────────────────────────────────────────────────────────


def graphs_of(function: Any, mesh: sw.Mesh) -> list[str]:
    """The local graphs of a function, forward and backward, as text."""
    found: list[str] = []

    def keep(part: str, gm: GraphModule) -> Any:
        found.append(f"{part} {gm.print_readable(print_output=False)}")
        return lambda given: gm(*given)

    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, given: local_graphs(gm, given, keep), fullgraph=True)(*inputs(mesh)).backward()
    return found


def test_graphs_are_the_same_on_every_rank() -> None:
    graphs: list[dict[str, list[str]]] = []
    for rank in (0, 3):  # another coordinate along either axis
        with fake_job(rank, 4):
            mesh = sw.init_mesh(dp=2, tp=2)
            even = {name: f for name, f in functions(mesh).items() if name not in UNEVEN}
            graphs.append({name: graphs_of(function, mesh) for name, function in even.items() if name != "updated"})
    for name, first in graphs[0].items():
        assert len(first) == 2, name
        assert all(other[name] == first for other in graphs[1:]), name


def test_collectives_are_functional_and_named_alike() -> None:
    with fake_job(1, 4):
        mesh = sw.init_mesh(dp=2, tp=2)
        text = "\n".join(graphs_of(functions(mesh)["softmax"], mesh))
    assert re.search(rf"_c10d_functional.all_reduce.default\(\w+, 'max', 'sw:{mesh.fingerprint}:tp'\)", text), text
    assert "wait_tensor" in text


def on_a_device_mesh() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.full((4, 16), float(dist.get_rank()))

    on = sw.Mesh.from_torch(mesh)

    def outside(local: torch.Tensor) -> Any:
        return DTensor.from_local(local, on, [Shard(0), Shard(1)], run_check=False).sum().full_tensor()

    return float(torch.compile(outside, backend="aot_eager", fullgraph=True)(local))


def test_groups_of_a_device_mesh_are_made_when_it_is_traced(pool: Any) -> None:
    assert pool(4).run(on_a_device_mesh) == [64.0 * (0 + 1 + 2 + 3)] * 4


def test_tracing_is_no_communication() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    x, w = inputs(mesh)
    compiled = torch.compile(functions(mesh)["softmax"], backend="aot_eager", fullgraph=True)
    with sw.trace_comm() as log:
        compiled(x, w)
    assert not log.records


# ── random numbers ────────────────────────────────────────────────────────────────────────────────────────────────────


def noisy(x: DTensor) -> list[DTensor]:
    """Random numbers of many kinds."""
    filled = [x.clone().normal_(1, 2), x.clone().uniform_(1, 2), torch.nn.init.kaiming_uniform_(x.clone()), torch.randn_like(x)]
    chosen = [torch.multinomial(x.abs(), 3), torch.multinomial(x.abs(), 3, replacement=True), torch.randint_like(x, 9)]
    made = [sw.randn(8, 5, mesh=x.mesh, placements=[Shard(1), Shard(0)]), sw.randperm(20, mesh=x.mesh)]
    return [F.dropout(x, 0.5), torch.rand_like(x), torch.bernoulli(x / 2), *filled, *chosen, *made]


def as_before(function: Any, compiled: Any, x: DTensor) -> None:
    """Two calls of a compiled function draw what two calls of it as it is draw: each other numbers, bit by bit the same."""
    torch.manual_seed(3)
    want = [y.full_tensor() for _ in range(2) for y in function(x)]
    torch.manual_seed(3)
    got = [y.full_tensor() for _ in range(2) for y in compiled(x)]
    assert not any(map(torch.equal, got[: len(got) // 2], got[len(got) // 2 :]))
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), f"result {number} of {x!r}"


@pytest.mark.parametrize("how", ["aot_eager", "captured"])
def test_random_numbers_are_drawn_anew_in_every_call(how: str) -> None:
    compiled: Any = sw.capture(noisy) if how == "captured" else torch.compile(noisy, backend=how, fullgraph=True)
    as_before(noisy, compiled, sw.ones(7, 6, mesh=sw.init_mesh(dp=2, tp=2), placements=[Shard(0), Shard(1)]))


def test_random_numbers_that_inductor_fuses() -> None:
    def function(x: DTensor) -> list[DTensor]:
        return [F.dropout(x, 0.5), torch.rand_like(x)]

    x = sw.ones(5, 6, mesh=sw.init_mesh(tp=2), placements=[Shard(1)])
    counters["inductor"].clear()
    as_before(function, torch.compile(function, fullgraph=True), x)


def traced_numbers(table: Any) -> list[str]:
    """The operators of a program that draws on uneven shards and on even ones, for a compiler that has such a table."""
    mesh, found = sw.init_mesh(dp=2, tp=2), list[str]()
    x = sw.ones(8, 16, mesh=mesh, placements={"dp": Shard(0), "tp": Shard(1)}).requires_grad_()

    def keep(gm: GraphModule, given: Any) -> Any:
        found.append(gm.print_readable(print_output=False))
        return make_boxed_func(gm)

    backend = aot_autograd(fw_compiler=keep, decompositions=table)
    torch._dynamo.reset()
    torch.compile(lambda x: (F.dropout(x, 0.5) * x + torch.randn_like(x)).sum(), backend=backend, fullgraph=True)(x).backward()
    return found


def test_what_draws_is_the_same_on_every_rank_and_in_the_order_of_the_calls() -> None:
    fused = get_decompositions([torch.ops.aten.gelu_backward])
    for table in ({}, fused):
        graphs = []
        for rank in range(4):
            with fake_job(rank, 4):
                graphs.append(traced_numbers(table))
        assert all(other == graphs[0] for other in graphs)
        forward, backward = graphs[0]
        keys = re.findall(r"(\w+): \"i64\[2\]\".* = torch.ops.shardwise.random_key.default\((\w+), '[^']*'\)", forward)
        assert len(keys) == 2 and keys[0][1] == "None" and keys[1][1] == keys[0][0], forward
        assert "random_key" not in backward
        assert forward.count("torch.ops.shardwise.draw.default(") == (1 if table else 2)


def test_shards_whose_shapes_nobody_can_compare() -> None:
    mesh = sw.init_mesh(tp=2)
    local = sw.Bundle([torch.ones(2), torch.ones(2)])
    even = torch.compile(lambda x: DTensor.from_local(x, mesh, [Shard(0)]), backend="aot_eager", fullgraph=True)(local)
    assert torch.equal(even.full_tensor(), torch.ones(4))
    check = torch.compile(
        lambda x: DTensor.from_local(x, mesh, [Shard(0)], run_check=True), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"give shape=, or leave run_check out"):
        check(local)


# ── modules and optimizers ────────────────────────────────────────────────────────────────────────────────────────────


def train(axes: dict[str, int], how: str) -> list[float]:
    """The losses of a small model, trained for three steps."""
    mesh = sw.init_mesh(**axes)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
    cuts: list[Any] = [{"tp": Shard(0)}, {"tp": Shard(0)}, {}, {}, {"tp": Shard(1)}, {}]
    for (name, parameter), placements in zip(list(model.named_parameters()), cuts, strict=True):
        owner, _, leaf = name.rpartition(".")
        spread = sw.distribute_tensor(parameter.detach(), mesh, placements)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(spread))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    draw = torch.Generator().manual_seed(1)
    x = sw.distribute_tensor(torch.randn(8, 16, generator=draw), mesh, {mesh.axes[0]: Shard(0)})
    target = sw.distribute_tensor(torch.randint(8, (8,), generator=draw), mesh, {mesh.axes[0]: Shard(0)})

    def loss(x: DTensor, target: DTensor) -> Any:
        return F.cross_entropy(model(x), target)

    def clip() -> Any:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    step: Any = optimizer.step
    if how == "captured":
        loss, clip, step = sw.capture(loss), sw.capture(clip), sw.capture(step)
    elif how != "eager":
        words = {"backend": how, "fullgraph": True}
        loss, clip, step = torch.compile(loss, **words), torch.compile(clip, **words), torch.compile(step, backend=how)
    losses = []
    for _ in range(3):
        value = loss(x, target)
        value.backward()
        norm = clip()
        step()
        optimizer.zero_grad()
        losses += [value.item(), norm.item()]
    return losses


def compare_training(axes: dict[str, int], how: str) -> float:
    torch._dynamo.reset()
    want, got = train(axes, "eager"), train(axes, how)
    return max(abs(a - b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("how", ["aot_eager", "captured"])
@pytest.mark.parametrize(("ranks", "axes"), [(2, {"tp": 2}), (4, {"dp": 2, "tp": 2})], ids=str)
def test_training_with_optimizer_and_clipping(ranks: int, axes: dict[str, int], how: str, pool: Any) -> None:
    assert max(pool(ranks).run(compare_training, axes, how)) < 1e-4


def test_training_with_inductor(pool: Any) -> None:
    assert max(pool(2).run(compare_training, {"tp": 2}, "inductor")) < 1e-4


def collectives_of_parts() -> list[list[str]]:
    """What this rank communicates in the forward and in the backward of a function, with shards of different sizes."""
    mesh, parts = sw.init_mesh(a=2, b=2), []
    x = sw.distribute_tensor(torch.randn(2), mesh, {"a": Shard(0), "b": Shard(0)}).requires_grad_()

    def function(x: Any) -> tuple[Any, ...]:
        y = torch.sigmoid(x)
        row = y.unsqueeze(0)
        ratio = row / (1 + row.square())
        return torch.tanh(row.t()) @ torch.tanh(row), ratio / (1 + row.square()), y.square()

    def record(gm: GraphModule, _: Any) -> GraphModule:
        parts.append([str(node.target) for node in gm.graph.nodes if "c10d" in str(node.target)])
        return gm

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    sum(out.sum() for out in torch.compile(function, backend=backend, fullgraph=True)(x)).backward()
    return parts


def test_every_rank_communicates_alike_in_both_parts(pool: Any) -> None:
    """What is kept for the backward depends on sizes, so on the rank; what is communicated there does not."""
    forward, backward = (first := pool(4).run(collectives_of_parts, timeout=60.0))[0]
    assert forward and backward and all(found == first[0] for found in first)


def demo_losses(how: str) -> list[float]:
    """The losses of the demo's first two steps, on this rank."""
    torch._dynamo.reset()
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    demo = importlib.import_module("train_gpt")
    mesh = sw.init_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    model = demo.distribute(demo.GPT(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=demo.RATE, foreach=True)

    def loss_of(tokens: DTensor, targets: DTensor) -> Any:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    step: Any = optimizer.step
    if how == "captured":
        loss_of, step = sw.capture(loss_of), sw.capture(step)
    elif how != "eager":
        loss_of, step = torch.compile(loss_of, backend=how, fullgraph=True), torch.compile(step, backend=how)
    losses = []
    for _, batch in zip(range(2), demo.batches(), strict=False):
        tokens, targets = (sw.distribute_tensor(part, mesh, {"dp": Shard(0)}) for part in (batch[:, :-1], batch[:, 1:]))
        loss = loss_of(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["aot_eager", pytest.param("captured", marks=pytest.mark.slow)])
def test_the_demo_is_one_graph(how: str, pool: Any) -> None:
    want, got = pool(4).run(demo_losses, "eager"), pool(4).run(demo_losses, how)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=1e-4, rtol=1e-4)


# ── sizes that change ─────────────────────────────────────────────────────────────────────────────────────────────────

CHANGING: dict[str, Any] = {
    "flat": lambda x, w: F.linear(x, w.t()).view(-1),
    "mean": lambda x, w: (x @ w).mean(0),
    "softmax": lambda x, w: torch.softmax(x @ w, 0),
    "normed": lambda x, w: F.layer_norm(x @ w, (32,)),
    "joined": lambda x, w: torch.cat([x @ w, x @ w], 1),
    "sliced": lambda x, w: (x @ w)[:, 2:8].sum(0),
    "expanded": lambda x, w: (x @ w)[:, None].expand(-1, 3, -1) * 2,
    "heads": lambda x, w: (x @ w).unflatten(1, (4, 8)).transpose(1, 2).reshape(-1, 8),
    "moved": lambda x, w: (x @ w).redistribute(placements=[Shard(1), *[Replicate()] * (x.mesh.ndim - 1)]).exp(),
    "gathered": lambda x, w: (x @ w).redistribute(placements=[Replicate()] * x.mesh.ndim).exp(),
    "extreme": lambda x, w: (x @ w).max(0)[0],
    "running": lambda x, w: (x @ w).cumsum(0),
    "updated": lambda x, w: (x @ w).clone().mul_(2).add_(1),
    "uneven": lambda x, w: (x @ w)[1:] * 2,
}


def change_sizes(axes: dict[str, int], dynamic: bool | None) -> dict[str, int]:
    """How many graphs each function needed for four numbers of rows; raises where a value is wrong."""
    mesh, found = sw.init_mesh(**axes), {}
    for name, function in CHANGING.items():
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for rows in (8, 12, 20, 16):
            got = values(lambda x, w, c=compiled: c(x, w).square().sum(), mesh, rows)
            assert_same(got, values(lambda x, w, f=function: f(x, w).square().sum(), mesh, rows), f"{name}, {rows} rows")
        found[name] = counters["stats"]["unique_graphs"]
    return found


@pytest.mark.parametrize(("ranks", "axes"), [(2, {"tp": 2}), pytest.param(4, {"dp": 2, "tp": 2}, marks=pytest.mark.slow)])
def test_sizes_may_change(ranks: int, axes: dict[str, int], pool: Any) -> None:
    for dynamic, most in ((True, 1), (None, 2)):
        for found in pool(ranks).run(change_sizes, axes, dynamic):
            cut = {name: found.pop(name) for name in ("uneven", "sliced", "joined")}
            assert max(cut.values()) <= 4, (
                cut
            )  # parts of a sharded dim have shards of given sizes, and they are of one size only
            assert max(found.values()) <= most, found


def write_after_cutting(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a sharding of a tensor holds after the tensor was written to; the memory of the two must not be the same."""

    def function(x: DTensor) -> DTensor:
        cut = x.redistribute(placements=[Shard(0)])
        x.mul_(10.0)
        return cut

    x = sw.distribute_tensor(torch.arange(1.0, 1.0 + rows), sw.init_mesh(tp=2), [Replicate()])
    cut = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    return cut.full_tensor(), x.full_tensor()


def test_a_shard_does_not_follow_its_source(pool: Any) -> None:
    for rows in (6, 5, 7):  # the second is traced for all sizes, until its uneven shards say that it cannot be
        for cut, x in pool(2).run(write_after_cutting, rows):
            assert torch.equal(10 * cut, x) and x.tolist() == [10.0 * (i + 1) for i in range(rows)]


@pytest.mark.parametrize("dim", [0, 1])
def test_marked_dims(dim: int) -> None:
    with fake_job(0, 2):
        mesh = sw.init_mesh(tp=2)
        counters.clear()
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: torch.relu(x).sum(1 - dim), backend="aot_eager", fullgraph=True)
        for size in (8, 12, 20):
            plain = torch.randn(size, 16) if dim == 0 else torch.randn(8, size)
            x = sw.distribute_tensor(plain, mesh, [Shard(0)])
            torch._dynamo.mark_dynamic(x, dim)
            torch.testing.assert_close(compiled(x).to_local(), torch.relu(x.to_local()).sum(1 - dim))
        assert counters["stats"]["unique_graphs"] == 1
