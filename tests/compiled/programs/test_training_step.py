"""Whole training steps, backward and optimizer inside, as one program: equal to the same step operator by operator."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard
from shardwise.programs import capture


class Sign(torch.optim.Optimizer):
    """An optimizer as users write them."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(torch.tanh(p.grad * 100), alpha=group["lr"])


SECOND_CALL_DIFFERS = 2  # an optimizer that makes part of its state from the first gradients
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {}, 1),
    "adam with amsgrad": (torch.optim.Adam, {"amsgrad": True, "foreach": False}, 1),
    "sgd": (torch.optim.SGD, {"lr": 0.1}, 1),
    "sgd with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, SECOND_CALL_DIFFERS),
    "adagrad": (torch.optim.Adagrad, {}, 1),
    "one's own": (Sign, {}, 1),
}
MESHES = [{"dp": 2}, {"dp": 2, "tp": 3}]


class Training:
    """A small model on a mesh: rows of the data on dp, the hidden units on tp, unevenly."""

    def __init__(self, axes: dict[str, int], optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.mesh = sw.init_mesh(**axes)
        self.model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 5))
        cut = {"0.weight": Shard(0), "0.bias": Shard(0), "3.weight": Shard(1)} if "tp" in axes else {}
        for name, p in list(self.model.named_parameters()):
            placements = {"tp": cut[name]} if name in cut else {}
            owner, _, leaf = name.rpartition(".")
            spread = nn.Parameter(sw.distribute_tensor(p.detach(), self.mesh, placements))
            setattr(self.model.get_submodule(owner), leaf, spread)
        self.optimizer = optimizer(self.model.parameters(), **options)

    def data(self, rows: int = 8) -> list[Any]:
        return [sw.distribute_tensor(torch.randn(rows, n), self.mesh, {"dp": Shard(0)}) for n in (6, 5)]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def values(self) -> list[Tensor]:
        return [p.full_tensor() for p in self.model.parameters()]


def run(training: Training, step: Callable[..., Any], rows: int = 8, steps: int = 3) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    torch.manual_seed(1)
    losses = [step(*training.data(rows)).full_tensor() for _ in range(steps)]
    return [*losses, *training.values()]


def check(axes: dict[str, int], wrap: Callable[..., Any], change: Callable[[Training], Any] = Training.step.__get__) -> Any:
    """Steps of one training as they are and of another wrapped agree; gives what was wrapped."""
    plain, traced = Training(axes), Training(axes)
    wrapped = wrap(change(traced))
    torch.testing.assert_close(run(traced, wrapped), run(plain, change(plain)), atol=1e-5, rtol=1e-4)
    return wrapped


#: Each optimizer on one of the meshes; on both with --slow.
CAPTURED = [
    pytest.param(way, axes, marks=[] if (number + other) % 2 else pytest.mark.slow)
    for number, way in enumerate(WAYS)
    for other, axes in enumerate(MESHES)
]


@pytest.mark.parametrize(("way", "axes"), CAPTURED, ids=str)
def test_captured(way: str, axes: dict[str, int]) -> None:
    optimizer, options, programs = WAYS[way]
    plain, traced = Training(axes, optimizer, **options), Training(axes, optimizer, **options)
    step = capture(traced.step)
    torch.testing.assert_close(run(traced, step), run(plain, plain.step), atol=1e-5, rtol=1e-4)
    assert [part for part, _ in step.captured] == ["inference"] * programs


def test_rows_that_do_not_divide() -> None:
    plain, traced = Training({"dp": 3}), Training({"dp": 3})
    torch.testing.assert_close(run(traced, capture(traced.step), rows=7), run(plain, plain.step, rows=7), atol=1e-5, rtol=1e-4)


def test_the_step_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, beside the same model on one device."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    demo = importlib.import_module("train_gpt")
    mesh, steps = sw.init_mesh(dp=2, tp=2), []
    torch.manual_seed(0)
    model = demo.GPT()
    twin = demo.distribute(copy.deepcopy(model), mesh)
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)

        def step(tokens: Tensor, targets: Tensor, one: Any = one, optimizer: Any = optimizer) -> Tensor:
            loss = F.cross_entropy(one(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        steps.append(step)
    captured = capture(steps[1])
    for batch in itertools.islice(demo.batches(), 2):
        want = steps[0](batch[:, :-1], batch[:, 1:])
        got = captured(*(sw.distribute_tensor(t, mesh, {"dp": Shard(0)}) for t in (batch[:, :-1], batch[:, 1:])))
        torch.testing.assert_close(got.full_tensor(), want.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("axes", [{"dp": 2}, pytest.param({"dp": 2, "tp": 3}, marks=pytest.mark.slow)], ids=str)
def test_compiled(axes: dict[str, int]) -> None:
    check(axes, lambda step: sw.compile(step, fullgraph=True))


def on_this_rank() -> int:
    check({"dp": 2, "tp": 2}, capture)
    step = check({"dp": 4}, capture, without_clipping)
    return len([line for line in step.text().splitlines() if "_c10d_functional.all_reduce(" in line])


def test_on_processes(pool: Any) -> None:
    assert pool(4).run(on_this_rank) == [1] * 4, "all gradients together; the loss waits for its reader"


def without_clipping(training: Training) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = training.loss(x, y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    return step


def test_gradients_that_stay() -> None:
    """Two calls add up, and what is left on the parameters has their layout."""
    plain, traced = Training({"dp": 2, "tp": 3}), Training({"dp": 2, "tp": 3})
    for training, wrap in ((plain, lambda f: f), (traced, capture)):

        @wrap
        def accumulate(x: Tensor, y: Tensor, training: Training = training) -> None:
            training.loss(x, y).backward()

        torch.manual_seed(2)
        for _ in range(2):
            accumulate(*training.data())
    for one, other in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert one.grad.layout is one.layout
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor(), atol=1e-5, rtol=1e-4)


def accumulating(training: Training) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            (training.loss(x * (part + 1), y) / 2).backward()
        training.optimizer.step()
        return training.loss(x, y).detach()

    return step


def test_several_backwards_and_gradients_set_to_zero() -> None:
    check({"dp": 2, "tp": 3}, capture, accumulating)


def with_closure(training: Training) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            training.optimizer.zero_grad()
            loss = training.loss(x, y)
            loss.backward()
            return loss.detach()

        return training.optimizer.step(closure)

    return step


def by_hand(training: Training) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = training.loss(x, y)
        loss.backward()
        with torch.no_grad():
            for p in training.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss.detach()

    return step


def with_penalty(training: Training) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(training.model(x).sum(), x, create_graph=True)
        loss = training.loss(x, y) + slope.square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    return step


def with_idle_parameters(training: Training) -> Callable[..., Any]:
    training.model[0].weight.requires_grad_(False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = training.model[0](x).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("change", [with_closure, by_hand, with_penalty, with_idle_parameters])
def test_other_steps(change: Callable[..., Any]) -> None:
    if change is with_penalty and torch.__version__ < "2.13":
        pytest.skip("this Dynamo does not trace requires_grad_ of a tensor made in the function")
    assert len(check({"dp": 2, "tp": 3}, capture, change).captured) <= SECOND_CALL_DIFFERS


def hooked(training: Training) -> Callable[..., Any]:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in training.model.parameters():
            p.grad.mul_(0.5)

    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in training.model.parameters():
                p.mul_(0.9)

    training.optimizer.register_step_pre_hook(halve)
    training.optimizer.register_step_post_hook(shrink)
    return training.step


def test_hooks_of_the_optimizer() -> None:
    check({"dp": 2}, capture, hooked)


def test_a_learning_rate_that_changes() -> None:
    """As a tensor it is an input of the program."""
    found = []
    for wrap in (lambda f: f, capture):
        training = Training({"dp": 2}, lr=torch.tensor(0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
        step = wrap(training.step)
        torch.manual_seed(1)
        for _ in range(4):
            step(*training.data())
            scheduler.step()
        found.append(training.values())
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    assert len(step.captured) == 1


def test_results_come_without_the_graph_that_the_backward_used_up() -> None:
    training = Training({"dp": 2})

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = training.loss(x, y)
        loss.backward()
        return loss

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return training.loss(x, y)

    x, y = training.data()
    got, other = capture(step)(x, y), capture(forward)(x, y)
    torch.testing.assert_close(got, other.detach())
    assert other.requires_grad and not got.requires_grad


def test_a_gradient_of_before_that_the_step_forgets_is_refused() -> None:
    """Torch sets up an optimizer by the gradients that parameters have when the step begins."""
    training = Training({"dp": 2})
    for p in training.model.parameters():
        p.grad = torch.ones_like(p)

    def step(x: Tensor) -> None:
        training.optimizer.zero_grad()
        training.model[0](x).sum().backward()  # the other layers have no gradient
        training.optimizer.step()

    with pytest.raises(Exception, match="pending mutation on parameter"):
        capture(step)(training.data()[0])
    for p in training.model.parameters():
        assert torch.equal(p.grad.full_tensor(), torch.ones(p.shape)), "as it was"
