"""Redistribution from one mesh to another brings each rank exactly what it lacks, from all that hold it alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, LayoutError, Mesh, MeshError, Partial, Replicate, Shard
from shardwise.comm import Simulated
from shardwise.errors import PlanError
from shardwise.layouts.from_placements import make_layout
from shardwise.layouts.layout import Factor, Layout, sharded, whole
from shardwise.planning.bounds import lower_bound
from tests.helpers.one_device import distributed, equal, local_shards

with sw.simulate(16):
    MESHES = {
        "4x2": sw.init_mesh(a=4, b=2),
        "2x4": sw.init_mesh(a=2, b=4),
        "4x2 in another order": sw.init_mesh(a=4, b=2, ranks=[7, 3, 1, 0, 2, 6, 5, 4]),
        "2x2x2": sw.init_mesh(x=2, y=2, z=2),
        "6": sw.init_mesh(c=6),
        "4": sw.init_mesh(c=4),
        "disjoint 8": sw.init_mesh(d=8, ranks=range(8, 16)),
        "3x2 partly the same": sw.init_mesh(a=3, b=2, ranks=range(4, 10)),
        "one": sw.init_mesh(o=1, ranks=[5]),
    }
A, B, SIX, FOUR, FAR = (MESHES[name] for name in ("4x2", "2x4", "6", "4", "disjoint 8"))
#: from, to: the other pairs are sampled less
NAMED = [("4x2", "2x4"), ("4x2", "4x2 in another order"), ("2x4", "6"), ("2x4", "4"), ("4", "2x4"), ("2x2x2", "disjoint 8")]


def layouts(shape: tuple[int, ...], mesh: Mesh, partial: bool = False) -> Iterator[Layout]:
    """Every placement of every axis in every order of axes, and some that placements cannot say."""
    options = [Replicate(), *(Shard(dim) for dim in range(len(shape))), *([Partial("sum")] if partial else [])]
    for order in itertools.permutations(mesh.axes):
        for placements in itertools.product(options, repeat=mesh.ndim):
            yield make_layout(shape, mesh, dict(zip(order, placements, strict=True)))
    first, others = mesh.axes[0], [[whole(n)] for n in shape[1:]]
    if shape:
        lopsided = (*(0,) * (mesh.axis_sizes[first] - 1), shape[0])
        yield Layout.of(mesh, [[Factor(shape[0], (first,), lopsided)], *others])
        if shape[0] % 2 == 0:
            yield Layout.of(mesh, [[whole(2), sharded(shape[0] // 2, (first,), mesh)], *others])


def pairs(shape: tuple[int, ...], one: Mesh, other: Mesh, count: int, partial: bool = False) -> list[tuple[Layout, Layout]]:
    """Some pairs of layouts on two meshes, always the same ones."""
    every = [list(dict.fromkeys(layouts(shape, mesh, partial))) for mesh in (one, other)]
    return random.Random(0).choices(list(itertools.product(*every)), k=count)


def exactly(got: DTensor, x: torch.Tensor, want: Layout, about: str) -> None:
    """Assert that every rank holds its part of `x`, and nothing else."""
    assert got.layout is want
    for shard, exact in zip(got.to_local().shards, local_shards(x, want).shards, strict=True):
        assert torch.equal(shard, exact), about


@pytest.mark.parametrize("shape", [(24, 6), (5, 4), (1, 2), (7,), (), (0, 4), (4, 3, 2)], ids=str)
def test_every_rank_gets_what_it_lacks_and_no_more(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for (one, have_mesh), (other, want_mesh) in itertools.permutations(MESHES.items(), 2):
        for have, want in pairs(shape, have_mesh, want_mesh, 8 if (one, other) in NAMED else 2):
            about = f"{have} on {have_mesh} → {want} on {want_mesh}"
            with sw.trace_comm() as log:
                got = distributed(x, have_mesh, have).redistribute(want_mesh, want)
            exactly(got, x, want, about)
            assert log.bytes == lower_bound(have, want), about
            assert set(log.counts()) <= {"all_to_all"} and len(log.records) == (log.bytes > 0), about


def test_partial_values_are_reduced_on_the_way() -> None:
    x = torch.arange(24.0).view(6, 4)
    for one, other in [("4x2", "2x4"), ("2x4", "6"), ("4", "2x4"), ("2x2x2", "disjoint 8"), ("4x2", "3x2 partly the same")]:
        for have, want in pairs((6, 4), MESHES[one], MESHES[other], 25, partial=True):
            got = distributed(x, have.mesh, have).redistribute(want.mesh, want)
            assert got.layout is want
            equal(got, x, f"{have} on {have.mesh} → {want} on {want.mesh}")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.complex128], ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(24).view(6, 4).to(dtype)
    d = distributed(x, A, make_layout((6, 4), A, [Shard(0), Replicate()], dtype))
    exactly(d.redistribute(SIX, [Shard(1)]), x, make_layout((6, 4), SIX, [Shard(1)], dtype), str(dtype))


def test_without_placements_it_is_replicated_there() -> None:
    x = torch.randn(6, 4)
    got = sw.distribute_tensor(sw.distribute_tensor(x, A, {"a": Shard(0)}), FAR)
    assert got.mesh is FAR and got.placements == (Replicate(),)
    equal(got, x, "replicated on another mesh")


def test_what_every_rank_has_already_is_not_communicated() -> None:
    x = torch.randn(8, 4)
    flat = sw.init_mesh(r=8)
    for d, mesh, placements in [
        (sw.distribute_tensor(x, A, [Shard(0), Shard(0)]), flat, [Shard(0)]),
        (sw.distribute_tensor(x, A), B, [Replicate(), Shard(1)]),
        (sw.distribute_tensor(x, A, [Replicate(), Shard(0)]), FOUR, [Replicate()]),
    ]:
        with sw.trace_comm() as log:
            got = d.redistribute(mesh, placements)
        exactly(got, x, make_layout((8, 4), mesh, placements), f"{d.layout} → {placements} on {mesh}")
        assert (len(log.records) == 0) == (mesh is not FOUR)
        got.to_local().shards[0].zero_()
        equal(d, x, "the old tensor does not share memory with the new one")


# ── shares ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sent(monkeypatch: pytest.MonkeyPatch, d: DTensor, mesh: Mesh, placements: Any) -> dict[int, int]:
    """How many elements each rank sends."""
    seen: dict[int, int] = {}
    real = Simulated.all_to_all

    def spy(self: Simulated, x: Any, send: Any, receive: Any, over: Mesh, axes: tuple[str, ...]) -> Any:
        seen.update({rank: sum(send.at(place)) for place, rank in enumerate(over.ranks)})
        return real(self, x, send, receive, over, axes)

    with monkeypatch.context() as patch:
        patch.setattr(Simulated, "all_to_all", spy)
        d.redistribute(mesh, placements)
    return seen


@pytest.mark.parametrize("shape", [(64, 3), (1, 16), (13, 5), (3,)], ids=str)
def test_copies_send_alike(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    d = sw.distribute_tensor(torch.randn(shape), A)
    for placements in ([Replicate()], [Shard(0)]):
        loads = [load for rank, load in sent(monkeypatch, d, FAR, placements).items() if rank in A.ranks]
        slab = d.numel() // max(shape)
        assert max(loads) - min(loads) <= slab, (placements, loads)
        assert sum(loads) == d.numel() * (8 if placements == [Replicate()] else 1)


def test_copies_of_each_shard_send_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    d = sw.distribute_tensor(torch.randn(32, 4), A, {"b": Shard(0)})
    loads = sent(monkeypatch, d, FAR, [Replicate()])
    assert [loads[rank] for rank in A.ranks] == [128] * 8


def test_a_share_for_receivers_that_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight ranks wants one row of eight, which four ranks hold: rows are too few to be sharded, so the four take
    turns."""
    want = sw.init_mesh(p=2, q=4, ranks=range(8, 16))
    loads = sent(monkeypatch, sw.distribute_tensor(torch.randn(2), FOUR), want, [Shard(0), Replicate()])
    assert [loads[rank] for rank in FOUR.ranks] == [2] * 4


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_go_back_to_the_mesh_they_came_from() -> None:
    x = torch.randn(6, 4)
    for one, other in [("4x2", "2x4"), ("2x4", "6"), ("4", "disjoint 8"), ("4x2", "3x2 partly the same")]:
        for have, want in pairs((6, 4), MESHES[one], MESHES[other], 10, partial=True):
            d = distributed(x, have.mesh, have).requires_grad_()
            (d.redistribute(want.mesh, want) * 3).square().sum().backward()
            assert d.grad is not None and d.grad.layout is d.layout.reduced()
            equal(d.grad, 18 * x, f"{have} on {have.mesh} → {want} on {want.mesh}")


def test_a_program_over_two_meshes() -> None:
    w, v = torch.randn(6, 8), torch.randn(8, 5)
    x = torch.randn(4, 6)
    spread = [sw.distribute_tensor(w, FOUR, [Shard(1)]), sw.distribute_tensor(v, FAR, [Shard(0)])]
    losses = []
    for one, other in ([w.clone(), v.clone()], spread):
        one.requires_grad_(), other.requires_grad_()
        hidden = torch.relu((sw.distribute_tensor(x, FOUR) if isinstance(one, DTensor) else x) @ one)
        hidden = hidden.redistribute(FAR, [Shard(1)]) if isinstance(hidden, DTensor) else hidden
        loss = (hidden @ other).square().mean()
        loss.backward()
        losses.append((loss, one.grad, other.grad))
    for got, want in zip(losses[1], losses[0], strict=True):
        equal(got, want, "a program over two meshes")
    assert [type(got) for got in losses[1]] == [DTensor] * 3 and losses[1][1].mesh is FOUR


# ── parts of one mesh ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_from_a_part_of_a_mesh_to_another() -> None:
    x = torch.arange(32.0).view(8, 4)
    homes: list[tuple[Mesh, Any]] = [
        (A["a"], [Shard(0)]),
        (A["a"], [Partial()]),
        (A["b"], [Shard(1)]),
        (A["b"], [Replicate()]),
        (A, [Shard(0), Shard(0)]),
        (A, [Partial(), Shard(1)]),
    ]
    for (one, have), (other, want) in itertools.permutations(homes, 2):
        d = distributed(x, one, have).requires_grad_()
        got = d.redistribute(other, want)
        assert got.mesh is other and got.placements == tuple(want)
        equal(got, x, f"{have} on {one} → {want} on {other}")
        (got * 2).sum().backward()
        assert d.grad is not None and d.grad.layout is d.layout.reduced()
        equal(d.grad, torch.full_like(x, 2.0), f"{have} on {one} ← {want} on {other}")


def test_from_a_part_of_a_mesh_to_a_mesh_of_others() -> None:
    x = torch.randn(8, 4)
    for part, placements in ((A["a"], [Shard(0)]), (A["b"], [Shard(1)])):
        d = sw.distribute_tensor(x, part, placements)
        for mesh in (SIX, FAR, B["b"]):
            equal(d.redistribute(mesh, [Shard(0)]), x, f"{part} → {mesh}")


# ── bad requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

X = sw.distribute_tensor(torch.randn(8, 4), A, [Shard(0), Replicate()])
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "another world": (
        lambda: X.redistribute(Mesh(("z",), (4,), range(4), "cpu", "processes"), [Shard(0)]),
        PlanError,
        r"from mesh \(a=4, b=2\) of 8 ranks \(simulated\) to mesh \(z=4\) of 4 ranks \(processes\): no communication joins",
    ),
    "another device": (
        lambda: X.redistribute(Mesh(("z",), (4,), range(4), "meta", "simulated"), [Shard(0)]),
        PlanError,
        r"from mesh \(a=4, b=2\) of 8 ranks \(cpu\) to mesh \(z=4\) of 4 ranks \(meta\)",
    ),
    "a layout of a third mesh": (
        lambda: X.redistribute(SIX, make_layout((8, 4), B, [Shard(0), Replicate()])),
        LayoutError,
        r"redistribute to mesh \(c=6\): the layout f32\[8@a, 4\] is on mesh \(a=2, b=4\)",
    ),
    "too little memory": (
        lambda: X.redistribute(B, [Replicate(), Replicate()], max_bytes=100),
        PlanError,
        r"with max_bytes=100: a rank holds 32 bytes before and 128 after, so every plan needs at least 128",
    ),
    "shards that a rank outside would take for others": (
        lambda: DTensor.from_local(sw.Bundle([torch.ones(1), torch.ones(3)]), sw.init_mesh(z=2), [Shard(0)], shape=(4,)),
        LayoutError,
        r"nor those of the given shape: \[1\] on rank 0, \[3\] on rank 1; give run_check=True",
    ),
    "relabel of a part": (lambda: sw.relabel(A["a"], (X, [Shard(0)])), MeshError, r"got the part \(a=4\) of \(a=4, b=2\)"),
    "relabel among too few": (
        lambda: sw.relabel(SIX, (X, [Shard(0)]), among=[3, 1, 2]),
        MeshError,
        r"mesh \(c=6\) has 6 ranks, and among=\[1, 2, 3\] are only 3 to choose from",
    ),
    "relabel to a layout of a third mesh": (
        lambda: sw.relabel(SIX, (X, X.layout)),
        MeshError,
        r"relabel of mesh \(c=6\): the layout f32\[8@a, 4\] is on mesh \(a=4, b=2\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    call, error, text = BAD[name]
    with sw.trace_comm() as log, pytest.raises(error, match=text):
        call()
    assert all(record.kind == "shapes" for record in log.records)


# ── relabel ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def brought(d: DTensor, mesh: Mesh, placements: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    return sum(sent(monkeypatch, d, mesh, placements).values())


def test_eight_ranks_to_six_move_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(24.0)
    d = sw.distribute_tensor(x, sw.init_mesh(dp=8), [Shard(0)])
    best = sw.relabel(SIX, (d, [Shard(0)]))
    assert best.ranks == (0, 1, 3, 4, 5, 7) and best.shape == SIX.shape
    equal(d.redistribute(best, [Shard(0)]), x, "to six ranks")
    assert brought(d, best, [Shard(0)], monkeypatch) == 8
    assert brought(d, SIX, [Shard(0)], monkeypatch) > 8


def test_no_other_order_moves_less(monkeypatch: pytest.MonkeyPatch) -> None:
    with sw.simulate(5):
        want = sw.init_mesh(p=2, q=2)
        d = sw.distribute_tensor(torch.randn(5, 6), sw.init_mesh(a=5), [Shard(0)])
        e = sw.distribute_tensor(torch.randn(6, 5), sw.init_mesh(a=2, b=2, ranks=[3, 1, 4, 0]), [Shard(1), Shard(0)])
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], {"q": Shard(0), "p": Shard(0)}):

        def cost(mesh: Mesh, placements: Any = placements) -> int:
            return sum(brought(x, mesh, placements, monkeypatch) for x in (d, e))

        orders = itertools.permutations(range(5), 4)
        least = min(cost(Mesh(want.axes, want.shape, order, "cpu", "simulated")) for order in orders)
        assert cost(sw.relabel(want, (d, placements), (e.layout, placements))) == least


def test_a_mesh_in_another_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = MESHES["4x2 in another order"]
    d = sw.distribute_tensor(torch.randn(8, 8), turned, [Shard(0), Shard(1)])
    found = sw.relabel(A, (d, [Shard(0), Shard(1)]))
    assert found.ranks == turned.ranks and brought(d, found, [Shard(0), Shard(1)], monkeypatch) == 0


def test_ranks_stay_where_nothing_is_gained() -> None:
    whole_ = sw.distribute_tensor(torch.randn(4), B)
    assert sw.relabel(A) is A
    assert sw.relabel(A, (whole_, [Shard(0), Replicate()])) is A
    assert sw.relabel(MESHES["4x2 in another order"], (whole_, [Shard(0), Replicate()])) is MESHES["4x2 in another order"]
    assert sw.relabel(SIX, among=range(10, 2, -1)).ranks == (3, 4, 5, 6, 7, 8)
