"""capture: a distributed function as a local program that later calls run without any work on layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import DTensor, Shard
from shardwise._torch.compiler import HAS_KEYS
from tests.helpers.compiled_functions import AXES, assert_same, fake_job, functions, inputs, values


def compare(axes: dict[str, int]) -> int:
    """Run each function captured and as it is on this rank, the captured one twice; gives how many."""
    mesh = sw.init_mesh(**axes)
    for name, function in functions(mesh).items():
        captured, want = sw.capture(function), values(function, mesh)
        assert_same(values(captured, mesh), want, name)
        assert_same(values(captured, mesh), want, f"{name}, the second time")
        assert [part for part, _ in captured.captured] in (["forward", "backward"], ["inference"]), name
    return len(functions(mesh))


@pytest.mark.parametrize(("ranks", "axes"), AXES)
def test_captured_functions_mean_what_they_mean(ranks: int, axes: dict[str, int], pool: Any) -> None:
    assert set(pool(ranks).run(compare, axes)) == {20 + HAS_KEYS}


def test_in_a_simulated_world() -> None:
    assert compare({"dp": 2, "tp": 2}) == 20 + HAS_KEYS


def test_a_replay_decides_and_plans_nothing() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    captured = sw.capture(lambda x, w: torch.relu(x @ w).exp())
    x, w = inputs(mesh)
    captured(x, w)
    before = sw.cache_info()
    captured(x, w)
    after = sw.cache_info()
    assert all(
        after[name].hits + after[name].misses == before[name].hits + before[name].misses for name in ("decisions", "plans")
    )


def test_other_layouts_shapes_and_dtypes_trace_anew() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    captured = sw.capture(lambda x: x * 2)
    for count, (shape, placements, dtype) in enumerate(
        [
            ((4, 4), {"dp": Shard(0)}, torch.float32),
            ((4, 4), {"dp": Shard(1)}, torch.float32),
            ((8, 4), {"dp": Shard(0)}, torch.float32),
            ((4, 4), {"dp": Shard(0)}, torch.float64),
        ],
        1,
    ):
        x = sw.ones(*shape, mesh=mesh, placements=placements, dtype=dtype)
        for _ in range(2):
            assert torch.equal(captured(x).full_tensor(), 2 * torch.ones(shape, dtype=dtype))
        assert len(captured.captured) == count


def test_what_the_function_depends_on_traces_anew() -> None:
    mesh, settings = sw.init_mesh(tp=2), {"factor": 2.0}
    x = sw.ones(4, mesh=mesh, placements=[Shard(0)])
    captured = sw.capture(lambda x: x * settings["factor"])
    assert captured(x).sum().item() == 8
    settings["factor"] = 3.0
    assert captured(x).sum().item() == 12


def test_the_number_of_programs_is_bounded() -> None:
    mesh = sw.init_mesh(tp=2)
    captured = sw.capture(lambda x: x + 1)
    for size in range(2, 42, 2):
        assert captured(sw.ones(size, mesh=mesh, placements=[Shard(0)])).sum().item() == 2 * size
        assert len(captured.captured) <= 8


def test_some_outputs_without_gradient() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.ones(4, 4, mesh=mesh, placements=[Shard(0)]).requires_grad_()
    _, used, _ = sw.capture(lambda x: (x * 2, x.sin().sum(), x @ x.t()))(x)
    used.backward()
    assert torch.allclose(x.grad.full_tensor(), torch.full((4, 4), 1.0).cos())


def test_print_shows_where_collectives_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_job(0, 4):
        mesh = sw.init_mesh(dp=2, tp=2)
        x, w = inputs(mesh)

        def loss(x: DTensor, w: DTensor) -> Any:
            y = F.softmax(x @ w, -1)  # the line of the maximum
            return y.square().sum()

        program = sw.capture(loss)
        program(x, w).backward()
        program.print()
    shown = capsys.readouterr().out
    assert "forward(" in shown and "backward(" in shown
    lines = [line for line in shown.splitlines() if "_c10d_functional.all_reduce" in line]
    line = loss.__code__.co_firstlineno + 1
    assert any(f"test_capture.py:{line}" in text and "aten._softmax: [@dp, _ | max@tp] → [@dp, _]" in text for text in lines), (
        shown
    )
    assert all("#" in text for text in lines), shown


def test_gradients_of_leaves_are_reduced_together() -> None:
    with fake_job(0, 4):
        mesh = sw.init_mesh(dp=2, tp=2)
        weights = [torch.nn.Parameter(sw.distribute_tensor(torch.randn(16, 16), mesh, {"tp": Shard(1)})) for _ in range(4)]
        x = sw.distribute_tensor(torch.randn(8, 16), mesh, {"dp": Shard(0)})
        program = sw.capture(lambda x: sum(torch.relu(x @ w).square().sum() for w in weights))
        program(x).backward()
        text = program.text().partition("backward(")[2]
        assert text.count("_c10d_functional.all_reduce(") == 1
        assert all(w.grad.layout is w.layout for w in weights)


def test_a_view_of_a_copy_has_memory_of_its_own() -> None:
    x = sw.ones(4, 2, mesh=sw.init_mesh(tp=2), placements=[sw.Replicate()])
    sw.capture(lambda x: torch.empty_like(x).copy_(x).view(-1))(x).add_(1)
    assert x.sum().item() == 8.0


def test_a_part_of_a_list_of_numbers_is_not_taken_for_the_whole() -> None:
    def both(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return torch._foreach_add(torch._foreach_mul([a, b, c], 2.0)[:2], torch._foreach_mul([b, c], 3.0))

    given = [torch.tensor(float(i)) for i in range(3)]
    assert list(sw.capture(both)(*given)) == list(both(*given))
