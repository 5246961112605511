"""What the logs say of communication, what the policy does about it, and which world a mesh lives in."""

import _thread
import contextlib
import threading
import warnings

import pytest
import torch

from shardwise.comm import (
    Bundle,
    PerRank,
    check,
    communication,
    init_mesh,
    note,
    simulate,
    trace_comm,
    transport,
)
from shardwise.errors import ArgumentError, CommunicationError, MeshError

MESH = init_mesh(dp=2, tp=3, one=1)


def bundle(*shape):
    return Bundle(torch.ones(shape) for _ in MESH.ranks)


# ── trace_comm ──

CALLS = {
    "all_reduce": (lambda world: world.all_reduce(bundle(6), "sum", MESH, ("tp",)), ("tp",), 2 * 24 * 2 // 3),
    "all_gather": (lambda world: world.all_gather(bundle(6), MESH, ("dp", "tp")), ("dp", "tp"), 24 * 5),
    "reduce_scatter": (lambda world: world.reduce_scatter(bundle(6), "sum", MESH, ("tp",)), ("tp",), 24 * 2 // 3),
    "all_to_all": (lambda world: world.all_to_all(bundle(6), (2,) * 3, (2,) * 3, MESH, ("tp",)), ("tp",), 16),
    "broadcast": (lambda world: world.broadcast(bundle(6), MESH), ("dp", "tp", "one"), 24),
    "shapes": (lambda world: world.shapes(bundle(6), MESH), ("dp", "tp", "one"), 16 * 5),
}


@pytest.mark.parametrize("kind", CALLS)
def test_each_collective_is_recorded(kind):
    call, axes, size = CALLS[kind]
    with trace_comm() as log:
        call(transport(MESH, "aten.mm"))
    (record,) = log.records
    assert (record.kind, record.axes, record.bytes, record.operator) == (kind, axes, size, "aten.mm")
    assert record.source == f"test_log.py:{call.__code__.co_firstlineno}"
    assert log.counts() == {kind: 1}
    assert log.bytes == size


def test_the_worst_rank_counts():
    uneven = Bundle(torch.ones(place) for place in range(6))
    with trace_comm() as log:
        transport(MESH).all_reduce(Bundle(torch.ones(1 + place // 3) for place in range(6)), "sum", MESH, ("tp",))
        # every place sends all it has to the last of its group
        receive = PerRank(lambda place: tuple(range(place - 2, place + 1)) if place % 3 == 2 else (0, 0, 0))
        transport(MESH).all_to_all(uneven, PerRank(lambda place: (0, 0, place)), receive, MESH, ("tp",))
    assert [record.bytes for record in log.records] == [2 * 8 * 2 // 3, 4 * (3 + 4)]


def test_a_group_of_one_and_local_steps_are_not_recorded():
    with trace_comm() as log:
        world = transport(MESH)
        world.all_reduce(bundle(2), "sum", MESH, ("one",))
        world.all_to_all(bundle(2), (2,), (2,), MESH, ("one",))
        world.each(torch.neg, MESH, bundle(2))
        world.number(PerRank(lambda place: place), MESH)
        world.plain(world.replicate(torch.ones(2), MESH))
    assert log.records == []


def test_logs_nest_and_end():
    with trace_comm() as outer:
        transport(MESH).broadcast(bundle(2), MESH)
        with trace_comm() as inner:
            transport(MESH).broadcast(bundle(2), MESH)
    transport(MESH).broadcast(bundle(2), MESH)
    assert (len(outer.records), len(inner.records)) == (2, 1)
    assert type(transport(MESH)).__name__ == "Simulated"


def test_a_log_has_what_threads_communicate_that_have_none_of_their_own():
    def work(own):
        with trace_comm() if own else contextlib.nullcontext():
            transport(MESH).broadcast(bundle(2), MESH)

    def in_thread(function, *args):
        thread = threading.Thread(target=function, args=args)
        thread.start()
        thread.join()

    with trace_comm() as log:
        in_thread(work, False)
    assert log.counts() == {"broadcast": 1}
    logs = []

    def alone():
        with trace_comm() as log:
            in_thread(work, True)
            logs.append(log)

    in_thread(alone)
    assert logs[0].records == [], "the thread is not the main one's, nor in a copy of its context"


def test_a_thread_of_autograd_writes_into_the_log_of_its_caller():
    """Stands in for the threads that torch starts for CUDA: not started by Python, so with no context of their own."""
    done = threading.Event()

    def backward():
        transport(MESH).broadcast(bundle(2), MESH)
        done.set()

    with trace_comm() as log:
        _thread.start_new_thread(backward, ())
        assert done.wait(60)
    assert log.counts() == {"broadcast": 1}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return transport(MESH, "backward").all_reduce(grad, "sum", MESH, ("dp",))


def test_backward_is_recorded():
    x = Bundle([torch.ones(2)] * 6, requires_grad=True)
    with trace_comm() as log:
        Twice.apply(x).sum().backward()
    assert [(record.kind, record.operator) for record in log.records] == [("all_reduce", "backward")]
    assert x.grad.shards[0].tolist() == [2.0, 2.0]


def test_the_log_prints_as_a_table():
    with trace_comm() as log:
        transport(MESH, "aten.mm").all_gather(bundle(300, 2), MESH, ("tp",))
        note("fallbacks", "aten.sort")
        note("fallbacks", "aten.sort")
    assert log.fallbacks == ["aten.sort", "aten.sort"]
    head, row, total, gathered = str(log).splitlines()
    assert head.split() == ["kind", "axes", "bytes", "operator", "source"]
    assert row.split()[:4] == ["all_gather", "tp", "4,800", "aten.mm"]
    assert total == "1 collectives, 4,800 bytes"
    assert gathered == "gathered for want of a rule: aten.sort (x2)"


# ── communication ──


def never():
    raise AssertionError("described for nothing")


def test_auto_lets_everything_pass():
    check("aten.mm", 10**9, never)
    with communication("forbid"), communication("auto"):
        check("aten.mm", 10**9, never)


def test_forbid_names_operator_bytes_layouts_and_remedy():
    with communication("forbid"), pytest.raises(CommunicationError) as caught:
        check("aten.mm", 4096, lambda: "f32[8, 16@tp]")
    text = str(caught.value)
    assert text.startswith("aten.mm at test_log.py:")
    assert "communicates 4,096 bytes: f32[8, 16@tp]. Redistribute its inputs" in text
    assert 'sw.communication("auto")' in text


def test_over_bytes():
    with communication("forbid", over_bytes=1024):
        check("aten.mm", 1024, never)
        with pytest.raises(CommunicationError, match=r"1,025 bytes \(over_bytes=1,024\)"):
            check("aten.mm", 1025, lambda: "f32[8]")


def test_warn_warns_once_for_each_operator_and_line():
    with warnings.catch_warnings(record=True) as caught, communication("warn"):
        warnings.simplefilter("always")
        for _ in range(3):
            check("aten.mm", 1, lambda: "f32[8]")
            check("aten.add", 1, lambda: "f32[8]")
        check("aten.mm", 1, lambda: "f32[8]")
    assert [str(warning.message).split()[0] for warning in caught] == ["aten.mm", "aten.add", "aten.mm"]
    assert caught[0].filename == __file__
    assert caught[0].lineno + 1 == caught[1].lineno


def test_an_unknown_mode_is_refused():
    with (
        pytest.raises(ArgumentError, match=r"communication: mode is one of 'auto', 'warn', 'forbid', got 'never'"),
        communication("never"),
    ):
        pass


# ── worlds ──


def test_plain_python_simulates_the_mesh():
    assert (MESH.world, MESH.device, MESH.ranks) == ("simulated", "cpu", tuple(range(6)))
    assert init_mesh(dp=2, ranks=[4, 1]).ranks == (4, 1)
    assert init_mesh(dp=2, tp=3, one=1) is MESH


def test_a_simulated_world_has_so_many_ranks():
    with simulate(4):
        assert init_mesh(dp=2, tp=2).world == "simulated"
        with pytest.raises(MeshError, match=r"mesh \(dp=2, tp=4\) has 8 ranks, the world has 4; .*sw\.simulate\(n\)"):
            init_mesh(dp=2, tp=4)
        with pytest.raises(MeshError, match=r"mesh \(dp=2\) asks for ranks \[4\], the world has ranks 0 to 3"):
            init_mesh(dp=2, ranks=[3, 4])
    assert init_mesh(dp=2, tp=4).size() == 8


def test_meshes_that_cannot_be():
    with pytest.raises(ArgumentError, match="simulate: ranks is an integer of at least 1, got 0"), simulate(0):
        pass
    with pytest.raises(MeshError, match="at least one axis"):
        init_mesh()
    with pytest.raises(ArgumentError, match="init_mesh: axis dp is an integer from 1 to 1,048,576, got 0"):
        init_mesh(dp=0)
