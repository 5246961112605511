"""Point-to-point communication in a simulated world: batches, what is made of them, and what does not match."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Bundle, MeshError, OperatorError, Replicate, Shard, WorldError, p2p
from tests.helpers import message_batches as letters
from tests.helpers.one_device import MESHES

RING = sw.init_mesh(pp=3)
GRID = sw.init_mesh(dp=2, pp=2)
ODD = sw.init_mesh(dp=2, pp=3, ranks=[5, 3, 1, 0, 2, 4])


def numbered(count: int, *shape: int) -> Bundle:
    return Bundle(torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * place for place in range(count))


@pytest.mark.parametrize("part", range(4))
def test_random_batches(part: int) -> None:
    for seed in range(250 * part, 250 * (part + 1)):
        mesh = (RING, GRID, ODD)[seed % 3]
        drawn = letters.draw(seed, mesh)
        out, grads = letters.run(drawn, mesh, lambda shards: Bundle(x.clone() for x in shards))
        flows = [letter for letter in drawn if letter.dtype.is_floating_point]
        for place in range(len(mesh.ranks)):
            for letter, x in zip(drawn, out, strict=True):
                assert torch.equal(x.shards[place], letter.arrives(place)), (seed, letter)
            for letter, x in zip(flows, grads, strict=True):
                assert torch.equal(x.shards[place], letters.gradient(letter, place)), (seed, letter)


def test_random_batches_that_do_not_match() -> None:
    refused = 0
    for seed in range(400):
        mesh = (RING, GRID, ODD)[seed % 3]
        drawn = letters.draw(seed, mesh)
        if any(goal >= 0 for letter in drawn for goal in letter.goals):
            with pytest.raises(WorldError, match=r"rank \d.*rank \d"):
                p2p.batch(letters.spoil(seed, drawn, mesh))
            refused += 1
    assert refused >= 200


def test_shift_and_permute() -> None:
    x = numbered(4, 2)
    assert [shard[0].item() for shard in p2p.shift(x, 1, mesh=GRID, axis="pp").shards] == [100, 0, 300, 200]
    assert [shard[0].item() for shard in p2p.shift(x, 1, mesh=GRID, axis="dp", wrap=False).shards] == [0, 0, 0, 100]
    assert [shard[0].item() for shard in p2p.permute(x, [-1, 0], mesh=GRID["pp"]).shards] == [100, 0, 300, 0]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 0), (0, 2), (0, 0)])
def test_halo(before: int, after: int, wrap: bool) -> None:
    whole = torch.randn(2, 11)
    sizes = [4, 2, 5]
    x = Bundle(shard.clone() for shard in whole.split(sizes, 1)).requires_grad_()
    y = p2p.halo_exchange(x, 1, before, after, mesh=RING, wrap=wrap)
    first, last = (whole[:, -before:] if before else whole[:, :0]), whole[:, :after]
    padded = torch.cat([first if wrap else torch.zeros_like(first), whole, last if wrap else torch.zeros_like(last)], 1)
    start = 0
    for shard, size in zip(y.shards, sizes, strict=True):
        assert torch.equal(shard, padded[:, start : start + before + size + after])
        start += size
    y.backward(Bundle(torch.ones_like(shard) for shard in y.shards))
    uses = sum(shard.sum() for shard in x.grad.shards)  # every element is used once, and once more in each halo
    assert uses == 22 + 2 * (before + after) * (3 if wrap else 2)


def test_a_halo_longer_than_a_shard_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"3 rows before and 1 after, of a shard with 2 rows in dim 0.*larger shards"):
        p2p.halo_exchange(numbered(3, 2), 0, 3, 1, mesh=RING)


def test_rows_by_data_and_by_a_table() -> None:
    table = [[1, 0, 2], [0, 0, 1], [3, 1, 0]]
    x = Bundle(torch.randn(sum(row), 2) for row in table).requires_grad_()
    parts = [shard.split(row) for shard, row in zip(x.shards, table, strict=True)]
    want = [torch.cat([parts[i][j] for i in range(3)]) for j in range(3)]
    counts = Bundle(torch.tensor(row) for row in table)
    coming = p2p.all_to_all_v(counts, [1, 1, 1], mesh=RING)
    for y in (
        p2p.all_to_all_v(x, table, mesh=RING),
        p2p.all_to_all_v(x, counts, mesh=RING),
        p2p.all_to_all_v(x, counts, coming, mesh=RING),
    ):
        for shard, other in zip(y.shards, want, strict=True):
            assert torch.equal(shard, other)
        (grad,) = torch.autograd.grad(y, x, Bundle(2 * shard for shard in y.shards))
        for shard, given in zip(x.shards, grad.shards, strict=True):
            torch.testing.assert_close(given, 2 * shard)


def test_rows_that_do_not_add_up() -> None:
    with pytest.raises(OperatorError, match=r"counts \[1, 1, 2\] are 4 rows, the tensor has shape \[2\]"):
        p2p.all_to_all_v(numbered(3, 2), [1, 1, 2], mesh=RING)
    with pytest.raises(OperatorError, match=r"takes as going 3 counts.*got 3 rows of"):
        p2p.all_to_all_v(numbered(3, 2), [1, 1], mesh=RING)


def test_a_dtensor_stands_for_its_shards() -> None:
    x = sw.distribute_tensor(torch.arange(6.0), RING, [Shard(0)]).requires_grad_()
    assert [shard.tolist() for shard in p2p.shift(x).shards] == [[4, 5], [0, 1], [2, 3]]
    (p2p.shift(x, 1, wrap=False) * Bundle(torch.full((2,), i + 1.0) for i in range(3))).sum().backward(
        Bundle(torch.ones(()) for _ in range(3))
    )
    assert x.grad.full_tensor().tolist() == [2, 2, 3, 3, 0, 0]


def test_what_is_communicated_is_recorded() -> None:
    with sw.trace_comm() as log:
        p2p.halo_exchange(numbered(3, 4, 2), 0, 2, 1, mesh=RING)
        p2p.all_to_all_v(numbered(3, 3), [1, 1, 1], mesh=RING)
    assert [(record.kind, record.axes, record.bytes) for record in log.records] == [
        ("p2p", ("pp",), 24),
        ("all_to_all", ("pp",), 8),
    ]
    assert {record.operator for record in log.records} == {"p2p"}


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda x: p2p.batch([]), OperatorError, "at least one send or receive"),
    (lambda x: p2p.send(x, mesh=RING), MeshError, "by shift= or by permutation="),
    (lambda x: p2p.send(x, mesh=RING, axis="tp", shift=1), MeshError, "no axis 'tp'; its axes are pp"),
    (lambda x: p2p.send(x, mesh=GRID, shift=1), MeshError, "several axes; name one of them: axis='dp'"),
    (lambda x: p2p.shift(x), MeshError, "needs mesh="),
    (lambda x: p2p.permute(x, [0, 0, 1], mesh=RING), MeshError, r"names another coordinate once.*got \[0, 0, 1\]"),
    (lambda x: p2p.permute(x, [0, 1], mesh=RING), MeshError, "for each of its 3"),
    (lambda x: p2p.permute(x, [0, 1, 3], mesh=RING), MeshError, "names coordinate 3"),
    (lambda x: p2p.batch([p2p.send(x, to={0: 7}, mesh=RING)]), MeshError, "rank 7, which mesh .* does not have"),
    (
        lambda x: p2p.batch([p2p.send(x, mesh=RING, shift=1), p2p.recv((2,), mesh=sw.init_mesh(tp=3), shift=-1)]),
        MeshError,
        "are on one mesh",
    ),
    (
        lambda x: p2p.batch([p2p.send(x, mesh=RING, shift=1), p2p.recv((3,), mesh=RING, shift=-1)]),
        WorldError,
        r"sends a float32\[2\] tensor \(send 0\) to rank \d, which expects a float32\[3\] tensor",
    ),
    (lambda x: p2p.shift(torch.ones(2, requires_grad=True), mesh=RING), OperatorError, "plain tensor that requires grad"),
    (lambda x: p2p.batch([p2p.recv((2,), source=0)]), MeshError, "need a mesh= in a simulated world"),
    (lambda x: p2p.P2POp(torch.distributed.isend, x), OperatorError, "peer=None, group_peer=None"),
]


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_mistakes_teach(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(numbered(3, 2))


def test_sent_and_changed() -> None:
    x = numbered(3, 2)
    y = p2p.shift(x, mesh=RING)
    x.add_(1)
    assert [shard[0].item() for shard in y.shards] == [200, 0, 100]


def test_in_a_block_that_is_run_twice() -> None:
    x = numbered(3, 2).requires_grad_()
    with sw.trace_comm() as log:
        sw.remat(lambda x: p2p.shift(x.sin(), mesh=RING).cos(), x, save=sw.save.collectives).backward(numbered(3, 2))
    assert log.counts() == {"p2p": 2}  # forward, and the gradient's way back
    again = x.detach().clone().requires_grad_()
    p2p.shift(again.sin(), mesh=RING).cos().backward(numbered(3, 2))
    assert all(torch.equal(*pair) for pair in zip(x.grad.shards, again.grad.shards, strict=True))


@pytest.mark.parametrize("is_even", [True, False])
def test_compiled(is_even: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        moved = p2p.shift(x.sin(), mesh=RING) if is_even else x.sin()
        return p2p.halo_exchange(moved, 0, 2, 1, mesh=RING).cos()

    x = Bundle(torch.randn(rows) for rows in ((4, 4, 4) if is_even else (2, 4, 5))).requires_grad_()
    want, got = program(x), torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    for one, other in zip(got.shards, want.shards, strict=True):
        torch.testing.assert_close(one, other)
    seed = Bundle(torch.ones_like(shard) for shard in want.shards)
    (one,), (other,) = torch.autograd.grad(got, x, seed), torch.autograd.grad(want, x, seed)
    for shard, same in zip(one.shards, other.shards, strict=True):
        torch.testing.assert_close(shard, same)


def test_shards_and_replicas() -> None:
    """A shift of what every rank has alike changes nothing."""
    x = sw.distribute_tensor(torch.arange(4.0), MESHES["2"], [Replicate()])
    assert all(shard.tolist() == [0, 1, 2, 3] for shard in p2p.shift(x).shards)
