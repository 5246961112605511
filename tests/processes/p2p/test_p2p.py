"""Point-to-point communication on Gloo ranks gives what it gives in a simulated world."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise import Bundle, WorldError, p2p
from shardwise._torch.groups import AsyncTensor
from tests.helpers import message_batches as letters
from tests.helpers.process_pool import Pool

Pools = Callable[[int], Pool]


def meshes() -> list[Any]:
    """Meshes of all four ranks, in order and not."""
    return [sw.init_mesh(pp=4), sw.init_mesh(dp=2, pp=2), sw.init_mesh(dp=2, pp=2, ranks=[2, 0, 3, 1])]


def run_random(first: int, last: int) -> int:
    every = meshes()
    for seed in range(first, last):
        mesh = every[seed % 3]
        drawn, place = letters.draw(seed, mesh), mesh.place(dist.get_rank())
        out, grads = letters.run(drawn, mesh, lambda shards, at=place: shards[at].clone())
        flows = [letter for letter in drawn if letter.dtype.is_floating_point]
        for letter, x in zip(drawn, out, strict=True):
            assert torch.equal(x, letter.arrives(place)), (seed, letter)
        for letter, x in zip(flows, grads, strict=True):
            assert torch.equal(x, letters.gradient(letter, place)), (seed, letter)
    return last - first


def test_random_batches(pool: Pools) -> None:
    assert pool(4).run(run_random, 0, 1000) == [1000] * 4


def run_mismatched() -> int:
    """A batch of which every rank knows all is refused by every rank, before anything is sent."""
    every, refused = meshes(), 0
    for seed in range(300):
        mesh = every[seed % 3]
        drawn = letters.draw(seed, mesh)
        if any(goal >= 0 for letter in drawn for goal in letter.goals):
            with pytest.raises(WorldError, match=r"rank \d.*rank \d"):
                p2p.batch(letters.spoil(seed, drawn, mesh))
            refused += 1
    return refused


def test_random_batches_that_do_not_match(pool: Pools) -> None:
    refused = pool(4).run(run_mismatched)
    assert min(refused) >= 200 and len(set(refused)) == 1


def run_alone() -> tuple[list[float], list[float], list[float]]:
    """Rank 0 sends to 1, 1 to 0 and to itself, each in its own program; gradients come back."""
    rank = dist.get_rank()
    x = torch.tensor([1.0, 2.0]) + 10 * rank
    x.requires_grad_()
    if rank == 0:
        (got,) = p2p.batch([p2p.send(x, to=1), p2p.recv((2,), source=1)])
        own = x
    else:
        got, own = p2p.batch([p2p.send(x, to=0), p2p.recv((2,), source=0), p2p.send(x, to=1), p2p.recv((2,), source=1)])
    (got * (rank + 1) + own).sum().backward()
    return got.tolist(), own.tolist(), x.grad.tolist()


def test_ranks_by_number(pool: Pools) -> None:
    zero, one = pool(2).run(run_alone)
    assert zero == ([11, 12], [1, 2], [3, 3])  # its own one, and two from rank 1
    assert one == ([1, 2], [11, 12], [2, 2])


def run_only_receiving() -> list[float] | None:
    x = torch.ones(2, requires_grad=True)
    if dist.get_rank() == 0:
        assert p2p.batch([p2p.send(x * 3, to=1)]) == ()
        p2p.wait()
        return None
    (got,) = p2p.batch([p2p.recv((2,), source=0, requires_grad=True)])
    assert got.requires_grad
    return got.tolist()


def test_a_rank_that_only_receives(pool: Pools) -> None:
    assert pool(2).run(run_only_receiving) == [None, [3, 3]]


def run_waiting() -> None:
    """What is received waits when it is used, and what was sent may be written to at once."""
    mesh = sw.init_mesh(pp=2)
    x = torch.full((1 << 20,), float(dist.get_rank()))
    y = p2p.shift(x, mesh=mesh)
    x.fill_(7)
    assert isinstance(y, AsyncTensor)
    assert type(p2p.wait(y)) is Tensor
    assert (y + 0).eq(1 - dist.get_rank()).all() and p2p.wait(y).eq(1 - dist.get_rank()).all()
    local = sw.DTensor.from_local(p2p.shift(x, mesh=mesh), mesh, [sw.Shard(0)])
    assert (local * 2).full_tensor().eq(14).all()


def test_waiting(pool: Pools) -> None:
    pool(2).run(run_waiting)


def run_shape() -> str:
    """What the receiver does not expect is refused by the sender, and reaches nobody."""
    mesh = sw.init_mesh(pp=2)
    x = torch.ones(3)
    with pytest.raises(WorldError) as error:
        p2p.batch([p2p.send(x, mesh=mesh, shift=1), p2p.recv((2,), mesh=mesh, shift=-1)])
    return str(error.value)


def test_a_shape_that_is_not_expected(pool: Pools) -> None:
    for rank, text in enumerate(pool(2).run(run_shape)):
        assert f"rank {rank} sends a float32[3] tensor (send 0) to rank {1 - rank}" in text and "float32[2] tensor" in text


def run_alone_at_random(count: int, spoil: bool) -> list[str]:
    """Batches that name ranks by number, so that a rank knows its own side only; where spoilt, of one message only one side is
    there, or it has another shape. What was raised."""
    rank, errors = dist.get_rank(), []
    for seed in range(count):
        chance = random.Random(seed)
        pair = chance.sample(range(4), 2)  # where spoilt, nothing else is under way that nobody would receive any more
        messages = [(*chance.sample(pair if spoil else range(4), 2), chance.randint(1, 5)) for _ in range(chance.randint(1, 5))]
        wrong, kind = chance.randrange(len(messages)), chance.choice(["send", "receive", "shape"])
        ops: list[Any] = []
        for number, (sender, receiver, size) in enumerate(messages):
            is_wrong = spoil and number == wrong
            if sender == rank and not (is_wrong and kind == "send"):
                ops.append(p2p.send(torch.full((size,), float(number)), to=receiver))
            if receiver == rank and not (is_wrong and kind == "receive"):
                ops.append(p2p.recv((size + (is_wrong and kind == "shape"),), source=sender))
        if not spoil and not ops:
            continue
        try:
            with sw.debug_mode(timeout=20) if spoil else contextlib.nullcontext():
                got = p2p.batch(ops) if ops else ()
                mine = [(number, size) for number, (_, receiver, size) in enumerate(messages) if receiver == rank]
                assert spoil or [x.tolist() for x in got] == [[float(number)] * size for number, size in mine]
        except sw.MismatchError as error:
            errors.append(str(error))
    return errors


def test_random_batches_by_number(pool: Pools) -> None:
    assert pool(4).run(run_alone_at_random, 100, False) == [[]] * 4


def test_what_one_rank_cannot_know_is_found_in_debug_mode(pool: Pools) -> None:
    found = pool(4).run(run_alone_at_random, 60, True)
    assert [len(errors) for errors in found] == [60] * 4
    assert all(errors == found[0] for errors in found) and all("test_p2p.py" in error for error in found[0])


def run_relative_in_debug_mode() -> str:
    """Shards of a size that only their owner knows of: the others would wait."""
    mesh = sw.init_mesh(pp=4)
    size = 3 if dist.get_rank() == 2 else 2
    with pytest.raises(sw.MismatchError) as error, sw.debug_mode(timeout=20):
        for rows in (2, size):
            (got,) = p2p.batch([p2p.send(torch.ones(rows), mesh=mesh, shift=1), p2p.recv((rows,), mesh=mesh, shift=-1)])
            assert got.tolist() == [1, 1]
    return str(error.value)


def test_a_size_that_differs_is_found_in_debug_mode(pool: Pools) -> None:
    texts = pool(4).run(run_relative_in_debug_mode)
    assert len(set(texts)) == 1 and "f32[3]" in texts[0] and "f32[2]" in texts[0] and "test_p2p.py" in texts[0]


def run_halo() -> Tensor:
    mesh = sw.init_mesh(pp=4)
    x = torch.arange(12.0).view(4, 3)[dist.get_rank()].clone().requires_grad_()
    y = p2p.halo_exchange(x, 0, 2, 1, mesh=mesh)
    (y * torch.arange(6.0)).sum().backward()
    return torch.cat([y.detach(), x.grad])


def test_halo(pool: Pools) -> None:
    x = Bundle(row.clone() for row in torch.arange(12.0).view(4, 3)).requires_grad_()
    y = p2p.halo_exchange(x, 0, 2, 1, mesh=sw.init_mesh(pp=4))
    (y * torch.arange(6.0)).sum().backward(Bundle(torch.ones(()) for _ in range(4)))
    want = [torch.cat(pair) for pair in zip(y.shards, x.grad.shards, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(pool(4).run(run_halo), want, strict=True))


def run_rows() -> tuple[Tensor, Tensor]:
    mesh, rank = sw.init_mesh(ep=4), dist.get_rank()
    counts = torch.tensor([(rank * 3 + j) % 4 for j in range(4)])
    x = (torch.arange(float(counts.sum())) + 100 * rank)[:, None].repeat(1, 2).requires_grad_()
    y = p2p.all_to_all_v(x, counts, mesh=mesh)
    y.backward(y.detach() * 2)
    assert torch.equal(x.grad, 2 * x)
    return y.detach()[:, 0], counts


def test_rows(pool: Pools) -> None:
    found = pool(4).run(run_rows)
    for rank, (rows, _) in enumerate(found):
        want = [100 * source + counts[:rank].sum() + i for source, (_, counts) in enumerate(found) for i in range(counts[rank])]
        assert rows.tolist() == want


def run_remat(policy: str) -> tuple[Tensor, dict[str, int]]:
    mesh = sw.init_mesh(pp=2)
    x = torch.linspace(-1, 1, 6) + dist.get_rank()
    x.requires_grad_()
    y = sw.remat(lambda x: p2p.shift(x.sin(), mesh=mesh).cos() * x, x, save=getattr(sw.save, policy))
    with sw.trace_comm() as log:
        y.sum().backward()
    return x.grad, log.counts()


@pytest.mark.parametrize("policy", ["collectives", "nothing"])
def test_in_a_block_that_is_run_twice(pool: Pools, policy: str) -> None:
    again = [torch.linspace(-1, 1, 6) + rank for rank in range(2)]
    xs = [x.requires_grad_() for x in again]
    for rank in range(2):
        (xs[1 - rank].sin().cos() * xs[rank]).sum().backward()
    for (grad, _), x in zip(pool(2).run(run_remat, policy), xs, strict=True):
        torch.testing.assert_close(grad, x.grad)


def run_by_itself() -> tuple[list[float], int]:
    """Along an axis of size one a rank sends to itself; a rank outside a mesh has shapes only."""
    mesh = sw.init_mesh(pp=2, one=1)
    x = torch.tensor([1.0, 2.0]).requires_grad_()
    (p2p.shift(x * 3, mesh=mesh, axis="one") * 2).sum().backward()
    only = sw.init_mesh(pp=1, ranks=[1])
    y = sw.ones(3, mesh=only, placements=[sw.Shard(0)])
    return x.grad.tolist(), p2p.shift(y).shape[0]


def test_a_rank_by_itself(pool: Pools) -> None:
    assert pool(2).run(run_by_itself) == [([6, 6], 3)] * 2
