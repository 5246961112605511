"""Graph passes: on a fake job it is counted where each applies and where it must not; on Gloo ranks programs give the same.

A program is traced once, with its moves whole, and runs both as it was traced and improved.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
import shardwise.programs.passes.order
from shardwise import DTensor, Mesh, Partial, Replicate, Shard
from shardwise._torch.compiler import local_graphs
from shardwise.comm.tracing import tracing
from shardwise.layouts.text import form_of
from shardwise.programs.passes.all_reduces import SMALL, bucket
from shardwise.programs.passes.graph import WAIT, is_view, order
from shardwise.programs.passes.moves import MOVE, expand_moves, merge_moves
from shardwise.programs.passes.order import _improve, improve, inductor_pass, wait_late
from shardwise.programs.training_step import align_leaves
from tests.conftest import SEED
from tests.helpers.random_programs import describe, programs
from tests.helpers.random_programs import run as run_steps

R, aten = Replicate(), torch.ops.aten
WHOLE = [R, R]
BOTH = [Shard(0), Shard(1)]
ROWS = [Shard(0), R]
COLUMNS = [Shard(1), R]


class Traced:
    """A function over DTensors whose local programs run as they were traced, or (if `better`) improved."""

    def __init__(self, function: Callable[..., Any], dynamo: bool = False) -> None:
        self.better = True
        self.plain: list[GraphModule] = []
        self.improved: list[GraphModule] = []
        self.changes: list[dict[str, int]] = []
        compiled = torch.compile(function, backend=self._backend, fullgraph=True, dynamic=False)
        self.call = compiled if dynamo else functools.partial(self._without_dynamo, function)

    def _backend(self, gm: Any, inputs: Any) -> Any:
        with tracing(whole_moves=True):
            return local_graphs(align_leaves(gm, inputs) if isinstance(gm, GraphModule) else gm, inputs, self._build)

    def _without_dynamo(self, function: Callable[..., Any], *inputs: Any) -> Any:
        class Program(torch.nn.Module):
            def forward(self, *given: Any) -> Any:
                found = function(*given)
                return found if isinstance(found, tuple) else (found,)

        self.call = self._backend(Program(), list(inputs))
        return self.call(*inputs)

    def _build(self, part: str, gm: GraphModule) -> Callable[[list[Any]], Any]:
        plain = copy.deepcopy(gm)
        self.changes.append(improve(gm))
        self.plain.append(plain)
        self.improved.append(gm)

        def run(values: list[Any]) -> Any:
            return (gm if self.better else plain)(*values)

        return run


def starts(gm: GraphModule) -> Counter[str]:
    """The collectives of a program, and moves left whole, by name."""
    return Counter(sequence(gm))


def sequence(gm: GraphModule) -> list[str]:
    names = [str(node.target).split(".") for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ours = [name for space, name, _ in names if space in ("_c10d_functional", "shardwise")]
    return [name for name in ours if name not in ("wait_tensor", "step")]


def expanded(gm: GraphModule) -> GraphModule:
    """A program with steps for moves, and nothing else improved."""
    gm = copy.deepcopy(gm)
    expand_moves(gm.graph)
    gm.recompile()
    return gm


# ── programs ──


def inputs(mesh: Mesh) -> list[DTensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((8, 16), {"dp": Shard(0)}),
        ((16, 32), {"tp": Shard(1)}),
        ((16,), {}),
        ((1, 6), {"tp": Shard(1)}),
    ]
    made = [sw.distribute_tensor(torch.randn(shape, generator=generator), mesh, placed) for shape, placed in shapes]
    return [x.requires_grad_() for x in made]


def row_sums(x: DTensor, w: DTensor) -> Tensor:
    """f32[8@dp, 1], reduced over tp."""
    return (x @ w).sum(1, keepdim=True).redistribute(placements=ROWS)


def over_tp(x: DTensor, w: DTensor) -> Tensor:
    """f32[8@dp, 32], reduced over tp."""
    half = x.redistribute(placements=BOTH) @ w.redistribute(placements=[R, Shard(0)])
    return half.redistribute(placements=ROWS)


def total(x: Tensor) -> Tensor:
    return x.square().sum().redistribute(placements=WHOLE)


def same_move_twice(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(x.redistribute(placements=WHOLE).sin()) + total(x.redistribute(placements=WHOLE).cos())


def gathered_and_cut(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = (x @ w).redistribute(placements=WHOLE).redistribute(placements=BOTH)
    return total(y.sin())


def gathered_and_cut_otherwise(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(x.redistribute(placements=WHOLE).redistribute(placements=COLUMNS).sin())


def gathered_for_another(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = x.redistribute(placements=WHOLE)
    return total(y.sin()) + total(y.redistribute(placements=COLUMNS))


def gathered_for_another_and_cut(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = x.redistribute(placements=WHOLE)
    return total(y.sin()) + total(y.redistribute(placements=ROWS).cos())


def pending_again(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = (x @ w).sum(0).redistribute(placements=WHOLE).redistribute(placements=[Partial(), R])
    return total((y * 2).tanh())


def two_sums(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total((over_tp(x, w) + 0.5 * over_tp(x, w.sin())).tanh())


def three_sums(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total((over_tp(x, w) - over_tp(x, w.sin()) / 4 + over_tp(x, w.cos())).tanh())


def slice_of_sum(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(over_tp(x, w)[:, 3:7].tanh())


def sum_of_sum(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(over_tp(x, w).neg().mean(1).tanh())


def joined_sums(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(torch.cat([over_tp(x, w), over_tp(x, w.sin())], 1).tanh())


def constant_times_sum(x: Any, w: Any, b: Any, v: Any) -> Any:
    scale = sw.full((1, 1), 3.0, mesh=x.mesh, placements=WHOLE)
    return total((over_tp(x, w) * scale).mean(1).tanh())


def through_tanh(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total((over_tp(x, w).tanh() + over_tp(x, w.sin()).tanh()).sin())


def plus_whole(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total((over_tp(x, w) + x.sum(1, keepdim=True)).mean(1).tanh())


def used_twice(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = over_tp(x, w)
    return total(y[:, 3:7].tanh()) * total(y.tanh())


def piece_times_sum(x: Any, w: Any, b: Any, v: Any) -> Any:
    """The factor is sharded over the group: every rank has another one."""
    return total((row_sums(x, w) * v).sum().tanh())


def norms(x: Any, w: Any, b: Any, v: Any) -> Any:
    return sum(total(y).sqrt() for y in (w, w.sin(), v, w.cos()))


def norm_after_norm(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(w / total(w).sqrt()).sqrt()


def large_between_norms(x: Any, w: Any, b: Any, v: Any) -> Any:
    large = sw.ones(512, 300, mesh=x.mesh, placements=WHOLE)
    scaled = large / total(w)
    return total(w.sin()) + total(scaled)


def gradients(x: Any, w: Any, b: Any, v: Any) -> Any:
    return total(((x + b).tanh() @ w).tanh()) + total(x.sum(1, keepdim=True) * v)


def maxima(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = (x * b).amax(0).redistribute(placements=WHOLE)
    return total(y[1:3].tanh()) * total(torch.softmax(x @ w, 1))


def uneven(x: Any, w: Any, b: Any, v: Any) -> Any:
    y = x[:7].redistribute(placements=ROWS)
    return total((y @ w).redistribute(placements=WHOLE).redistribute(placements=[R, Shard(0)]).tanh())


Counts = dict[str, int]
#: Each program with what its forward has (as traced, with steps for moves) and is left with.
MERGED: dict[Callable[..., Any], tuple[Counts, Counts]] = {
    same_move_twice: ({"all_gather_into_tensor": 2}, {"all_gather_into_tensor": 1}),
    gathered_and_cut: ({"all_gather_into_tensor": 1, "all_reduce": 1}, {"all_reduce": 1}),
    gathered_and_cut_otherwise: ({"all_gather_into_tensor": 1, "all_reduce": 1}, {"all_to_all_single": 1, "all_reduce": 1}),
    gathered_for_another: ({"all_gather_into_tensor": 1, "all_reduce": 1},) * 2,
    gathered_for_another_and_cut: ({"all_gather_into_tensor": 1, "all_reduce": 1},) * 2,
    pending_again: (
        {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1, "all_reduce": 1},
        {"all_gather_into_tensor": 1, "all_reduce": 1},
    ),
}
ONE_AND_TOTAL = {"all_to_all_single": 1, "all_reduce": 2}
LATER: dict[Callable[..., Any], tuple[Counts, Counts]] = {
    two_sums: ({"all_to_all_single": 2, "all_reduce": 3}, {"all_to_all_single": 2, "all_reduce": 2}),
    three_sums: ({"all_to_all_single": 3, "all_reduce": 4}, {"all_to_all_single": 3, "all_reduce": 2}),
    slice_of_sum: (ONE_AND_TOTAL, ONE_AND_TOTAL),
    sum_of_sum: (ONE_AND_TOTAL, ONE_AND_TOTAL),
    joined_sums: ({"all_to_all_single": 2, "all_reduce": 3}, {"all_to_all_single": 2, "all_reduce": 2}),
    constant_times_sum: (ONE_AND_TOTAL, ONE_AND_TOTAL),
}
#: How many bytes the largest all-reduce then has of those that it had.
SHRUNK = {slice_of_sum: 8, sum_of_sum: 32, constant_times_sum: 32}
UNMOVED = [through_tanh, plus_whole, used_twice, piece_times_sum, maxima]
TOGETHER: dict[Callable[..., Any], tuple[Counts, Counts]] = {
    norms: ({"all_reduce": 4}, {"all_reduce": 1}),
    norm_after_norm: ({"all_reduce": 2}, {"all_reduce": 2}),
    large_between_norms: ({"all_reduce": 2}, {"all_reduce": 2}),
}
COUNTS = {**MERGED, **LATER, **TOGETHER}
EVERY = [*MERGED, *LATER, *UNMOVED, *TOGETHER, gradients, uneven]
#: Which run on so many ranks: of two ranks, dp has one and tp has two.
SHARE: dict[int, list[Callable[..., Any]]] = {
    2: [*LATER, *UNMOVED, *TOGETHER, uneven],
    4: [same_move_twice, gathered_and_cut, gathered_and_cut_otherwise, pending_again, three_sums, norms, gradients, uneven],
}


# ── a fake job: which collectives are left ──


@pytest.fixture
def job() -> Iterator[Callable[[int], Mesh]]:
    """A mesh as one of four ranks sees it, none of which communicates."""

    def start(rank: int = 0) -> Mesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        return sw.init_mesh(dp=2, tp=2)

    yield start
    torch._dynamo.reset()
    dist.destroy_process_group()


def trace(function: Callable[..., Any], mesh: Mesh, dynamo: bool = False) -> Traced:
    """The program, and what became of it, forward and backward."""
    traced = Traced(function, dynamo)
    result = traced.call(*inputs(mesh))
    (result if dynamo else result[0]).backward()
    return traced


@pytest.mark.parametrize("function", EVERY, ids=lambda function: function.__name__)
def test_what_is_left_of_a_program(function: Callable[..., Any], job: Any) -> None:
    traced = trace(function, job())
    before, after = expanded(traced.plain[0]), traced.improved[0]
    if function in COUNTS:
        assert (starts(before), starts(after)) == COUNTS[function]
    if function in SHRUNK:
        assert largest(before) == largest(after) * SHRUNK[function]
    if function in UNMOVED:
        assert traced.changes[0]["reduce_later"] == 0
    for gm in traced.improved:
        check_form(gm)
        assert not any(improve(gm).values()), "what was improved stays as it is"


def largest(gm: GraphModule) -> int:
    return max(node.meta["val"].nbytes for node in gm.graph.nodes if "all_reduce" in str(node.target))


def check_form(gm: GraphModule) -> None:
    """Every node says what it gives, and waits are late."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda taken: taken.meta["val"])
            given = node.target(*args, **kwargs)
            assert order(given) == order(node.meta["val"]), node
            assert node.target is not WAIT or is_late(node), node


def is_late(node: Node) -> bool:
    """Whether nothing but other waits and views stands between a node and what first uses it."""
    after = node.next
    while after not in node.users and (after.target is WAIT or is_view(after)):
        after = after.next
    return after in node.users


def test_gradients_that_are_results_are_reduced_together(job: Any) -> None:
    traced = trace(gradients, job(), dynamo=True)
    assert traced.changes[1]["bucket"] > 0
    groups = Counter(node.args[2] for node in traced.improved[1].graph.nodes if "all_reduce" in str(node.target))
    assert groups and max(groups.values()) == 1


def test_every_rank_has_the_same_program(job: Any) -> None:
    for function in (norms, three_sums, gathered_and_cut_otherwise):
        codes = {"".join(gm.code for gm in trace(function, job(rank)).improved) for rank in range(4)}
        assert len(codes) == 1


def test_steps_say_what_they_serve(job: Any) -> None:
    (node, *_) = [n for n in trace(two_sums, job(), dynamo=True).improved[0].graph.nodes if "all_to_all" in str(n.target)]
    assert node.meta["shardwise"] == "redistribute: [_, @tp] → [@tp, _]"
    assert "in over_tp" in node.meta["stack_trace"]


def test_a_move_of_unequal_shards_stays_whole(job: Any) -> None:
    traced = trace(uneven, job(), dynamo=True)
    assert starts(traced.improved[0])["move"] > 0
    left_out = {"merge_moves", "reduce_later", "bucket"} - set(traced.changes[0])
    assert len(left_out) == 3, "sizes differ from rank to rank, and may decide nothing"


# ── programs that write ──


def written(mesh: Mesh, *steps: Callable[[Graph, Node], Any]) -> Graph:
    """A graph of a local tensor f32[4, 16] of f32[8@dp, 16], made by hand."""
    graph = Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.empty(4, 16)
    graph.output([step(graph, x) for step in steps])
    return graph


def call(target: Any, *args: Any) -> Callable[[Graph, Node], Node]:
    def make(graph: Graph, x: Node) -> Node:
        given = [graph.find_nodes(op="placeholder")[0] if arg == "x" else arg for arg in args]
        given = [list(graph.nodes)[arg.number] if isinstance(arg, Number) else arg for arg in given]
        node = graph.call_function(target, tuple(given))
        node.meta["val"] = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])[0]
        return node

    return make


class Number:
    """Stands for a node by its place."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_nothing_is_merged_or_awaited_across_a_write(job: Any) -> None:
    mesh = job()
    layouts = [sw.layout((8, 16), mesh, placed) for placed in (ROWS, WHOLE)]
    have, want = (form_of(layout).text for layout in layouts)
    gather = call(MOVE, "x", [8, 16], have, want, "test")
    write = call(aten.add_.Tensor, "x", 1)
    assert merge_moves(written(mesh, gather, gather)) == 1
    assert merge_moves(written(mesh, gather, write, gather)) == 0
    start = call(torch.ops._c10d_functional.all_gather_into_tensor.default, "x", 2, mesh.alias(("dp",)))
    graph = written(mesh, start, call(WAIT, Number(1)), call(aten.sin.default, "x"), write, call(aten.cos.default, "x"))
    assert wait_late(graph) == 1
    names = [str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function"]
    assert names == ["all_gather_into_tensor", "sin", "wait_tensor", "add_", "cos"]


def test_large_tensors_are_reduced_alone(job: Any) -> None:
    mesh = job()
    reduce = call(torch.ops._c10d_functional.all_reduce.default, "x", "sum", mesh.alias(("dp",)))
    for size, merged in ((SMALL // 4, 1), (SMALL // 4 + 1, 0)):
        graph = Graph()
        x = graph.placeholder("x")
        with torch._subclasses.FakeTensorMode():
            x.meta["val"] = torch.empty(size)
        made = [reduce(graph, x) for _ in range(2)]
        waits = []
        for node in made:
            waits.append(graph.call_function(WAIT, (node,)))
            waits[-1].meta["val"] = node.meta["val"]
        graph.output(waits)
        assert bucket(graph) == merged


# ── Inductor ──


# Inductor imports what torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_inductor_runs_the_passes_and_keeps_its_programs(job: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    left = []

    def seen(graph: Graph, *args: Any) -> None:
        _improve(graph, *args)
        left.append(starts(graph.owning_module))

    monkeypatch.setattr(shardwise.programs.passes.order, "_improve", seen)
    counters, mesh = torch._dynamo.utils.counters, job()
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        with tracing(whole_moves=True), torch.no_grad():
            compiled = torch.compile(norms, fullgraph=True, options={"post_grad_custom_pre_pass": inductor_pass()})
            compiled(*inputs(mesh))
        assert counters["inductor"]["fxgraph_cache_hit"] == hits
    assert left == [{"all_reduce": 1}]


# ── Gloo ranks: what comes out ──


def results(traced: Traced, better: bool, given: list[DTensor]) -> list[Tensor]:
    """What a program gives, and the gradients of its inputs."""
    traced.better = better
    found = traced.call(*given)
    found = list(found) if isinstance(found, list | tuple) else [found]
    wanted = [x for x in given if x.requires_grad]
    grads = torch.autograd.grad(found[0], wanted, allow_unused=True)
    memory = [g._local.untyped_storage().data_ptr() for g in grads if g is not None and g._local.numel()]
    assert len(set(memory)) == len(memory), "gradients share memory"
    every = [*found, *(torch.zeros(()) if g is None else g for g in grads)]
    return [x.detach().full_tensor() if isinstance(x, DTensor) else x.detach() for x in every]


def compare(ranks: int) -> list[str]:
    """Programs as traced and improved, and without any program; the names of those that ran."""
    mesh = sw.init_mesh(dp=ranks // 2, tp=2)
    ran = []
    for function in SHARE[ranks]:
        traced, given = Traced(function), inputs(mesh)
        eager = function(*given)
        for better in (False, True):
            found = results(traced, better, given)
            grads = torch.autograd.grad(eager, given, allow_unused=True, retain_graph=True)
            want = [eager, *(torch.zeros(()) if g is None else g for g in grads)]
            for one, other in zip(found, want, strict=True):
                other = other.detach().full_tensor() if isinstance(other, DTensor) else other
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, msg=lambda m, f=function: f"{f.__name__}: {m}")
        ran.append(function.__name__)
    return ran


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_improved_programs_give_the_same(ranks: int, pool: Any) -> None:
    assert pool(ranks).run(compare, ranks) == [[function.__name__ for function in SHARE[ranks]]] * ranks


@st.composite
def moving_programs(draw: Any) -> Any:
    """A program of `tests.helpers.random_programs`, some of whose values are moved to another layout, some twice."""
    axes, given, layouts, steps = draw(programs([{"a": 2}]))
    moves = []
    for _ in steps:
        count = draw(st.sampled_from([0, 0, 1, 2]))
        moves.append([draw(st.sampled_from(["replicate", "partial", "first", "last"])) for _ in range(count)])
    return axes, given, layouts, steps, moves


def moved(x: Any, words: list[str]) -> Any:
    for word in words:
        last = x.ndim - 1
        options = {"replicate": R, "partial": Partial(), "first": Shard(0), "last": Shard(last)}
        x = x.redistribute(placements=[options[word]]) if x.ndim or word in ("replicate", "partial") else x
    return x


def random_programs(count: int) -> tuple[list[list[str]], Counter[str]]:
    """Run random programs as traced and improved; the collectives of each, and what the passes changed in all of them."""
    ran, changes = [], Counter[str]()

    @seed(SEED)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(moving_programs())
    def one(program: Any) -> None:
        axes, given, layouts, steps, moves = program
        note(describe(axes, given, layouts, steps) + f"\nmoves {moves}")
        mesh = sw.init_mesh(**axes)
        spread = [sw.distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, layouts, strict=True)]

        def function(*values: Any) -> Any:
            made = [(name, lambda *of, f=f, m=m: moved(f(*of), m), of) for (name, f, of), m in zip(steps, moves, strict=True)]
            pool = run_steps(made, list(values))
            every = [torch.tanh(value).square().sum().redistribute(placements=[R]) for value in reversed(pool)]
            return functools.reduce(torch.add, every), *(value.detach() for value in pool[len(values) :])

        traced = Traced(function)
        plain, improved = (results(traced, better, spread) for better in (False, True))
        for before, after in zip(plain, improved, strict=True):
            torch.testing.assert_close(after, before, atol=2e-4, rtol=2e-3, equal_nan=True)
        ran.append([name for gm in traced.improved for name in sequence(gm)])
        for change in traced.changes:
            changes.update(change)

    one()
    return ran, changes


def test_random_programs_give_the_same_improved(pool: Any) -> None:
    (ran, changes), (others, _) = pool(2).run(random_programs, 10)
    assert len(ran) == 10
    assert ran == others, "ranks communicate differently"
    assert all(changes.values()), changes
