"""Every verb of the transport on Gloo ranks gives what the simulated transport gives on the same data."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import Bundle, PerRank, Processes, Simulated, communication, init_mesh, trace_comm, transport
from shardwise.comm.absent import Absent
from shardwise.errors import MeshError, WorldError
from shardwise.layouts.mesh import Mesh
from tests.helpers import ended_job as ended

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTS, *FLOATS, *COMPLEX]
NUMBERS = ("sum", "product", "max", "min")
KINDS = {
    **dict.fromkeys([torch.bool, *INTS], (*NUMBERS, "band", "bor", "bxor")),
    **dict.fromkeys(FLOATS, NUMBERS),
    **dict.fromkeys(COMPLEX, ("sum", "product")),
}

# axes and sizes, ranks, and the axes of the collectives
CASES = [
    ({"tp": 2}, (0, 1), ("tp",)),
    ({"dp": 2, "one": 1}, (1, 0), ("dp", "one")),
    ({"dp": 2, "tp": 2}, (0, 1, 2, 3), ("tp",)),
    ({"dp": 2, "tp": 2}, (0, 1, 2, 3), ("dp",)),
    ({"dp": 2, "tp": 2}, (0, 1, 2, 3), ("dp", "tp")),
    ({"dp": 2, "tp": 2}, (2, 0, 3, 1), ("dp",)),
    ({"dp": 2, "tp": 2}, (2, 0, 3, 1), ("dp", "tp")),
    ({"dp": 4, "one": 1}, (0, 1, 2, 3), ("one",)),
]


def mesh_of(sizes, ranks, world):
    return Mesh(sizes, sizes.values(), ranks, "cpu", world)


def data(place, dtype, shape=(8, 3)):
    """Small whole numbers, so that every order of summing gives the same."""
    make = torch.Generator().manual_seed(place)
    x = torch.randint(-3, 4, shape, generator=make)
    if dtype is torch.bool or dtype is torch.uint8:
        return x.abs().to(dtype)
    return x.to(dtype) * (1 + 2j) if dtype.is_complex else x.to(dtype)


def bundle_of(mesh, function):
    return Bundle(function(place) for place in range(len(mesh.ranks)))


def here(mesh):
    return mesh.place(dist.get_rank())


def every_verb(world, mesh, axes, local):
    """Each verb's result by name; `local(function of a place)` makes a local value."""
    found = {}
    for dtype in DTYPES:
        x = local(lambda place, dtype=dtype: data(place, dtype))
        for kind in KINDS[dtype]:
            found["all_reduce", kind, dtype] = world.all_reduce(x, kind, mesh, axes)
            found["reduce_scatter", kind, dtype] = world.reduce_scatter(x, kind, mesh, axes)
        found["all_gather", dtype] = world.all_gather(x, mesh, axes)
        found["broadcast", dtype] = world.broadcast(x, mesh)
        flat = local(lambda place, dtype=dtype: data(place, dtype, (sum(send(mesh, axes).at(place)),)))
        found["all_to_all", dtype] = world.all_to_all(flat, send(mesh, axes), receive(mesh, axes), mesh, axes)
    found |= odd_inputs(world, mesh, axes, local)
    return found | what_does_not_communicate(world, mesh, local)


def send(mesh, axes):
    """The first place sends nothing at all, and the others unequal counts, zeros among them."""
    size = len(mesh.peers(0, axes))
    return PerRank(lambda place: tuple(place * (place + i) % 4 for i in range(size)))


def receive(mesh, axes):
    def counts(place):
        index = mesh.peers(place, axes).index(place)
        return tuple(send(mesh, axes).at(peer)[index] for peer in mesh.peers(place, axes))

    return PerRank(counts)


def odd_inputs(world, mesh, axes, local):
    size = len(mesh.peers(0, axes))
    turned = local(lambda place: data(place, torch.float32, (3, 8)).t())
    conjugate = local(lambda place: data(place, torch.complex64).conj())
    negative = local(lambda place: data(place, torch.complex64).conj().imag)
    nan = local(lambda place: torch.tensor([float("nan"), 1.0, -0.5, 0.0, float("-inf"), 2.0]).roll(place))
    empty = local(lambda place: torch.empty(0, 3))
    scalar = local(lambda place: torch.tensor(place + 1.0))
    bits = local(lambda place: torch.tensor(1 << place))
    nothing = local(lambda place: torch.empty(0))
    large = local(lambda place: data(place, torch.float32, (5003,)))
    return {
        "turned": world.all_gather(turned, mesh, axes),
        "turned, reduced": world.reduce_scatter(turned, "sum", mesh, axes),
        "conjugate": world.all_gather(conjugate, mesh, axes),
        "conjugate, reduced": world.all_reduce(conjugate, "sum", mesh, axes),
        "negative": world.all_gather(negative, mesh, axes),
        "negative, reduced": world.all_reduce(negative, "sum", mesh, axes),
        "nan, max": world.all_reduce(nan, "max", mesh, axes),
        "nan, min": world.all_reduce(nan.half(), "min", mesh, axes),
        "empty, gathered": world.all_gather(empty, mesh, axes),
        "empty, reduced": world.all_reduce(empty, "sum", mesh, axes),
        "empty, scattered": world.reduce_scatter(empty, "sum", mesh, axes),
        "empty, broadcast": world.broadcast(empty, mesh),
        "nothing to anyone": world.all_to_all(nothing, (0,) * size, (0,) * size, mesh, axes),
        "large": world.all_reduce(large, "sum", mesh, axes),
        "large, max": world.all_reduce(large.long(), "max", mesh, axes),
        "scalar": world.all_reduce(scalar, "sum", mesh, axes),
        "bits": world.all_reduce(bits, "bor", mesh, axes),
        "scalar, broadcast": world.broadcast(scalar, mesh),
    }


def what_does_not_communicate(world, mesh, local):
    x = local(lambda place: data(place, torch.float32))
    tens = PerRank(lambda place: place * 10)
    first, second = world.each(lambda a, many: (a + many[0], many[1][0]), mesh, x, [tens, (x,)])
    return {
        "number": world.number(tens, mesh),
        "each, first": first,
        "each, second": second,
        "replicate": world.replicate(torch.arange(3), mesh),
    }


class Traceable(Processes):
    """The transport as a tracer sees it: by torch's own collectives."""

    def prepare(self, mesh, axes):
        return super().prepare(mesh, axes)._replace(hosts=None)


def run_every_verb(sizes, ranks, axes, traceable):
    mesh = mesh_of(sizes, ranks, "processes")
    place = here(mesh)
    world = Traceable() if traceable else transport(mesh)
    found = every_verb(world, mesh, axes, lambda function: function(place))
    assert all(x.is_contiguous() for name, x in found.items() if "each" not in name)
    return place, found


@pytest.mark.parametrize("traceable", [False, True], ids=["eager", "traceable"])
@pytest.mark.parametrize(("sizes", "ranks", "axes"), CASES)
def test_processes_and_simulation_agree(pool, sizes, ranks, axes, traceable):
    mesh = mesh_of(sizes, ranks, "simulated")
    expected = every_verb(Simulated(), mesh, axes, lambda function: bundle_of(mesh, function))
    for place, found in pool(len(ranks)).run(run_every_verb, sizes, ranks, axes, traceable):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            theirs = expected[name].shards[place]
            torch.testing.assert_close(
                value, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


def run_half_turned():
    mesh = init_mesh(dp=2, tp=2, ranks=[0, 1, 3, 2])
    return transport(mesh).all_gather(torch.tensor([dist.get_rank()]), mesh, ("tp",)).tolist()


def test_ranks_in_another_order(pool):
    assert pool(4).run(run_half_turned) == [[0, 1], [0, 1], [3, 2], [3, 2]]


def run_float_sum():
    mesh = init_mesh(dp=2, tp=2)
    torch.manual_seed(dist.get_rank())
    return transport(mesh).all_reduce(torch.randn(1001), "sum", mesh, mesh.axes)


def test_replicas_are_bitwise_equal(pool):
    results = pool(4).run(run_float_sum)
    assert all(torch.equal(result, results[0]) for result in results)


def run_shapes(ndim):
    mesh = init_mesh(dp=2, tp=2)
    rank = dist.get_rank()
    same = transport(mesh).shapes(torch.ones(rank, 2), mesh)
    return same, transport(mesh).shapes(torch.ones((1,) * (rank if ndim else 0)), mesh)


def test_shapes(pool):
    assert pool(4).run(run_shapes, 0) == [(((0, 2), (1, 2), (2, 2), (3, 2)), ((),) * 4)] * 4
    with pytest.raises(WorldError, match="differ in number of dims: 0 on rank 0") as caught:
        pool(4).run(run_shapes, 1)
    assert "on rank" in caught.value.__notes__[0]


def run_part_of_the_job():
    """A mesh of some ranks: they go on, the others get the shapes that the first of the mesh gets."""
    mesh = init_mesh(dp=2, ranks=[1, 3])
    world = transport(mesh)
    shape = PerRank(lambda place: (place + 2, 1))
    other = init_mesh(dp=2, ranks=[2, 3])
    verbs = [
        lambda: world.all_reduce(torch.ones(2), "sum", mesh, ("dp",)),
        lambda: world.all_gather(torch.ones(2), mesh, ("dp",)),
        lambda: world.reduce_scatter(torch.ones(2), "sum", mesh, ("dp",)),
        lambda: world.all_to_all(torch.ones(2), (1, 1), (1, 1), mesh, ("dp",)),
        lambda: world.broadcast(torch.ones(2), mesh),
        lambda: world.each(torch.neg, mesh, torch.ones(2)),
        lambda: world.each(torch.zeros, mesh, shape),
        lambda: world.number(PerRank(lambda place: place + 5), mesh),
        lambda: world.replicate(torch.ones(3), mesh),
        lambda: world.own(torch.ones(2, 1), mesh, shape),
        lambda: world.reseat(torch.ones(2), mesh, other, shape),
    ]
    return [shown(verb()) for verb in verbs], world.shapes(torch.ones(2), mesh)


def shown(x):
    return (x.mesh.ranks, tuple(x.shape)) if isinstance(x, Absent) else x.tolist()


def test_a_mesh_of_some_ranks(pool):
    told = pool(4).run(run_part_of_the_job)
    shapes = [(2,), (4,), (1,), (2,), (2,), (2,), (2, 1), (), (3,), (2, 1)]
    for rank in (0, 2):
        assert told[rank][0][:-1] == [((1, 3), shape) for shape in shapes] and told[rank][1] == ()
    ones, column = [1, 1], [[1], [1]]
    assert told[1][0][:-1] == [[2, 2], [1, 1, 1, 1], [2], ones, ones, [-1, -1], [[0], [0]], 5, [1, 1, 1], column]
    assert told[3][0][7] == 6 and told[3][1] == ((2,), (2,))
    reseated = [rank[0][-1] for rank in told]
    assert reseated[:2] == [((2, 3), (2, 1))] * 2, "a rank that leaves holds a shape"
    assert [len(reseated[2]), len(reseated[2][0])] == [2, 1], "a rank that is new gets memory"
    assert reseated[3] == ones, "a rank in both keeps what it holds"


def run_too_large():
    init_mesh(dp=2, tp=4)


def run_unknown_rank():
    init_mesh(dp=2, ranks=[0, 7])


def test_a_mesh_the_world_has_no_ranks_for(pool):
    with pytest.raises(MeshError, match=r"mesh \(dp=2, tp=4\) has 8 ranks, the world has 2; use smaller axes or start"):
        pool(2).run(run_too_large)
    with pytest.raises(MeshError, match=r"mesh \(dp=2\) asks for ranks \[7\], the world has ranks 0 to 1"):
        pool(2).run(run_unknown_rank)


def run_again(folder):
    """The same mesh and the same transport in one job, in none, and in the next job, whose ranks are turned around."""
    mesh = init_mesh(dp=2, tp=2)
    world, rank = Processes(), dist.get_rank()
    before = [world.all_gather(torch.tensor([rank]), mesh, axes).tolist() for axes in (("tp",), mesh.axes)]
    dist.destroy_process_group()
    try:
        world.all_gather(torch.tensor([rank]), mesh, ("tp",))
    except WorldError as error:
        between = str(error)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/turned", 4), rank=3 - rank, world_size=4)
    after = [world.all_gather(torch.tensor([rank]), mesh, axes).tolist() for axes in (("tp",), mesh.axes)]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/again", 4), rank=rank, world_size=4)
    return before, between, after, world.number(PerRank(lambda place: place), mesh).item()


def test_groups_are_made_anew_in_a_new_job(pool, tmp_path):
    results = pool(4).run(run_again, str(tmp_path))
    assert [before for before, *_ in results] == [[pair, [0, 1, 2, 3]] for pair in ([0, 1], [0, 1], [2, 3], [2, 3])]
    assert [after for _, _, after, _ in results] == [[pair, [3, 2, 1, 0]] for pair in ([1, 0], [1, 0], [3, 2], [3, 2])]
    assert all("lives in a torch.distributed job, and none is running" in between for _, between, _, _ in results)
    assert [number for *_, number in results] == [0, 1, 2, 3]


def test_a_job_ends_with_its_threads():
    """What the library keeps would keep them, and a thread of Gloo that still drops a tensor when Python ends aborts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ended.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def run_traced():
    mesh = init_mesh(dp=2, tp=2)
    world = transport(mesh)

    def program(x):
        x = world.all_reduce(x, "max", mesh, ("dp",)) + world.number(PerRank(lambda place: place * 10), mesh)
        x = world.reduce_scatter(world.all_gather(x > 0, mesh, ("tp",)), "bxor", mesh, ("tp",))
        return world.all_to_all(world.broadcast(x, mesh).float(), (2, 2), (2, 2), mesh, ("tp",))

    x = torch.arange(4.0) - dist.get_rank()
    graph = make_fx(program, tracing_mode="fake")(x)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=False)
    return graph.code, program(x).tolist(), graph(x).tolist(), compiled(x).tolist()


def test_a_traced_program_is_the_same_text_on_every_rank(pool):
    results = pool(4).run(run_traced)
    codes = {code for code, *_ in results}
    assert len(codes) == 1
    assert "shardwise.rank_number.default([0, 10, 20, 30]" in codes.pop()
    assert all(eager == traced == compiled for _, eager, traced, compiled in results)


TRACED = """
import torch, torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardwise as sw
from shardwise.comm import transport
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = sw.init_mesh(here=2, there=2)
def program(x):
    world = transport(mesh)
    return world.all_gather(world.all_reduce(x, "sum", mesh, ("here", "there")), mesh, ("there",))
print(make_fx(program, tracing_mode="fake")(torch.ones(2)).code)
"""


def run_elsewhere(code):
    init_mesh(here=2, there=2)
    names = {"torch": torch, "device": torch.device}
    exec(code, names)
    return names["forward"](None, torch.full((2,), float(dist.get_rank()))).tolist()


def test_a_graph_runs_where_nothing_was_traced(pool):
    code = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, check=True).stdout
    assert "_c10d_functional.all_reduce.default" in code
    assert pool(4).run(run_elsewhere, code) == [[6.0] * 4] * 4


def run_recorded():
    mesh = init_mesh(dp=2, tp=2)
    with trace_comm() as log, communication("auto"):
        world = transport(mesh, "aten.mm")
        world.all_gather(torch.ones(3, 2), mesh, ("tp",))
        world.all_reduce(torch.ones(8), "sum", mesh, ("dp", "tp"))
        world.shapes(torch.ones(8), mesh)
    return [(record.kind, record.axes, record.bytes, record.operator) for record in log.records], log.records[0].source


def test_processes_are_recorded(pool):
    for records, source in pool(4).run(run_recorded):
        assert records == [
            ("all_gather", ("tp",), 24, "aten.mm"),
            ("all_reduce", ("dp", "tp"), 48, "aten.mm"),
            ("shapes", ("dp", "tp"), 48, "aten.mm"),
        ]
        assert source.startswith("test_processes.py:")


def run_programs_recorded(how):
    """What is recorded of a function, and of it as a program, twice, in logs inside one another."""
    mesh = init_mesh(dp=2, tp=2)
    x = sw.ones(8, 4, mesh=mesh, placements=[Shard(0), Replicate()])
    y = sw.ones(4, 8, mesh=mesh, placements=[Replicate(), Shard(1)])

    def function(x, y):
        cut = y.redistribute(placements=[Shard(0), Replicate()])
        return x.sum(0).redistribute(placements=[Replicate(), Replicate()]), cut * 2, x.redistribute(placements=[Shard(1)] * 2)

    program = sw.capture(function) if how == "captured" else torch.compile(function, backend=how, fullgraph=True)
    found = []
    for call in (function, program, program):
        with trace_comm() as around, trace_comm() as log:
            call(x, y)
        assert log.records == around.records
        found.append(sorted((record.kind, record.axes, record.bytes) for record in log.records))
        sources = {record.source.partition(":")[0] for record in log.records}
    return *found, sources


@pytest.mark.parametrize("how", ["captured", "aot_eager"])
def test_programs_are_recorded(pool, how):
    for eager, first, second, sources in pool(4).run(run_programs_recorded, how):
        assert first == second == eager and len(eager) >= 3
        assert sources == {"test_processes.py"}
