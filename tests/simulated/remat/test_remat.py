"""Rematerialisation: the gradients of the model itself, whatever is kept, and an error where a block is not the same twice."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import RematError, Replicate, Shard, remat, save
from shardwise.remat import kept_values
from shardwise.remat.names import Value
from shardwise.remat.policies import Choice, Made
from tests.conftest import SEED
from tests.helpers.gpt_block import POLICIES, Block, gradients, model_and_input, plain, products, same
from tests.helpers.one_device import distributed
from tests.helpers.random_programs import describe, programs, run

MESHES: list[dict[str, int]] = [{}, {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 3}]
COUNT = int(os.environ.get("SHARDWISE_PROGRAMS", "40"))


def world(axes: dict[str, int]) -> Any:
    return sw.init_mesh(**axes) if axes else None


# ── the same gradients ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_gradients_are_those_of_the_block_itself(axes: dict[str, int], policy: str) -> None:
    block, x = model_and_input(world(axes))
    want = gradients(block, x, block)
    assert same(gradients(block, x, lambda x: remat(block, x, save=POLICIES[policy])), want)
    nested = remat_nested(block, POLICIES[policy])
    assert same(gradients(block, x, nested), want)
    assert kept_values() == 0


def remat_nested(block: nn.Module, policy: save.Policy) -> Any:
    return lambda x: remat(lambda x: remat(block, x, save=policy), x, save=save.nothing)


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}], ids=str)
def test_all_of_it_is_found_again(axes: dict[str, int]) -> None:
    """Modules by name, keyword arguments, structures of tensors, results that are no tensors, views, lists, numbers."""
    block, x = model_and_input(world(axes))

    def function(given: dict[str, Any], *, scale: float) -> dict[str, Any]:
        first, second = given["x"].split(8, -1)
        tied = torch.cat([second.sin(), first.exp()], -1)
        tied = tied * 2 if float(plain(tied.detach().sum())) > 0 else tied * 3
        return {"y": block(tied) * scale, "none": None, "number": 3, "list": [tied.amax()]}

    def run(x: Any, kept: save.Policy | None = None) -> Any:
        got = remat(function, {"x": x}, scale=2.0, save=kept) if kept else function({"x": x}, scale=2.0)
        assert got["none"] is None and got["number"] == 3
        return got["y"] * got["list"][0]

    want = gradients(block, x, run)
    for policy in POLICIES.values():
        assert same(gradients(block, x, lambda x: run(x, policy)), want)  # noqa: B023


def test_modules_by_name() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block(), Block()))
    x = torch.randn(2, 5, 16, requires_grad=True)
    want = gradients(model, x, model)
    names = list(model.state_dict())
    assert sw.remat_module(model, "1.*", save=save.matmuls) is model
    assert list(model.state_dict()) == names
    assert same(gradients(model, x, model), want)
    seen = saved_in(lambda: model(x))
    sw.remat_module(model, "*", save=save.nothing)
    assert saved_in(lambda: model(x)) < seen
    twin = copy.deepcopy(model)
    assert same(gradients(twin, x, twin), want)
    with pytest.raises(RematError, match=r"no module of Sequential is called select='blocks.*'; its modules are 0, 0.norm1"):
        sw.remat_module(model, "blocks.*")


def saved_in(function: Any) -> int:
    """The bytes that a function leaves behind for its backward, outside of blocks."""
    sizes: list[int] = []
    with saved_tensors_hooks(lambda x: sizes.append(x.nbytes), lambda x: x):
        function()
    return sum(sizes)


def test_no_graph_no_block() -> None:
    with torch.no_grad():
        assert remat(lambda x: x * 2, torch.ones(2)).tolist() == [2, 2]
    assert remat(lambda: 3) == 3
    out = remat(lambda x: x * 2, torch.ones(2))
    assert not out.requires_grad


# ── what is kept, and for how long ────────────────────────────────────────────────────────────────────────────────────


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, ran: list[str], names: set[str]) -> None:
        super().__init__()
        self.ran, self.names = ran, names

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in self.names:
            self.ran.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_what_is_kept_does_not_run_again() -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).cos()

    def ran(policy: save.Policy) -> list[str]:
        names: list[str] = []
        with Counting(names, {"mm", "sin", "cos"}):
            out = remat(function, torch.ones(4, 4), save=policy).sum()
            names.clear()
            out.backward()
        return names

    forward_again = [name for name in ran(save.nothing) if name]
    backward = ["sin", "mm", "mm", "cos", "mm"]  # of cos, of both products, of sin: computed by the backward itself
    assert forward_again == ["mm", "sin", "mm", *backward]  # the last cos is not needed: the second run ends before it
    assert ran(save.matmuls) == ["sin", *backward]
    assert ran(save.operators("aten.sin")) == ["mm", "mm", *backward]
    assert ran(save.everything) == backward


def test_policies_by_size_region_and_function() -> None:
    seen: list[Made] = []

    def decide(op: Any, args: Any, made: Made) -> str:
        assert op is torch.ops.aten.mm.default and len(args) == 2
        seen.append(made)
        return "recompute"

    w = torch.randn(4, 8, requires_grad=True)

    def function(x: Any) -> Any:
        return x @ w @ w.T

    remat(function, torch.ones(3, 4), save=save.operators("aten.mm") & save.by(decide) | save.nothing)
    region = f"{test_policies_by_size_region_and_function.__name__}.<locals>.function"
    assert [made for made in seen if made.operator == "aten.mm.default"] == [
        Made("aten.mm.default", region, 1, 96),
        Made("aten.mm.default", region, 2, 48),
    ]
    with pytest.raises(RematError, match=r"gives 'keep' for aten.mm.default; it has to give 'save', 'recompute'"):
        remat(function, torch.ones(3, 4), save=save.by(lambda op, args, made: "keep"))
    with pytest.raises(RematError, match=r"'matmuls' is no policy: give one of `sw.save`"):
        remat(function, torch.ones(3, 4), save="matmuls")  # type: ignore[arg-type]


def test_bytes_of_a_distributed_result_are_those_of_the_largest_shard() -> None:
    mesh = sw.init_mesh(tp=2)
    sizes: list[int] = []

    def note(op: Any, args: Any, made: Made) -> str:
        sizes.append(made.bytes)
        return "recompute"

    x = sw.distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]).requires_grad_()
    remat(lambda x: x.sin(), x, save=save.by(note))
    assert sizes == [2 * 4 * 4]


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}], ids=str)
def test_nothing_is_left_behind(axes: dict[str, int]) -> None:
    """Nothing waits for the garbage collector, whether a backward came or not."""
    block, x = model_and_input(world(axes))
    remat(block, x, save=save.matmuls).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = living()
        out = remat(block, x, save=save.matmuls)
        assert kept_values() > 0
        out.sum().backward()
        assert kept_values() == 0
        del out
        remat(block, x, save=save.matmuls)  # no backward ever comes
        assert kept_values() == 0
        assert living() == before
    finally:
        gc.enable()


def living() -> int:
    """How many tensors and values there are."""
    return sum(issubclass(type(x), Tensor | Value) for x in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
def test_thousands_of_steps(axes: dict[str, int]) -> None:
    """Memory stays where it is after the first steps."""
    block, x = model_and_input(world(axes))
    optimizer = torch.optim.SGD(block.parameters(), 1e-3)
    resident: list[int] = []
    for step in range(10_000 if not axes else 1_000):
        policy = (save.matmuls, save.default, save.nothing, save.everything)[step % 4]
        remat(block, x, save=policy).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert kept_values() == 0
        if step % 500 == 499:
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[-1] - resident[0] < 8 * 2**20, resident


def test_collectives_are_not_made_twice() -> None:
    block, x = model_and_input(sw.init_mesh(dp=2, tp=2))

    def collectives(function: Any) -> tuple[int, int]:
        with sw.trace_comm() as forward:
            out = function(x).square().sum()
        with sw.trace_comm() as backward:
            out.backward()
        return len(forward.records), len(backward.records)

    want = collectives(block)
    for policy in (save.default, save.collectives, save.everything, save.collectives | save.matmuls):
        assert collectives(lambda x: remat(block, x, save=policy)) == want  # noqa: B023
    assert collectives(lambda x: remat(block, x, save=save.nothing))[1] > want[1]


def test_moves_that_the_user_asks_for_are_kept() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()

    def function(x: Any) -> Any:
        y = x.sin().redistribute(placements=[Replicate()]).exp()
        return y.redistribute(placements=[Shard(1)]).cos().full_tensor().sin()

    want = torch.autograd.grad(function(x).sum(), x)[0].full_tensor()
    for policy in POLICIES.values():
        out = remat(function, x, save=policy).sum()
        with sw.trace_comm() as log:
            (got,) = torch.autograd.grad(out, x)
        assert torch.equal(got.full_tensor(), want)
        if policy in (save.collectives, save.default):
            with sw.trace_comm() as without:
                torch.autograd.grad(function(x).sum(), x)
            assert len(log.records) < len(without.records)


def test_ways_in_are_not_asked_twice() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.Bundle([torch.ones(2, 4), torch.ones(3, 4)], requires_grad=True)

    def function(x: Any) -> Any:
        y = sw.DTensor.from_local(x.sin(), mesh, [Shard(0)], run_check=True)
        return (y @ sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])).exp()

    with sw.trace_comm() as log:
        out = remat(function, x, save=save.collectives).sum()
    assert log.counts()["shapes"] == log.counts()["broadcast"] == 1
    with sw.trace_comm() as log:
        out.backward()
    assert not {"shapes", "broadcast"} & log.counts().keys()


# ── random numbers, autocast, modes ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"dp": 3}], ids=str)
@pytest.mark.parametrize("policy", [save.nothing, save.random, save.operators("aten.bernoulli"), save.everything], ids=repr)
def test_random_numbers_are_drawn_again(axes: dict[str, int], policy: save.Policy) -> None:
    mesh = world(axes)
    x = torch.randn(6, 8)
    x = (x if mesh is None else sw.distribute_tensor(x, mesh, [Shard(0)])).requires_grad_()

    def function(x: Any) -> Any:
        y = F.dropout(x.sin(), 0.5)
        y = y * torch.bernoulli(y.detach().sigmoid())
        y = F.dropout(y.cos() * torch.rand_like(y), 0.5)
        return y.exp() * torch.randn_like(y).sin()

    def run(how: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)
        out = how(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return plain(out), plain(grad), torch.rand(2)  # the backward draws nothing

    for got, want in zip(run(lambda x: remat(function, x, save=policy)), run(function), strict=True):
        assert torch.equal(got, want)


def test_factories_draw_again() -> None:
    """Also behind random numbers that are kept, and so not drawn a second time."""
    mesh = sw.init_mesh(dp=2)
    x = sw.distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]).requires_grad_()

    def function(x: Any) -> Any:
        y = F.dropout(x.sin(), 0.5)
        return F.dropout(y * sw.rand(6, 8, mesh=mesh).sin(), 0.5).exp() * sw.randn(6, 8, mesh=mesh, placements=[Shard(1)])

    def run(how: Any) -> Tensor:
        torch.manual_seed(3)
        return plain(torch.autograd.grad(how(x).sum(), x)[0])

    want = run(function)
    for policy in POLICIES.values():
        assert torch.equal(run(lambda x: remat(function, x, save=policy)), want)  # noqa: B023


def test_a_generator_of_the_users_draws_again() -> None:
    draws = torch.Generator().manual_seed(5)
    x = torch.ones(50, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5, generator=draws)
        return (x * mask).sin() * torch.bernoulli(torch.full_like(x, 0.5), generator=draws)

    out = remat(function, x, save=save.nothing)
    state = draws.get_state()
    (got,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(got, torch.where(out != 0, torch.ones_like(x).cos(), 0))
    assert torch.equal(draws.get_state(), state)


def test_autocast_is_the_same_the_second_time() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        y = (x @ w).sin()
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ w
        return (y @ w).exp()

    def run(how: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            outs = [how(x), how(x)]  # the second call finds weights that are cast already
        assert outs[0].dtype == torch.bfloat16
        return [outs[0], *torch.autograd.grad(sum(out.float().sum() for out in outs), [x, w])]

    want = run(function)
    for policy in POLICIES.values():
        assert same(run(lambda x: remat(function, x, save=policy)), want)  # noqa: B023
    with torch.autocast("cpu", torch.bfloat16):
        out = remat(function, x, save=save.nothing)
        assert torch.autograd.grad(out.float().sum(), x)[0].dtype == torch.float32


def test_gradients_are_switched_off_alike() -> None:
    x = torch.randn(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sin().exp()
        return (x * scale).cos()

    for policy in (save.nothing, save.everything):
        (got,) = torch.autograd.grad(remat(function, x, save=policy).sum(), x)
        (want,) = torch.autograd.grad(function(x).sum(), x)
        assert torch.equal(got, want)


# ── backwards of other kinds ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("policy", [save.nothing, save.matmuls, save.everything], ids=repr)
def test_double_backward(axes: dict[str, int], policy: save.Policy) -> None:
    mesh = world(axes)
    w, x = torch.randn(4, 4), torch.randn(4, 4)
    if mesh is not None:
        w, x = sw.distribute_tensor(w, mesh, [Shard(0)]), sw.distribute_tensor(x, mesh, [Shard(1)])
    w.requires_grad_(), x.requires_grad_()

    def function(x: Any) -> Any:
        return ((x @ w).sin() @ w).exp()

    def second(how: Any) -> list[Tensor]:
        (grad,) = torch.autograd.grad(how(x).sum(), x, create_graph=True)
        return [plain(g) for g in torch.autograd.grad(grad.square().sum(), [x, w])]

    assert same(second(lambda x: remat(function, x, save=policy)), second(function))


@pytest.mark.parametrize("policy", [save.nothing, save.matmuls, save.everything], ids=repr)
def test_several_backwards_through_one_block(policy: save.Policy) -> None:
    block, x = model_and_input()
    torch.manual_seed(1)
    want = torch.autograd.grad(block(x).sum(), x)[0]
    torch.manual_seed(1)
    out = remat(block, x, save=policy).sum()
    for again in (True, True, False):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=again)[0], want)
    assert kept_values() == 0


def test_backwards_through_parts_of_one_block() -> None:
    x = torch.randn(4, requires_grad=True)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp(), x.cos().exp().exp()

    wants = [torch.autograd.grad(y.sum(), x)[0] for y in function(x)]
    for order in ((0, 1), (1, 0)):
        outs = remat(function, x, save=save.nothing)
        for i in order:
            assert torch.equal(torch.autograd.grad(outs[i].sum(), x)[0], wants[i])


@pytest.mark.parametrize("policy", [save.nothing, save.matmuls, save.everything], ids=repr)
def test_a_backward_inside_the_block(policy: save.Policy) -> None:
    x = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        y = (x @ x).sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * slope).cos()

    want = torch.autograd.grad(function(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(remat(function, x, save=policy).sum(), x)[0], want)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y, y * 2)
        return y * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y, twice = ctx.saved_tensors
        return grad * (y + x * twice / 2)


def test_functions_of_the_users() -> None:
    x = torch.randn(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return Doubling.apply(x.sin()).cos()

    want = torch.autograd.grad(function(x).sum(), x)[0]
    for policy in (save.nothing, save.everything):
        assert torch.equal(torch.autograd.grad(remat(function, x, save=policy).sum(), x)[0], want)


def test_among_blocks_of_torch() -> None:
    block, x = model_and_input()
    want = gradients(block, x, block)
    ours = lambda x: remat(block, x, save=save.matmuls)  # noqa: E731
    assert same(gradients(block, x, lambda x: checkpoint(ours, x, use_reentrant=False)), want)
    theirs = lambda x: checkpoint(block, x, use_reentrant=False)  # noqa: E731
    assert same(gradients(block, x, lambda x: remat(theirs, x, save=save.matmuls)), want)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_writing_inside_a_block() -> None:
    """To what the block made itself, also to a view of it, and to what is kept."""
    x = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        y = x @ x
        y[:, 0] += 1
        z = y.sin().exp_() * y
        z[1:] *= 2
        out = torch.empty_like(z)
        out.copy_(z).add_(1)
        return out.cos() @ y

    want = torch.autograd.grad(function(x).sum(), x)[0]
    for policy in POLICIES.values():
        assert torch.equal(torch.autograd.grad(remat(function, x, save=policy).sum(), x)[0], want)


@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=str)
def test_writing_to_what_comes_from_outside_is_refused(axes: dict[str, int]) -> None:
    mesh = world(axes)
    outside, x = torch.ones(4), torch.ones(4)
    if mesh is not None:
        outside, x = (sw.distribute_tensor(t, mesh, [Shard(0)]) for t in (outside, x))
    x = x.requires_grad_() * 1

    def write(x: Any) -> Any:
        return x.mul_(2).sin()

    told = r"f32\[4@dp\]" if axes else r"float32\[4\]"
    with pytest.raises(
        RematError, match=rf"aten.mul_.Tensor, call 1 of it in .*write: it writes to argument 0 of the block, {told}"
    ):
        remat(write, x)
    with pytest.raises(RematError, match=rf"aten.add_.Tensor, .*: it writes to a tensor from outside the block, {told}"):
        remat(lambda x: x.sin() * outside.add_(1), x)
    with pytest.raises(RematError, match="it writes to argument 0 of the block"):
        remat(lambda x: x[:2].mul_(2).sin(), x)


def test_writing_between_forward_and_backward_is_refused() -> None:
    w, x = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    out = remat(lambda x: (x * w).sin(), x, save=save.nothing)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RematError, match="is not the same the second time"):
        out.sum().backward()
    out = remat(lambda x: x * w, x, save=save.nothing)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(
        RematError, match=r"needs a tensor from outside the block, float32\[4\], which was written to 1 times since"
    ):
        out.sum().backward()
    y = x * 1
    out = remat(lambda x: x.sin().exp(), y, save=save.nothing)
    y.detach().add_(1)
    with pytest.raises(RematError, match="an argument of the block was written to before the backward"):
        out.sum().backward()
    kept: list[Tensor] = []
    out = remat(lambda x: (kept.append(x.sin().detach()) or x.sin()).exp() * w, x, save=save.everything)
    kept[0].add_(1)
    with pytest.raises(RematError, match="was kept for the backward, and written to afterwards"):
        out.sum().backward()


def test_saved_and_then_written_to() -> None:
    x = torch.ones(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.sin()
        y.add_(1)
        return z * y.exp()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).sum().backward()
    with pytest.raises(RematError, match="which the block writes to afterwards; use an operator that does not write to it"):
        remat(function, x, save=save.nothing).sum().backward()


@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=str)
def test_counters_and_running_statistics_are_updated_once(axes: dict[str, int]) -> None:
    mesh = world(axes)
    torch.manual_seed(0)
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(6, 4)
    if mesh is not None:
        x = sw.distribute_tensor(x, mesh, [Shard(0)])
        for norm in (one, other):
            for name, t in [*norm.named_parameters(), *norm.named_buffers()]:
                placed = sw.distribute_tensor(t.detach(), mesh, {}) if t.ndim else t
                setattr(norm, name, nn.Parameter(placed) if isinstance(t, nn.Parameter) else placed)
    x = x.requires_grad_()
    want = gradients(one, x, lambda x: one(x.sin()).exp())
    got = gradients(other, x, lambda x: remat(lambda x: other(x.sin()).exp(), x, save=save.nothing))
    assert same(got, want)
    for name, buffer in one.named_buffers():
        assert torch.equal(plain(buffer), plain(other.get_buffer(name)))
    assert int(other.num_batches_tracked) == 1


# ── what is not the same twice ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("policy", [save.nothing, save.matmuls, save.default, save.everything], ids=repr)
def test_a_branch_that_flips(axes: dict[str, int], policy: save.Policy) -> None:
    mesh = world(axes)
    w, x, flag = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(1)
    if mesh is not None:
        w, x, flag = (
            sw.distribute_tensor(t, mesh, {"tp": p}) for t, p in ((w, Shard(1)), (x, Replicate()), (flag, Replicate()))
        )
    w.requires_grad_(), x.requires_grad_()

    def function(x: Any) -> Any:
        y = x @ w
        y = y.sin() if bool(flag > 0) else y.cos()
        return (y @ w).exp()

    out = remat(function, x, save=policy).sum()
    flag.add_(1)
    with pytest.raises(
        RematError, match=r"function is not the same the second time: the backward needs .*aten.*\. A block has to"
    ):
        out.backward()


def test_the_error_names_both_sides() -> None:
    x, sizes = torch.randn(4, 4, requires_grad=True), iter([3, 2])

    def function(x: Tensor) -> Tensor:
        return x[:, : next(sizes)].sin().exp()

    out = remat(function, x, save=save.nothing)
    with pytest.raises(RematError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "test_the_error_names_both_sides.<locals>.function is not the same the second time: the backward needs result 0 of "
        "aten.slice.Tensor, call 1 of it in test_the_error_names_both_sides.<locals>.function, float32[4, 3], which the "
        "recomputation did not make; the same call that the forward made otherwise is aten.slice.Tensor, call 1 of it in "
        "test_the_error_names_both_sides.<locals>.function, which gave float32[4, 2]. A block has to do the same whenever it "
        "runs on the same values"
    )


def test_another_tensor_of_the_same_shape_is_another_value() -> None:
    """As where the data choose an expert, and choose another the second time."""
    experts = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    x, turn = torch.randn(4, 4, requires_grad=True), iter([0, 1])
    for policy in (save.nothing, save.matmuls):
        turn = iter([0, 1])
        out = remat(lambda x: (x @ experts[next(turn)]).sin().exp(), x, save=policy)  # noqa: B023
        with pytest.raises(RematError, match="is not the same the second time"):
            out.sum().backward()


def test_a_value_read_by_the_program_is_the_same_the_second_time() -> None:
    """A branch on a value that the block computes cannot flip, though what it is computed from is not quite the same."""
    x, noise = torch.ones(4, requires_grad=True), random.Random(0)

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        return y.exp() if y.sum().item() > noise.random() - 5 else y.cos()

    want = torch.autograd.grad(function(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(remat(function, x, save=save.nothing).sum(), x)[0], want)


def test_what_is_remembered_between_the_runs() -> None:
    """A table that is made by the first run and found by the second; one that is made anew from Python numbers."""
    x, tables = torch.randn(4, 4, requires_grad=True), {}

    def function(x: Tensor) -> Tensor:
        if "angles" not in tables:
            tables["angles"] = torch.arange(4).float().sin().outer(torch.ones(4)).exp()
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return ((x * tables["angles"]).sin() * scale).sin() @ tables["angles"].exp()

    want = torch.autograd.grad(function(x).sum(), x)[0]
    for policy in POLICIES.values():
        tables.clear()
        assert torch.equal(torch.autograd.grad(remat(function, x, save=policy).sum(), x)[0], want)


def test_an_error_in_a_block_is_the_users() -> None:
    x = torch.ones(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        x.sin()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        remat(function, x)
    (grad,) = torch.autograd.grad(remat(lambda x: x.sin().exp(), x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


# ── policies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_policies_are_values() -> None:
    assert len({*POLICIES.values(), *(eval(repr(p)) for name, p in POLICIES.items() if name != "by a function")}) == len(
        POLICIES
    )
    assert repr(save.matmuls | save.collectives & ~(save.random | save.custom)) == (
        "save.matmuls | (save.collectives & ~(save.random | save.custom))"
    )
    assert [pickle.loads(pickle.dumps(policy)) for policy in POLICIES.values()] == list(POLICIES.values())
    assert save.by(products) == save.by(products) != save.by(lambda op, args, made: "save")
    assert repr(save.by(products)).startswith("save.by(products #")
    one, other = (save.by(lambda op, args, made, limit=limit: "save") for limit in (1, 2))
    assert one != other
    with pytest.raises(RematError, match=r"3 is no policy: give one of `sw.save`"):
        save.matmuls | 3  # type: ignore[operator]
    with pytest.raises(RematError, match=r"3 of \*ops is no operator"):
        save.operators(3)
    with pytest.raises(RematError, match="3 is no function"):
        save.by(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("one", Choice)
@pytest.mark.parametrize("other", Choice)
def test_what_must_be_beats_what_may_be(one: Choice, other: Choice) -> None:
    a, b = save.by(lambda op, args, made: one), save.by(lambda op, args, made: other)
    either, both = (a | b).choose(Made("aten.mm")), (a & b).choose(Made("aten.mm"))
    strength = max(abs(one.value), abs(other.value))
    among = [c for c in (one, other) if abs(c.value) == strength]
    assert either.saves == any(c.saves for c in among) and both.saves == all(c.saves for c in among)
    assert abs(either.value) == abs(both.value) == strength
    assert (~a).choose(Made("aten.mm")).value == -one.value


@pytest.mark.parametrize(
    ("family", "inside", "outside"),
    [
        (
            save.matmuls,
            ["aten.mm.default", "aten.bmm.default", "aten._grouped_mm.default"],
            ["aten.mul.Tensor", "aten.mm_x.default"],
        ),
        (
            save.attention,
            ["aten._scaled_dot_product_flash_attention_for_cpu.default", "higher_order.flex_attention"],
            ["aten.mm.default"],
        ),
        (
            save.collectives,
            ["_c10d_functional.all_reduce.default", "shardwise.move", "c10d.allreduce_.default"],
            ["shardwise.draw"],
        ),
        (save.custom, ["mine.op.default"], ["aten.mm.default", "shardwise.move", "_c10d_functional.wait_tensor.default"]),
        (
            save.operators(torch.ops.aten.sin, "aten.add.Tensor"),
            ["aten.sin.out", "aten.add.Tensor"],
            ["aten.add.Scalar", "aten.sinh.x"],
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, save.Policy) else "",
)
def test_families(family: save.Policy, inside: list[str], outside: list[str]) -> None:
    for names, keeps in ((inside, True), (outside, False)):
        for name in names:
            assert family.choose(Made(name)).saves is keeps, name


def test_random_numbers_of_a_factory_that_is_left_out() -> None:
    """What the second run draws with the keys of another draw is another value, and an error where it is needed."""
    mesh = sw.init_mesh(dp=2)
    x, memo = sw.ones(6, 8, mesh=mesh, placements=[Shard(0)], requires_grad=True), []

    def function(x: Any) -> Any:
        if not memo:
            memo.append(sw.rand(6, 8, mesh=mesh))
        return (x * memo[0]).sin() * sw.rand(6, 8, mesh=mesh)

    with pytest.raises(RematError, match="is not the same the second time"):
        remat(function, x, save=save.nothing).sum().backward()


# ── random programs ───────────────────────────────────────────────────────────────────────────────────────────────────


def results(function: Any, inputs: list[Any]) -> list[Tensor]:
    """The values of a program and the gradients of its inputs."""
    spread = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(0)
    values = function(*spread)
    sum(v.square().sum() for v in values).backward()
    return [plain(v).detach() for v in values] + [plain(x.grad) for x in spread if x.grad is not None]


@seed(SEED)
@settings(max_examples=COUNT, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(list(POLICIES.values())), st.booleans())
def test_random_programs(program: Any, policy: save.Policy, nested: bool) -> None:
    axes, inputs, layouts, steps = program
    note(describe(*program))
    mesh = sw.init_mesh(**axes)
    spread = [distributed(x, mesh, p) for x, p in zip(inputs, layouts, strict=True)]

    def function(*values: Any) -> list[Any]:
        return run(steps, list(values))[len(values) :]

    def twice(*values: Any) -> list[Any]:
        inner = (lambda *xs: remat(function, *xs, save=policy)) if nested else function
        return remat(inner, *values, save=policy)

    if steps:
        want, got = results(function, spread), results(twice, spread)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=i: f"value {i}: {m}")
    assert kept_values() == 0
