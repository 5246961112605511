"""What a `with` block of Shardwise sets: it reaches threads and tasks, and is lost or leaked by no generator."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.policy import policy
from shardwise.comm.watch.log import watching
from shardwise.debug import CommDebugMode
from shardwise.layouts.mesh import chosen


class Kind(NamedTuple):
    """A `with` block, and whether its value holds where this is called."""

    block: Callable[[], Any]
    holds: Callable[[], bool]


def is_simulated() -> bool:
    try:
        sw.init_mesh(a=4)
    except sw.MeshError:
        return True
    return False


def has_a_mesh() -> bool:
    try:
        return chosen() is MESH
    except sw.MeshError:
        return False


def logs() -> bool:
    return watching.get() is not None and bool(watching.get().logs)


#: One object for all blocks of all threads, as meshes are.
MESH = sw.Mesh(("a", "b"), (2, 2), range(4), "cpu", "simulated")
KINDS = {
    "mesh": Kind(lambda: MESH, has_a_mesh),
    "simulate": Kind(lambda: sw.simulate(3), is_simulated),
    "communication": Kind(lambda: sw.communication("forbid"), lambda: policy.get().mode == "forbid"),
    "trace_comm": Kind(sw.trace_comm, logs),
    "CommDebugMode": Kind(CommDebugMode, logs),
    "debug_mode": Kind(sw.debug_mode, lambda: watching.get() is not None and watching.get().checks is not None),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for name, kind in KINDS.items():
        assert not kind.holds() and not in_thread(kind.holds), f"{name} holds after its blocks were left"


# ── threads ──


@every_kind
def test_threads_are_in_the_blocks_of_the_main_thread(kind: Kind) -> None:
    with ThreadPoolExecutor(1) as before:
        with kind.block():
            assert in_thread(kind.holds) and before.submit(kind.holds).result()
        assert not before.submit(kind.holds).result() and not in_thread(kind.holds)


@every_kind
def test_a_block_of_another_thread_is_its_own(kind: Kind) -> None:
    entered, looked = threading.Event(), threading.Event()

    def work() -> tuple[bool, bool]:
        with kind.block():
            entered.set()
            looked.wait(60)
            copied = contextvars.copy_context()
            return kind.holds(), in_thread(lambda: copied.run(kind.holds))

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        entered.wait(60)
        assert not kind.holds() and not in_thread(kind.holds)
        looked.set()
        assert working.result() == (True, True), "there, and in a copy of its context"


def test_threads_in_blocks_of_their_own_do_not_meet() -> None:
    start = threading.Barrier(4)

    def work(ranks: int) -> set[int]:
        start.wait(60)
        seen = set()
        for _ in range(50):
            with sw.simulate(ranks):
                seen.add(sw.init_mesh(a=ranks).size())
                with pytest.raises(sw.MeshError, match=f"the world has {ranks}"):
                    sw.init_mesh(a=ranks + 1)
        return seen

    with sw.simulate(9), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(2, 6))) == [{2}, {3}, {4}, {5}]
        assert pool.submit(lambda: sw.init_mesh(a=9).size()).result() == 9


def test_threads_in_blocks_of_the_same_meshes_do_not_meet() -> None:
    start, meshes = threading.Barrier(4), [MESH, MESH["a"], MESH["b"]]

    def work(first: int) -> None:
        start.wait(60)
        for turn in range(first, first + 50):
            one, other = meshes[turn % 3], meshes[(turn + 1) % 3]
            with one, other, one:
                assert chosen() is one
                with other:
                    assert chosen() is other and sw.zeros(4).device_mesh is other
                assert chosen() is one
            assert chosen() is MESH

    with MESH, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_meshes_are_left_in_any_order_and_place() -> None:
    one, other = MESH["a"], MESH["b"]
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert chosen() is other
    in_thread(lambda: other.__exit__(None, None, None))
    with pytest.raises(sw.MeshError, match="none is current"):
        chosen()


class Deeper(torch.autograd.Function):
    """A backward inside a backward: autograd runs those that lie deep in threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, look: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.look = depth, look
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.look()
        if ctx.depth:
            with torch.enable_grad():
                Deeper.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.look).sum().backward()
        return grad, None, None


@every_kind
def test_autograds_threads_are_in_the_blocks_of_whoever_asked_for_the_backward(kind: Kind) -> None:
    seen: dict[int, bool] = {}

    def look() -> None:
        seen[threading.get_ident()] = kind.holds()

    def work() -> None:
        with kind.block():
            Deeper.apply(torch.ones(1, requires_grad=True), 80, look).sum().backward()

    in_thread(work)
    assert len(seen) > 1 and all(seen.values())


# ── generators ──


@every_kind
def test_a_suspended_generator_keeps_its_block_to_itself(kind: Kind) -> None:
    def numbers() -> Iterator[bool]:
        with kind.block():
            yield kind.holds()
            yield kind.holds()
        yield kind.holds()

    def through() -> Iterator[bool]:
        yield from numbers()

    for several in (numbers(), through()):
        assert next(several) and not kind.holds() and not in_thread(kind.holds)
        with kind.block():
            assert kind.holds()
        assert in_thread(lambda several=several: next(several)), "it goes on in another thread"
        assert not kind.holds() and not next(several)


@every_kind
def test_generators_end_in_any_order_and_place(kind: Kind) -> None:
    def number() -> Iterator[int]:
        with kind.block():
            yield 1

    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        several = [number() for _ in range(3)]
        for each in several:
            next(each)
        for index in order:
            assert not kind.holds()
            several[index].close()
    first, second, third = number(), number(), number()
    for each in (first, second, third):
        next(each)
    contextvars.copy_context().run(first.close)
    in_thread(second.close)
    del third
    gc.collect()


@every_kind
def test_nested_blocks_of_generators_and_functions(kind: Kind) -> None:
    ranks: list[int] = []

    def helper() -> None:
        with sw.simulate(2):
            ranks.append(sw.init_mesh(a=2).size())
            with pytest.raises(sw.MeshError, match="the world has 2"):
                sw.init_mesh(a=3)

    def numbers() -> Iterator[None]:
        with sw.simulate(4):
            helper()
            with pytest.raises(sw.MeshError, match="the world has 4"):
                sw.init_mesh(a=5)
            yield
            helper()

    with sw.simulate(8):
        several = numbers()
        next(several)
        assert sw.init_mesh(a=8).size() == 8
        assert next(several, "end") == "end"
        assert sw.init_mesh(a=8).size() == 8
    assert ranks == [2, 2]


@every_kind
def test_context_managers_made_of_generators(kind: Kind) -> None:
    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with kind.block():
            yield

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(block())
            yield

    def numbers() -> Iterator[bool]:
        with around():
            yield kind.holds()

    with around():
        assert kind.holds() and in_thread(kind.holds)
    several = numbers()
    assert next(several) and not kind.holds()
    several.close()
    if isinstance(kind.block(), contextlib.ContextDecorator):
        assert kind.block()(kind.holds)(), "as a decorator"


@pytest.fixture
def three_ranks() -> Iterator[None]:
    with sw.simulate(3):
        yield


def test_fixtures(three_ranks: None) -> None:
    assert is_simulated()


# ── coroutines ──


@every_kind
def test_tasks(kind: Kind) -> None:
    async def child() -> bool:
        await asyncio.sleep(0)
        return kind.holds()

    async def inside(entered: asyncio.Event, leave: asyncio.Event) -> list[bool]:
        with kind.block():
            entered.set()
            await leave.wait()
            late = asyncio.create_task(child())
            found = [
                kind.holds(),
                await asyncio.create_task(child()),
                await asyncio.to_thread(kind.holds),
                in_thread(kind.holds),
            ]
            late_too = asyncio.create_task(child())
        return [*found, await late, not await late_too]

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, leave))
        await entered.wait()
        assert not kind.holds() and not await child() and not in_thread(kind.holds)
        leave.set()
        assert await task == [True] * 6

    asyncio.run(main())


@every_kind
def test_asynchronous_generators(kind: Kind) -> None:
    async def numbers() -> Any:
        with kind.block():
            yield kind.holds()
            await asyncio.sleep(0)
            yield kind.holds()

    async def main() -> None:
        several = numbers()
        async for held in several:
            assert held and not kind.holds()
        left = numbers()
        assert await anext(left) and not kind.holds()
        await left.aclose()

    asyncio.run(main())
