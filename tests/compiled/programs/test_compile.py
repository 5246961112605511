"""One compilation for the job, on Gloo ranks that share no folder, as on many hosts.

Two sets of processes serve all tests: the first starts cold; the second, with other hash seeds, finds the folders warm.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
import shardwise.programs.job.compile
import shardwise.programs.job.election
from shardwise import Replicate, Shard
from shardwise.errors import CompileError
from shardwise.programs import compile, compile_report, load_artifacts, save_artifacts
from shardwise.programs.job.election import Post
from tests.helpers.kernel_count import kernels, settings
from tests.helpers.process_pool import Pool

RANKS = 4


def use_folder(folder: str) -> None:
    """From now on this rank compiles into a folder of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/rank{dist.get_rank()}"
    torch._dynamo.reset()


def latest(before: int) -> list[tuple[str, str]]:
    return [(done.key, done.how) for done in compile_report()[before:]]


def train(rows: int) -> tuple[list[tuple[str, str]], float]:
    """Compile and run a step over DTensors, forward and backward, and compare it with one device; what was compiled, and how
    many seconds that took."""
    mesh, before, start = sw.init_mesh(tp=RANKS), len(compile_report()), time.monotonic()
    x, w = torch.randn(rows, 8), torch.randn(8, 12, requires_grad=True)
    dx = sw.distribute_tensor(x, mesh, [Shard(0)])
    dw = sw.distribute_tensor(w.detach(), mesh, [Replicate()]).requires_grad_()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).square().mean().redistribute(placements=[Replicate()])

    got = compile(step, fullgraph=True)(dx, dw)
    got.backward()
    seconds = time.monotonic() - start
    want = torch.relu(x @ w).square().mean()
    want.backward()
    torch.testing.assert_close(got.full_tensor(), want)
    torch.testing.assert_close(dw.grad.full_tensor(), w.grad)
    return latest(before), seconds


def run_train(folder: str, rows: int) -> tuple[list[tuple[str, str]], float]:
    use_folder(folder)
    return train(rows)


def run_dynamic(folder: str) -> list[tuple[str, str]]:
    """Plain tensors, sizes as symbols, a module, and sizes that the backward needs."""
    use_folder(folder)
    before = len(compile_report())
    model = torch.nn.Linear(6, 5)
    compiled = compile(model, fullgraph=True, dynamic=True)
    for rows in (4, 7, 9):
        x = torch.randn(rows, 6)
        grads = []
        for module in (model, compiled):
            model.zero_grad()
            (module(x).exp().sum(1) * rows).sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(*grads)
    return latest(before)


def run_step(folder: str) -> list[tuple[str, str]]:
    """A whole training step, backward and optimizer inside; its losses are those of one device."""
    use_folder(folder)
    mesh, before = sw.init_mesh(tp=RANKS), len(compile_report())
    x, w = torch.randn(8, 6), torch.randn(6, 5)
    found = []
    for wrap, data, weight in (
        (lambda step: step, x, w.clone()),
        (compile(fullgraph=True), sw.distribute_tensor(x, mesh, [Shard(0)]), sw.distribute_tensor(w, mesh)),
    ):
        parameter = torch.nn.Parameter(weight)
        optimizer = torch.optim.AdamW([parameter])

        def step(x: torch.Tensor, parameter: Any = parameter, optimizer: Any = optimizer) -> torch.Tensor:
            loss = (x @ parameter).tanh().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = wrap(step)
        losses = [run(data).detach() for _ in range(3)]
        found.append([loss.full_tensor() if isinstance(loss, sw.DTensor) else loss for loss in losses])
    torch.testing.assert_close(*found)
    return latest(before)


def run_again(folder: str, rows: int) -> list[list[tuple[str, str]]]:
    """The same once more in this process, twice."""
    found = []
    for _ in range(2):
        use_folder(folder)
        found.append(train(rows)[0])
    return found


def attempt(folder: str, during: Callable[..., Any], timeout: float = 60.0) -> str:
    """What a rank is told when compiling goes wrong; Inductor is replaced by `during`."""
    use_folder(folder)
    with mock.patch.object(shardwise.programs.job.compile, "compile_local", during):
        try:
            compile(lambda x: x.cos() + during.__name__.count("_"), timeout=timeout)(torch.randn(5))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


def refuse_to_compile(*args: Any) -> Any:
    raise ValueError("no registers left")


def compile_for_ever(*args: Any) -> Any:
    time.sleep(6)
    raise ValueError("slept")


def die(*args: Any) -> Any:
    time.sleep(4)  # until the others wait
    os._exit(1)


def run_error(folder: str) -> str:
    return attempt(folder, refuse_to_compile)


def run_slow(folder: str) -> str:
    return attempt(folder, compile_for_ever, timeout=2.0)


def run_death(folder: str) -> None:
    shardwise.programs.job.election.SILENCE = 2.0
    start = time.monotonic()
    told = attempt(folder, die)
    Path(folder, f"told{dist.get_rank()}").write_text(json.dumps([told, time.monotonic() - start]))


def run_save(path: str) -> None:
    save_artifacts(path)


def run_load(folder: str, path: str, rows: int) -> tuple[list[tuple[str, str]], float]:
    use_folder(folder)
    mesh = sw.init_mesh(tp=RANKS)
    load_artifacts(path, mesh)
    load_artifacts(path)
    return train(rows)


def run_save_without_others(path: str) -> str:
    if dist.get_rank() != 0:
        Post("artifacts")  # keeps the count of calls in step
        return ""
    with pytest.raises(CompileError) as caught:
        save_artifacts(path, timeout=0.5)
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def cold(folder: str) -> Iterator[Pool]:
    yield from started(folder, seed="1")


@pytest.fixture(scope="module")
def warm(folder: str, cold: Pool) -> Iterator[Pool]:
    cold.close()
    yield from started(folder, seed="2")


def started(folder: str, seed: str) -> Iterator[Pool]:
    with mock.patch.dict(os.environ, {**settings(folder), "PYTHONHASHSEED": seed}):
        pool = Pool(RANKS)
        pool.run(time.time)
    yield pool
    pool.close()


def hows(results: list[Any]) -> Counter[str]:
    return Counter(how for result in results for _, how in result)


# ── the first start ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_rank_compiles_and_the_others_load(cold: Pool, folder: str) -> None:
    results = cold.run(run_train, folder, 16, timeout=300.0)
    reports = [report for report, _ in results]
    assert hows(reports) == {"compiled": 1, "loaded": 3}
    assert len({key for report in reports for key, _ in report}) == 1
    (leader,) = [f"rank{rank}" for rank, report in enumerate(reports) if report[0][1] == "compiled"]
    assert list(kernels(folder)) == [leader], "no other rank ran the C++ compiler on a kernel"


def test_uneven_shards_are_compiled_once_for_each_shape(cold: Pool, folder: str) -> None:
    reports = [report for report, _ in cold.run(run_train, folder, 10, timeout=300.0)]
    assert hows(reports) == {"compiled": 2, "loaded": 2}
    assert reports[3][0][1] == "compiled", "3, 3, 3 and 1 rows"


def test_sizes_as_symbols(cold: Pool, folder: str) -> None:
    reports = cold.run(run_dynamic, folder)
    assert hows(reports) == {"compiled": 1, "loaded": 3}


def test_whole_steps(cold: Pool, folder: str) -> None:
    assert hows(cold.run(run_step, folder, timeout=300.0)) == {"compiled": 1, "loaded": 3}


def test_compiling_again_in_the_same_process_finds_it(cold: Pool, folder: str) -> None:
    for reports in cold.run(run_again, folder, 16):
        assert hows(reports) == {"hit": 2}


def test_an_error_of_the_rank_that_compiles_reaches_the_others(cold: Pool, folder: str) -> None:
    told = cold.run(run_error, folder)
    (leader,) = [rank for rank in range(RANKS) if "BackendCompilerFailed" in told[rank]]
    for rank in set(range(RANKS)) - {leader}:
        start = f"CompileError: rank {rank} waited for rank {leader} to compile program "
        assert told[rank].startswith(start), told[rank]
        assert told[rank].endswith(", and it failed there with ValueError: no registers left")


def test_a_rank_waits_no_longer_than_told(cold: Pool, folder: str) -> None:
    told = cold.run(run_slow, folder)
    waited = [text for text in told if "CompileError" in text]
    assert len(waited) == RANKS - 1
    for text in waited:
        assert "allow more than timeout=2 s in sw.compile, or ship what an earlier job compiled" in text


# ── the second start ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_warm_start_compiles_nothing(cold: Pool, folder: str, request: pytest.FixtureRequest) -> None:
    path = str(Path(folder, "artifacts"))
    cold.run(run_save, path)
    assert "call it on every rank of the job" in cold.run(run_save_without_others, path)[0]
    warm = request.getfixturevalue("warm")
    before = kernels(folder)
    for rows in (16, 10):
        assert hows([report for report, _ in warm.run(run_train, folder, rows, timeout=300.0)]) == {"hit": RANKS}
    assert hows(warm.run(run_step, folder, timeout=300.0)) == {"hit": RANKS}
    assert kernels(folder) == before
    empty = str(Path(folder, "empty"))
    for rows in (16, 10):
        assert hows([report for report, _ in warm.run(run_load, empty, path, rows)]) == {"hit": RANKS}
    assert kernels(folder) == before


def test_the_others_notice_when_the_rank_that_compiles_dies(warm: Pool, folder: str) -> None:
    with pytest.raises(RuntimeError, match="ended without an answer"):
        warm.run(run_death, folder)
    told = {rank: Path(folder, f"told{rank}") for rank in range(RANKS)}
    (leader,) = [rank for rank, file in told.items() if not file.exists()]
    for rank in set(told) - {leader}:
        text, seconds = json.loads(told[rank].read_text())
        assert text.startswith(f"CompileError: rank {rank} waited for rank {leader} to compile program ")
        assert "its process has ended or hangs; look for its own error in the job's output, and start the job again" in text
        assert seconds < 20
