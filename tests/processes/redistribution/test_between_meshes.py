"""Moves between meshes of some of the job's ranks, and the ranks that stand outside: one program on all of them."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
import tests.samples
from shardwise import DTensor, Mesh, Partial, Replicate, Shard, ShardwiseError
from shardwise.comm.absent import Absent
from shardwise.layouts.layout import Layout
from shardwise.planning.bounds import lower_bound
from tests.helpers.one_device import placements_of


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def part_of(x: Tensor, layout: Layout, place: int) -> Tensor:
    for dim in range(x.ndim):
        index = [i for start, stop in layout.runs(dim, place) for i in range(start, stop)]
        x = x.index_select(dim, torch.tensor(index, dtype=torch.long))
    return x


def same(got: DTensor, want: Tensor) -> None:
    """This rank holds its part of `want`; a rank outside holds a shape."""
    layout: Layout = got.layout
    got, place = got.detach().redistribute(placements=layout.reduced()).to_local(), layout.mesh.place(dist.get_rank())
    if place is None:
        assert type(got) is Absent and tuple(got.shape) == layout.local_shape(0)
    else:
        torch.testing.assert_close(got, part_of(want, layout, place), atol=1e-6, rtol=1e-6)


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"


# ── moves ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

MOVES: dict[str, tuple[Any, Any, Any, Any]] = {
    "8 to 6": ({"a": 8}, [Shard(0)], {"c": 6}, [Shard(0)]),
    "8 to 4": ({"a": 4, "b": 2}, [Shard(0), Shard(1)], {"c": 4}, [Shard(0)]),
    "4 to 8": ({"c": 4}, [Shard(1)], {"a": 4, "b": 2}, [Shard(0), Replicate()]),
    "4x2 to 2x4": ({"a": 4, "b": 2}, [Shard(0), Shard(1)], {"a": 2, "b": 4}, [Shard(0), Shard(1)]),
    "disjoint": ({"a": 2, "b": 2}, [Replicate(), Shard(0)], {"c": 4, "ranks": [7, 6, 5, 4]}, [Shard(0)]),
    "partly the same": ({"a": 4, "ranks": [5, 2, 3, 4]}, [Shard(0)], {"c": 3, "ranks": [4, 5, 6]}, [Shard(1)]),
    "copies to copies": ({"a": 3}, [Replicate()], {"c": 5, "ranks": [2, 3, 4, 5, 6]}, [Replicate()]),
    "partial to partial": ({"a": 2, "b": 2}, [Partial(), Shard(0)], {"c": 2, "d": 3}, [Shard(1), Partial()]),
}


def run_move(have: Any, before: Any, want: Any, after: Any) -> tuple[int, int, list[str]]:
    x = values(24, 10)
    d = sw.distribute_tensor(x, sw.init_mesh(**have), before).requires_grad_()
    mesh = sw.init_mesh(**want)
    with sw.trace_comm() as log:
        got = d.redistribute(mesh, after)
    same(got, x)
    (got * 3).square().sum().backward()
    assert d.grad is not None and d.grad.layout is d.layout.reduced()
    same(d.grad, 18 * x)
    return log.bytes, lower_bound(d.layout, got.layout), list(log.counts())


@pytest.mark.parametrize("name", MOVES)
def test_moves(pool: Any, name: str) -> None:
    results = pool(8).run(run_move, *MOVES[name])
    assert len({str(result) for result in results}) == 1, "every rank tells the same"
    received, bound, kinds = results[0]
    if "partial" not in name:
        assert received == bound > 0 and kinds == ["all_to_all"]


def run_relabel() -> tuple[tuple[int, ...], int]:
    x = torch.arange(24.0)
    d = sw.distribute_tensor(x, sw.init_mesh(a=8), [Shard(0)])
    best = sw.relabel(sw.init_mesh(c=6), (d, [Shard(0)]))
    got = d.redistribute(best, [Shard(0)])
    same(got, x)
    if best.place(dist.get_rank()) is None:
        return best.ranks, 0
    held = set(d.to_local().tolist())
    return best.ranks, sum(number not in held for number in got.to_local().tolist())


def test_relabelled_six_of_eight_receive_a_third(pool: Any) -> None:
    results = pool(8).run(run_relabel)
    assert {ranks for ranks, _ in results} == {(0, 1, 3, 4, 5, 7)}
    assert sum(moved for _, moved in results) == 8


# ── one program on all ranks ──────────────────────────────────────────────────────────────────────────────────────────


def two_stages(x: Tensor, stages: list[nn.Linear], onto: Callable[[Tensor, int], Tensor]) -> Tensor:
    for i, stage in enumerate(stages):
        x = torch.relu(stage(onto(x, i)))
    return x.square().mean()


def run_pipeline() -> list[str]:
    """Two stages on different ranks, trained: some ranks are in one mesh, some in the other, one in both, one in none."""
    meshes = [sw.init_mesh(dp=2, tp=2, ranks=[0, 1, 2, 3]), sw.init_mesh(tp=4, ranks=[3, 4, 5, 6])]
    torch.manual_seed(0)
    dense = [nn.Linear(6, 8), nn.Linear(8, 5)]
    spread = [nn.Linear(6, 8), nn.Linear(8, 5)]
    for stage, source, mesh in zip(spread, dense, meshes, strict=True):
        stage.weight = nn.Parameter(sw.distribute_tensor(source.weight.detach(), mesh, {"tp": Shard(0)}))
        stage.bias = nn.Parameter(sw.distribute_tensor(source.bias.detach(), mesh, {"tp": Shard(0)}))
    x, layouts = values(4, 6), [{"dp": Shard(0)}, {}]
    ways = [lambda h, i: h, lambda h, i: sw.distribute_tensor(h, meshes[i], layouts[i])]
    losses: list[Any] = []
    for stages, onto in zip((dense, spread), ways, strict=True):
        parameters = [p for stage in stages for p in stage.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss = two_stages(x, stages, onto)
            loss.backward()
            nn.utils.clip_grad_norm_(stages[0].parameters(), 1.0)
            optimizer.step()
        losses.append(loss)
    for one, other in zip(dense, spread, strict=True):
        same(other.weight, one.weight.detach())
        same(other.bias, one.bias.detach())
    read = losses[1].redistribute(sw.init_mesh(every=8)).item()
    assert abs(read - losses[0].item()) < 1e-6
    return [repr(losses[1]), repr(spread[0].weight)]


def test_a_pipeline_is_one_program_on_every_rank(pool: Any) -> None:
    shown = ["DTensor(f32[ | sum@tp], mesh=(tp=4))", "Parameter(f32[8@tp, 6], mesh=(dp=2, tp=2))"]
    assert pool(8).run(run_pipeline) == [shown] * 8


# ── a rank outside ────────────────────────────────────────────────────────────────────────────────────────────────────


def run_ways_in() -> list[str]:
    """Every constructor on all ranks of four, of which the mesh has two."""
    mesh = sw.init_mesh(tp=2, ranks=[1, 2])
    rank, x = dist.get_rank(), values(5, 3)
    torch.manual_seed(3)
    made = [
        sw.distribute_tensor(x, mesh, [Shard(0)]),
        sw.zeros(5, 3, mesh=mesh, placements=[Shard(1)]),
        sw.randn(5, 3, mesh=mesh, placements=[Shard(0)]),
        DTensor.from_local(x[:2], mesh, [Shard(0)], run_check=False),
        DTensor.from_local(x[:3] if rank == 1 else x[3:], mesh, [Shard(0)], shape=(5, 3)),
        DTensor.from_local(x[:1] if rank == 1 else x[1:], mesh, [Shard(0, sizes=(1, 4))], shape=(5, 3)),
    ]
    pickled = [pickle.loads(pickle.dumps(d)) for d in made]
    everywhere = sw.init_mesh(every=4)
    for d, want in zip(made, [x, torch.zeros(5, 3), None, torch.cat([x[:2]] * 2), x, x], strict=True):
        if want is not None:
            same(d, want)
            assert torch.equal(d.redistribute(everywhere).full_tensor(), want)
        assert type(d.to_local()) is (Tensor if rank in mesh.ranks else Absent)
    return [repr(d) for d in (*made, *pickled)]


def test_ways_in(pool: Any) -> None:
    results = pool(4).run(run_ways_in)
    assert results == [results[0]] * 4
    assert results[0][5] == "DTensor(f32[5@tp{1,4}, 3], mesh=(tp=2))"


def run_gradients_of_locals() -> tuple[Any, ...]:
    mesh = sw.init_mesh(tp=2, ranks=[1, 2])
    rank = dist.get_rank()
    own = torch.full((rank + 1,), float(rank), requires_grad=True)
    d = DTensor.from_local(own, mesh, [Shard(0, sizes=(2, 3))], shape=(5,))
    (d.to_local() * 2).square().sum().backward()
    return own.grad.tolist(), tuple(d.to_local().shape)


def test_gradients_of_what_ranks_gave(pool: Any) -> None:
    """What a rank outside gave is left out: its gradient is zero. What it holds is like what the first of the mesh holds."""
    results = pool(4).run(run_gradients_of_locals)
    assert results == [([0.0], (2,)), ([8.0] * 2, (2,)), ([16.0] * 3, (3,)), ([0.0] * 4, (2,))]


def run_reading() -> list[Any]:
    mesh = sw.init_mesh(dp=2, tp=1, ranks=[1, 2])
    x = sw.distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Replicate()])
    other = sw.ones(4, mesh=sw.init_mesh(every=4))
    calls: list[Callable[[], Any]] = [
        lambda: x.full_tensor().tolist(),
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: bool((x == x).all()),
        lambda: x[x > 1].shape[0],
        lambda: x.to_local().tolist() if dist.get_rank() != 1 else None,
        lambda: (other * x.to_local().sum()).shape[0],
        lambda: DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=True).shape[0],
        lambda: repr(x + 1),
        lambda: repr(x.to_local()) if dist.get_rank() == 0 else None,
        lambda: str(x).splitlines()[1:],
    ]
    return [attempt(call) for call in calls]


def test_reading(pool: Any) -> None:
    told = pool(4).run(run_reading)
    assert told[2][:5] == [[0, 1, 2, 3], 6.0, [0, 1, 2, 3], True, 2]
    text = "MeshError: rank 3 is none of the 2 ranks of mesh (dp=2, tp=1) and holds nothing of a tensor on it: "
    remedy = "; redistribute the tensor to a mesh with this rank first, or guard the code with "
    remedy += "`if mesh.coordinate(rank) is not None`"
    for answer in told[3][:7]:
        assert answer.startswith(text) and answer.endswith(remedy), answer
    assert "tolist needs its values" in told[3][5] and "its values were asked for" in told[3][0]
    assert told[3][7] == (
        "LayoutError: from_local on a rank that is none of the 2 ranks of mesh (dp=2, tp=1): they do not tell it the shapes of "
        "their shards; give shape="
    )
    assert told[1][7] == 4
    assert {answers[8] for answers in told} == {"DTensor(f32[4@dp], mesh=(dp=2, tp=1))"}
    assert told[0][9] == "Absent([2], torch.float32, mesh=(dp=2, tp=1))"
    assert told[2][10] == ["rank 2 holds [2:4]; x.full_tensor() on every rank has the whole:", "tensor([2., 3.])"]
    assert told[3][10] == ["this rank holds nothing of it: it is not in mesh (dp=2, tp=1)"]


def run_printing() -> list[str]:
    """Each rank prints while the others do something else: where printing communicated, they would meet in it."""
    mesh = sw.init_mesh(dp=2, tp=2)
    x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, {"dp": Shard(0), "tp": Shard(1)})
    partials = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], shape=(2,))
    cases = [x, x.sum(1), x.view(2, 4).transpose(0, 1), partials, sw.ones(2, mesh=mesh), x[0].t()]
    texts = [f"{case}\n{case!r}" for case in cases] if dist.get_rank() == 3 else []
    x.redistribute(placements=[Replicate(), Replicate()])
    return texts


def test_one_rank_prints_alone(pool: Any) -> None:
    whole = "x.full_tensor() on every rank has the whole:"
    texts = pool(4).run(run_printing)[3]
    assert f"rank 3 holds [2:4, 1:2]; {whole}\ntensor([[5.],\n        [7.]])" in texts[0]
    assert f"rank 3 holds [2:4], Partial(sum) over tp; {whole}\ntensor([5., 7.])" in texts[1]
    assert f"rank 3 holds [0:2], Partial(sum) over dp; {whole}\ntensor([1., 1.])" in texts[3]
    assert texts[4].splitlines()[1] == "tensor([1., 1.])" and len(texts) == 6


#: What gives a number or a shape that depends on values, or has no kernel for shapes in torch.
READS = {"aten._local_scalar_dense", "aten.equal", "aten.allclose", "aten.index.Tensor", "aten.index_put"}
READS |= {"aten.binomial", "aten._sample_dirichlet", "aten._standard_gamma", "aten.bincount", "aten.histc", "aten.nonzero"}
READS |= {"aten.masked_select", "aten.masked_scatter", "aten.masked_scatter_backward", "aten._linalg_check_errors"}
READS |= {"aten.linalg_cholesky_ex", "aten.linalg_inv_ex"}  # with errors checked
READS |= {"aten.multi_margin_loss_backward", "aten.multilabel_margin_loss_backward"}
READS |= {"aten._amp_foreach_non_finite_check_and_unscale_"}  # writes what it finds to a plain tensor
READS |= {"aten._fused_adagrad_"}  # of tensors in several layouts: the form of it that writes to none has no kernel for shapes


def run_samples() -> list[str]:
    """Every sample of every rule on a mesh of other ranks: these need not be there, since nothing is communicated."""
    mesh = Mesh(("a", "b"), (2, 2), range(1, 5), "cpu", "processes")
    failed = []
    for module in pkgutil.iter_modules(tests.samples.__path__):
        for name, samples in importlib.import_module(f"tests.samples.{module.name}").SAMPLES.items():
            for sample in samples:
                for placements in placements_of(sample, mesh, 3):
                    given = [sw.distribute_tensor(t, mesh, p) for t, p in zip(sample.tensors, placements, strict=True)]
                    failed += [f"{name} {placements}: {wrong}" for wrong in _wrong(sample, given) if name not in READS]
    return failed


def _wrong(sample: Any, given: list[DTensor]) -> list[str]:
    found = attempt(lambda: sample.function(*given))
    if isinstance(found, str):
        return [found]
    several = found if isinstance(found, list | tuple) else [found]
    outs = [d for out in several for d in (out if isinstance(out, list | tuple) else [out]) if isinstance(d, DTensor)]
    shown = [(d, d.to_local()) for d in outs]
    return [
        f"{d!r} holds {local!r}"
        for d, local in shown
        if type(local) is not Absent or tuple(local.shape) != d.layout.local_shape(0)
    ]


def test_every_operator_gives_shapes(pool: Any) -> None:
    (failed,) = pool(1).run(run_samples)
    assert not failed, "\n".join(failed)
