"""Pipelines give the losses and gradients of one device, whatever the schedule."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import MeshError, PipelineError, Schedule, Shard
from shardwise.pipeline.schedule import SCHEDULES
from tests.helpers.pipelines import beside_one_device, everywhere, perceptrons, same_gradients, train_gpt


def data(rows: int, width: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


# ── beside one device ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_demos_gpt_over_pp_and_tp(schedule: str) -> None:
    train_gpt({"pp": 2, "tp": 2}, schedule, 4, 3)


def test_the_demos_gpt_over_dp_pp_and_tp() -> None:
    train_gpt({"dp": 2, "pp": 2, "tp": 2}, "1f1b", 2, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", [(1, 1), (1, 4), (2, 1), (2, 4), (3, 5), (4, 2), (4, 4)])
def test_any_number_of_stages_and_microbatches(stages: int, microbatches: int, schedule: str) -> None:
    pipe = beside_one_device(
        perceptrons(stages), sw.init_mesh(pp=stages), data(20), schedule=schedule, microbatches=microbatches
    )
    assert pipe.most_held == pipe.schedule.alive


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 3, "tp": 2}], ids=str)
def test_batches_that_are_sharded(axes: dict[str, int]) -> None:
    mesh = sw.init_mesh(**axes)
    dense, (x, y) = perceptrons(axes["pp"]), data(16)
    pipe = beside_one_device(dense, mesh, (x, y), placements={"dp": Shard(0)}, microbatches=4)
    sharded = [sw.distribute_tensor(t, mesh, {"dp": Shard(0)}) for t in (x, y)]  # on all ranks of the root
    for given in (sharded, [sharded[0], y], [sharded[0].redistribute(mesh["pp"].at(0), {"dp": Shard(0)}), y]):
        pipe.zero_grad()
        pipe.step(given[0], target=given[1], loss=F.mse_loss)
        same_gradients(pipe, dense, "given as DTensors")


def test_microbatches_of_a_sharded_batch_do_not_move() -> None:
    mesh = sw.init_mesh(pp=2, dp=2)
    x, y = data(16)
    counts = []
    for schedule in ("gpipe", "1f1b"):
        for microbatches in (2, 4):
            pipe = sw.pipeline(perceptrons(2), mesh["pp"], schedule, microbatches, {"dp": Shard(0)})
            pipe.step(x, target=y, loss=F.mse_loss)
            with sw.trace_comm() as log:
                pipe.step(x, target=y, loss=F.mse_loss)
            counts.append(
                Counter((record.kind, record.operator, record.axes) for record in log.records if record.kind != "p2p")
            )
    gradients = len(list(pipe.parameters()))
    once = {("all_reduce", "gradient", ("dp",)): gradients, ("all_reduce", "redistribute", ("dp",)): 1}
    assert counts == [{**once, ("all_to_all", "redistribute", ("ranks",)): 1}] * 4, (
        "the loss, and each gradient, is reduced once"
    )


def test_parameters_that_are_sharded_like_the_batch() -> None:
    """A partial gradient would be larger than the parameter's shard: it is reduced for each microbatch."""
    mesh, dense, (x, y) = sw.init_mesh(pp=2, dp=2), perceptrons(2), data(16)
    stages = copy.deepcopy(dense)
    for index, stage in enumerate(stages):
        weight = sw.distribute_tensor(stage[0].weight.detach(), mesh["pp"].at(index), {"dp": Shard(0)})
        stage[0].weight = nn.Parameter(weight)
    pipe = sw.pipeline(stages, mesh["pp"], microbatches=4, placements={"dp": Shard(0)})
    F.mse_loss(nn.Sequential(*dense)(x), y).backward()
    pipe.step(x, target=y, loss=F.mse_loss)
    same_gradients(pipe, dense)
    with sw.trace_comm() as log:
        pipe.step(x, target=y, loss=F.mse_loss)
    assert log.counts()["reduce_scatter"] == 2 * 4


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    pipe, (x, y) = sw.pipeline(perceptrons(2), sw.init_mesh(pp=2, tp=2)["pp"], microbatches=2), data(4)
    pipe.step(x, target=y, loss=F.mse_loss)
    before = [p.grad for p in pipe.parameters()]
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, target=y, loss=lambda out, target: 1 / 0)
    assert all(p.grad is grad for p, grad in zip(pipe.parameters(), before, strict=True))
    pipe.zero_grad()
    pipe.step(x, target=y, loss=F.mse_loss)
    for p, grad in zip(pipe.parameters(), before, strict=True):
        assert torch.equal(p.grad.full_tensor(), grad.full_tensor())


def test_a_loss_of_another_dtype_is_told_anew() -> None:
    pipe, (x, y) = sw.pipeline(perceptrons(2), sw.init_mesh(pp=2)["pp"]), data(4)
    single = pipe.step(x, target=y, loss=F.mse_loss)
    double = pipe.step(x, target=y, loss=lambda out, target: F.mse_loss(out, target).double())
    assert single.dtype == torch.float32 and double.dtype == torch.float64 and double.item() == pytest.approx(single.item())
    with torch.autocast("cpu", torch.bfloat16):
        assert pipe.step(x, target=y, loss=F.mse_loss).item() == pytest.approx(single.item(), rel=0.05)


class Several(nn.Module):
    """Gives a float, a mask, whole numbers, a float that needs no gradient, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.linear(x), {"mask": x > 0, "rows": [x.argsort(-1), 3]}, x * 2, None


class Uses(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), last

    def forward(self, x: Tensor, more: Any, also: Tensor, nothing: None) -> Any:
        assert nothing is None and more["rows"][1] == 3 and not also.requires_grad
        y = torch.where(more["mask"], self.linear(x), x.gather(1, more["rows"][0])) + also
        return y if self.last else (y, more, also, nothing)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_tensors_between_stages(schedule: str) -> None:
    torch.manual_seed(0)
    beside_one_device(
        [Several(), Uses(False), Uses(True)], sw.init_mesh(pp=3, tp=2), data(12), schedule=schedule, microbatches=3
    )


class Skips(nn.Module):
    """Hands on one input, uses another, and leaves a third alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        return a, self.linear(b)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x @ w for w in self.weights)


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


def test_what_is_handed_on_and_what_is_not_used() -> None:
    torch.manual_seed(0)
    mesh, dense = sw.init_mesh(pp=3), [Three(), Skips(), Add()]
    x, y = data(8)
    exact = F.mse_loss(dense[2](*dense[1](*dense[0](x))), y)
    exact.backward()
    dense[0].weights[2].grad = torch.zeros(6, 6)  # zeros come back for what is not used
    pipe = sw.pipeline(copy.deepcopy(dense), mesh["pp"], microbatches=2)
    pipe.zero_grad()
    assert pipe.step(x, target=y, loss=F.mse_loss).item() == pytest.approx(exact.item())
    same_gradients(pipe, dense)


def test_a_user_s_own_table() -> None:
    table = Schedule.read("F1 F0 . . B1 B0", ". F1 B1 F0 . . ".replace("F0 . .", "F0 B0 ."))
    pipe = beside_one_device(perceptrons(2), sw.init_mesh(pp=2), data(4), schedule=table)
    assert pipe.schedule is table


def test_losses_that_are_sums_and_steps_that_add_up() -> None:
    dense, mesh, (x, y) = perceptrons(2), sw.init_mesh(pp=2, tp=2), data(8)
    pipe = sw.pipeline(copy.deepcopy(dense), mesh["pp"], microbatches=4)
    loss = nn.MSELoss(reduction="sum")
    for _ in range(2):
        exact = loss(nn.Sequential(*dense)(x), y)
        exact.backward()
        found = pipe.step(x, target=y, loss=loss, reduction="sum")
    torch.testing.assert_close(found.full_tensor(), exact.detach())
    same_gradients(pipe, dense)


class Ends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_a_last_stage_that_gives_the_loss() -> None:
    dense, mesh, (x, _) = [*perceptrons(1), Ends()], sw.init_mesh(pp=2), data(8)
    pipe = sw.pipeline(copy.deepcopy(dense), mesh["pp"])
    exact = nn.Sequential(*dense)(x)
    exact.backward()
    assert pipe.step(x).item() == pytest.approx(exact.item())
    same_gradients(pipe, dense)
    assert pipe.step(x, loss=lambda out: out * 2).item() == pytest.approx(2 * exact.item())


# ── evaluating, randomness, recomputing ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("axes", [{"pp": 3}, {"dp": 2, "pp": 3, "tp": 2}], ids=str)
def test_forward_gives_the_rows_in_order(axes: dict[str, int]) -> None:
    dense, mesh, (x, _) = perceptrons(3), sw.init_mesh(**axes), data(24)
    placements = {"dp": Shard(0)} if "dp" in axes else None
    pipe = sw.pipeline(copy.deepcopy(dense), mesh["pp"], microbatches=4, placements=placements)
    out = pipe(x)
    assert out.mesh is mesh["pp"].at(2) and not out.requires_grad
    torch.testing.assert_close(out.full_tensor(), nn.Sequential(*dense)(x).detach())


def dropping() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5)), nn.Sequential(nn.Linear(32, 6), nn.Dropout(0.5))]


def test_random_numbers_depend_on_the_stage_and_the_microbatch_alone() -> None:
    x, y = data(8)
    found, after = [], []
    for axes in ({"pp": 2}, {"pp": 2, "tp": 2}):
        for schedule in SCHEDULES:
            pipe = sw.pipeline(dropping(), sw.init_mesh(**axes)["pp"], schedule, 4)
            torch.manual_seed(1)
            found.append([pipe.step(x, target=y, loss=F.mse_loss).item() for _ in range(2)])
            after.append((torch.rand(2).tolist(), sw.rand(2, mesh=pipe.mesh.root).tolist()))
    assert found[0] == pytest.approx(found[1]) == found[2] == found[3] and found[0][0] != found[0][1]
    assert after == [after[0]] * 4
    pipe.eval()
    assert torch.equal(pipe(x).full_tensor(), pipe(x).full_tensor())
    one = torch.randn(2, 6)
    pipe.train()
    both = pipe(torch.cat([one, one, one, one])).full_tensor().view(4, 2, 6)
    assert len({str(rows.tolist()) for rows in both}) == 4, "microbatches have masks of their own"


def test_stages_that_recompute() -> None:
    dense = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(2)]
    mesh, (x, y) = sw.init_mesh(pp=2, tp=2), data(8)
    stages = [sw.remat_module(copy.deepcopy(stage), select="*", save=sw.save.matmuls) for stage in dense]
    pipe = sw.pipeline(stages, mesh["pp"], microbatches=4)
    F.mse_loss(nn.Sequential(*dense)(x), y).backward()
    pipe.step(x, target=y, loss=F.mse_loss)
    same_gradients(pipe, dense)


def test_optimizers_and_buffers() -> None:
    dense = perceptrons(2)
    for stage in dense:
        stage.register_buffer("scale", torch.tensor(2.0))
        stage.register_forward_hook(lambda module, args, out: out * module.scale)
    pipe = sw.pipeline(copy.deepcopy(dense), sw.init_mesh(pp=2, tp=2)["pp"], microbatches=2)
    pairs = [
        (kind(nn.ModuleList(dense).parameters(), **options), kind(pipe.parameters(), **options))
        for kind, options in [
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
            (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
        ]
    ]
    for one, other in pairs:
        x, y = data(8)
        nn.ModuleList(dense).zero_grad()
        pipe.zero_grad()
        F.mse_loss(nn.Sequential(*dense)(x), y).backward()
        pipe.step(x, target=y, loss=F.mse_loss)
        one.step()
        other.step()
    for p, q in zip(pipe.parameters(), nn.ModuleList(dense).parameters(), strict=True):
        torch.testing.assert_close(everywhere(p, pipe.mesh.root), q.detach(), atol=1e-5, rtol=1e-4)
    assert set(pipe.state_dict()) >= {"stages.0.0.weight", "stages.1.scale"}


def test_a_step_is_recorded() -> None:
    pipe = sw.pipeline(perceptrons(2), sw.init_mesh(pp=2, tp=2)["pp"], microbatches=3)
    x, y = data(6)
    with pipe.record() as run:
        pipe.step(x, target=y, loss=F.mse_loss)
    timeline = run.timeline
    assert timeline.rows == ("rank 0, stage 0", "rank 1, stage 0", "rank 2, stage 1", "rank 3, stage 1")
    assert len(timeline.spans) == 4 * 6 and 0 < timeline.bubble < 1
    assert len(timeline.draw().splitlines()) == 4 and "<svg" in timeline.svg()


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def refused(call: Any, *words: str) -> None:
    with pytest.raises((PipelineError, sw.ArgumentError)) as error:
        call()
    for word in words:
        assert word in str(error.value), error.value


def test_batches_that_do_not_divide() -> None:
    mesh = sw.init_mesh(dp=2, pp=2)
    pipe = sw.pipeline(perceptrons(2), mesh["pp"], microbatches=4, placements={"dp": Shard(0)})
    (x, y), short = data(12), data(8)[1]
    refused(
        lambda: pipe.step(x, target=y, loss=F.mse_loss),
        "a batch of 12 rows, in 2 shards, does not fall into 4 equal microbatches",
        "a multiple of 8 rows",
    )
    refused(lambda: pipe.step(x, target=short, loss=F.mse_loss), "have one number of rows (dim 0), got [8, 12]")
    refused(lambda: pipe.step(target=None), "got none")
    x, y = data(16)
    refused(lambda: pipe.step(x, target=y, loss=nn.MSELoss(reduction="none")), "a tensor without dims")
    refused(lambda: pipe.step(x, target=y, loss=F.mse_loss, reduction="max"), "one of 'mean', 'sum', got 'max'")


def test_stages_that_cannot_be() -> None:
    mesh = sw.init_mesh(pp=2, tp=2)
    first, second = perceptrons(2)
    refused(lambda: sw.pipeline([first], mesh["pp"]), "axis 'pp' of mesh (pp=2, tp=2) has 2 coordinates", "got 1")
    second[0].weight = first[0].weight
    refused(
        lambda: sw.pipeline([first, second], mesh["pp"]),
        "stage 1 has as '0.weight' the parameter that is '0.weight' of stage 0",
        "nn.Parameter(p.detach().clone())",
    )
    first, second = perceptrons(2)
    second[0].weight = nn.Parameter(sw.distribute_tensor(second[0].weight.detach(), mesh["pp"].at(0)))
    refused(
        lambda: sw.pipeline([first, second], mesh["pp"]),
        "'0.weight' of stage 1 is f32[6, 6] on ranks [0, 1], the stage on ranks [2, 3]",
        'mesh["pp"].at(1)',
    )
    with pytest.raises(MeshError, match=r"axis 'pp' of mesh .* has coordinates 0 to 1, got coordinate=2"):
        mesh["pp"].at(2)
    with pytest.raises(MeshError, match="has several axes"):
        sw.pipeline(perceptrons(2), mesh)


class Fickle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double() if x.sum().item() > 0 else x


def test_a_stage_that_gives_something_else_for_the_same_shapes() -> None:
    pipe = sw.pipeline([Fickle(), nn.Identity()], sw.init_mesh(pp=2)["pp"], microbatches=2)
    refused(
        lambda: pipe(torch.tensor([[1.0], [-1.0]])),
        "stage 0 gives f32[1, 1], and gave f64[1, 1] for inputs of the same shapes",
        "may depend on the shapes of its inputs, not on values",
    )


def test_a_last_stage_without_the_rows_of_its_batch() -> None:
    pipe = sw.pipeline([nn.Identity(), Ends()], sw.init_mesh(pp=2)["pp"])
    refused(lambda: pipe(torch.ones(4, 2)), "gives f32[] for a microbatch of 2 rows", "dim 0")
