"""Ring attention in a simulated world: the values and gradients of dense attention, and as many bytes as stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import OperatorError, Partial, Replicate, Shard, remat, save
from shardwise.kernels import attention as attend
from tests.helpers.ring_attention import dense, ring, same, tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("length", [16, 13, 3, 1])
def test_value_and_gradients(length: int, causal: bool, dtype: torch.dtype) -> None:
    given = tensors(length, dtype=dtype)
    same(ring(given, sw.init_mesh(sp=4), [Shard(2)], is_causal=causal), dense(given, is_causal=causal))


@pytest.mark.parametrize(
    ("axes", "placements"),
    [
        ({"dp": 2, "sp": 2}, [Shard(0), Shard(2)]),
        ({"tp": 2, "sp": 2}, [Shard(1), Shard(2)]),
        ({"sp": 2, "cp": 3}, [Shard(2), Shard(2)]),
        ({"tp": 2, "sp": 3}, [[Shard(1), Shard(2)], [Replicate(), Shard(2)], [Replicate(), Replicate()]]),
    ],
    ids=["dp", "tp", "two axes", "others move"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_other_axes(axes: dict[str, int], placements: Any, causal: bool) -> None:
    given = tensors(13)
    same(ring(given, sw.init_mesh(**axes), placements, is_causal=causal), dense(given, is_causal=causal))


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)], ids=str)
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    given = tensors(5, heads=heads)
    words = {"is_causal": True, "enable_gqa": True, "scale": 0.3}
    same(ring(given, sw.init_mesh(tp=2, sp=2), [Shard(1), Shard(2)], **words), dense(given, **words))


@pytest.mark.parametrize("keys", [3, 7])
def test_keys_of_another_length(keys: int) -> None:
    given = tensors(6, keys)
    same(ring(given, sw.init_mesh(sp=4), [Shard(2)]), dense(given))
    uneven = [[Shard(2, (0, 1, 5))], *[[Shard(2, (keys - 1, 0, 1))]] * 2]
    same(ring(given, sw.init_mesh(sp=3), uneven), dense(given))


def test_values_of_another_width_and_other_numbers_of_dims() -> None:
    given = tensors(6)
    given[2] = given[2][..., :5]
    same(ring(given, sw.init_mesh(sp=4), [Shard(2)]), dense(given))
    for index, placement in ((0, [Shard(1)]), ((0, 0), [Shard(0)])):
        few = [x[index] for x in given]
        same(ring(few, sw.init_mesh(sp=4), placement), dense(few))


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("axes", "placements"), [({"sp": 4}, [Shard(2)]), ({"tp": 2, "sp": 4}, [Shard(1), Shard(2)])])
def test_bytes_are_as_stated(axes: dict[str, int], placements: Any, dtype: torch.dtype) -> None:
    mesh, n = sw.init_mesh(**axes), 4
    x = sw.distribute_tensor(torch.randn(2, 4, 16, 8).to(dtype), mesh, placements).requires_grad_()
    with sw.trace_comm() as forward:
        out = sw.ring_attention(x, x, x, is_causal=True)
    with sw.trace_comm() as backward:
        out.sum().backward()
    elements = 2 * x.numel() // axes.get("tp", 1)  # keys and values of the heads of this rank
    assert forward.counts() == {"p2p": n - 1} and forward.bytes == elements * dtype.itemsize * (n - 1) // n
    assert backward.counts() == {"p2p": 2 * (n - 1)}
    assert backward.bytes == elements * (dtype.itemsize + 4) * (n - 1) // n


def test_only_moves_that_nobody_asked_for_are_refused() -> None:
    mesh = sw.init_mesh(sp=2)
    x = sw.distribute_tensor(torch.randn(1, 1, 4, 2), mesh, [Shard(2)])
    with sw.communication("forbid"):
        sw.ring_attention(x, x, x)
    with sw.communication("forbid"), pytest.raises(sw.CommunicationError, match=r"ring_attention at .* communicates"):
        sw.ring_attention(x, x.redistribute(placements=[Shard(3)]), x)


# ── computed again ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["nothing", "attention", "collectives", "default"])
def test_remat_runs_the_ring_again_only_if_told(name: str) -> None:
    given = [x.to(torch.float32) for x in tensors(13)]
    mesh = sw.init_mesh(sp=4)
    spread = [sw.distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in given]

    def block(*given: Any) -> Any:
        return sw.ring_attention(*(x * 2 for x in given), is_causal=True).sin()

    def run(*how: Any) -> tuple[list[int], list[Tensor]]:
        with sw.trace_comm() as forward:
            out = remat(block, *spread, save=how[0]) if how else block(*spread)
        with sw.trace_comm() as backward:
            grads = torch.autograd.grad(out.sum(), spread)
        return [len(forward.records), len(backward.records)], [x.full_tensor() for x in grads]

    (counts, got), (usual, want) = run(getattr(save, name)), run()
    same(got, want)
    assert usual == [3, 6] and counts == [3, 9 if name == "nothing" else 6]


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shapes", "words", "text"),
    [
        ([(2, 4, 8), (2, 6, 8), (2, 6, 8)], {"is_causal": True}, r"4 queries and 6 keys"),
        ([(4, 6, 8), (2, 6, 8), (2, 6, 8)], {}, r"4 heads of queries and 2 of keys; with enable_gqa=True"),
        ([(4, 6, 8), (3, 6, 8), (3, 6, 8)], {"enable_gqa": True}, r"4 heads of queries and 3 of keys"),
        ([(2, 6, 8), (2, 6, 8), (2, 5, 8)], {}, r"each key has a value.*\[2, 6, 8\], value \[2, 5, 8\]"),
        ([(6, 8), (2, 6, 8), (2, 6, 8)], {}, r"one dtype and of one number of dims"),
    ],
)
def test_refusals(shapes: Any, words: Any, text: str) -> None:
    mesh = sw.init_mesh(sp=2)
    given = [sw.zeros(*shape, mesh=mesh) for shape in shapes]
    with pytest.raises(OperatorError, match=text):
        sw.ring_attention(*given, **words)


def test_second_derivatives_are_refused() -> None:
    x = sw.randn(1, 1, 4, 2, mesh=sw.init_mesh(sp=2), placements=[Shard(2)]).requires_grad_()
    (grad,) = torch.autograd.grad(sw.ring_attention(x, x, x).square().sum(), x, create_graph=True)
    with pytest.raises(OperatorError, match=r"no second derivatives"):
        grad.sum().backward()


def test_plain_tensors_attend_where_they_are() -> None:
    given = tensors(5)
    same([sw.ring_attention(*given, is_causal=True)], dense(given, is_causal=True)[:1])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_devices_without_a_kernel_compute_the_same(causal: bool) -> None:
    query, key, value = tensors(7)
    way = {"is_causal": causal, "scale": 0.3}
    out, lse = attend._cpu(query, key, value, **way)
    same([*attend._plain(query, key, value, **way)], [out, lse])
    given = (query.sin(), query, key, value, out, lse)
    same([*attend._plain_backward(*given, **way)], [*attend._cpu_backward(*given, **way)])


def test_autocast() -> None:
    given = [sw.distribute_tensor(x.float(), sw.init_mesh(sp=2), [Shard(2)]) for x in tensors(4)]
    with torch.autocast("cpu", torch.bfloat16):
        assert sw.ring_attention(given[0].bfloat16(), *given[1:]).dtype is torch.bfloat16


def test_partial_values_are_reduced_first() -> None:
    given, mesh = tensors(4), sw.init_mesh(dp=2, sp=2)
    spread = [sw.distribute_tensor(x, mesh, {"sp": Shard(2)}).redistribute(placements=[Partial(), Shard(2)]) for x in given]
    same([sw.ring_attention(*spread).full_tensor()], dense(given)[:1])
