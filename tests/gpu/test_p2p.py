"""On a GPU: a rank that sends to itself by NCCL, and simulated ranks; eager and compiled. Skipped where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise import Bundle, Mesh, p2p

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def local(mesh: Mesh, x: Tensor) -> Any:
    """What every rank sends: the same, and the number of its place more."""
    if mesh.world == "simulated":
        return Bundle(x.detach() + place for place in range(len(mesh.ranks))).requires_grad_()
    return x.detach().clone().requires_grad_()


def first(x: Any) -> Tensor:
    return x.shards[0] if isinstance(x, Bundle) else x


def program(mesh: Mesh) -> Any:
    def function(x: Tensor) -> Tensor:
        y, z = p2p.batch(
            [
                p2p.send(x.sin(), mesh=mesh, axis="tp", shift=1),
                p2p.send(x.cos(), mesh=mesh, axis="tp", shift=1),
                p2p.recv(x.shape, x.dtype, mesh=mesh, axis="tp", shift=-1),
                p2p.recv(x.shape, x.dtype, mesh=mesh, axis="tp", shift=-1),
            ]
        )
        return p2p.halo_exchange(y * z * 3, 0, 1, 2, mesh=mesh, axis="tp", wrap=True)

    return function


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_messages(mesh: Mesh, how: str) -> None:
    torch._dynamo.reset()
    given = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).cuda()
    x = local(mesh, given)
    function = program(mesh)
    y = (torch.compile(function, fullgraph=True) if how == "compiled" else function)(x)
    seed = torch.arange(21.0, device="cuda").view(7, 3)
    grad = first(torch.autograd.grad(y, x, Bundle([seed] * 4) if isinstance(x, Bundle) else seed)[0])

    left = given.detach() + (1 if mesh.world == "simulated" else 0)
    left = left.requires_grad_()  # what the rank beside the first holds; of two it is on both sides
    row = left.sin() * left.cos() * 3
    here = given.detach().requires_grad_()
    own = here.sin() * here.cos() * 3
    middle = (
        row if mesh.world == "simulated" else own
    )  # the first of two receives from the second, whose halos are its own rows
    want = torch.cat([own[-1:], middle, own[:2]])
    torch.testing.assert_close(first(y).detach(), want.detach())
    # Every rank's result has the same gradient: what the first one sent is in the second's middle and in its own ends.
    want.backward(seed) if mesh.world != "simulated" else (own * _gathered(seed)).sum().backward()
    torch.testing.assert_close(grad, here.grad, atol=1e-4, rtol=1e-4)


def _gathered(seed: Tensor) -> Tensor:
    """The gradient of a shard that is the middle of one result, and the ends of another."""
    middle = seed[1:5].clone()
    middle[-1] += seed[0]
    middle[:2] += seed[5:]
    return middle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_dtypes(mesh: Mesh, dtype: torch.dtype) -> None:
    x = torch.arange(6, device="cuda").to(dtype)
    sent = Bundle([x] * 4) if mesh.world == "simulated" else x
    assert torch.equal(first(p2p.wait(p2p.shift(sent, mesh=mesh, axis="tp"))), x)


def test_a_batch_is_waited_for_by_what_uses_it(mesh: Mesh) -> None:
    """Streams: a long product is sent, and its result is used at once."""
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(5):
        product = x @ x
        sent = Bundle([product] * 4) if mesh.world == "simulated" else product
        got = p2p.shift(sent, mesh=mesh, axis="tp")
        if mesh.world != "simulated":
            product.zero_()  # what was sent is sent
        torch.testing.assert_close(first(got + 0), x @ x)


def test_by_number() -> None:
    """Ranks by number on the whole job."""
    if dist.is_initialized():
        pytest.skip("a job is running")
    with sw.simulate(2):
        mesh = sw.init_mesh(tp=2, device="cuda")
        x = Bundle([torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")])
        (y,) = p2p.batch([p2p.send(x, to={0: 1, 1: 0}, mesh=mesh), p2p.recv((2,), torch.float32, {0: 1, 1: 0}, mesh=mesh)])
        assert [shard.tolist() for shard in y.shards] == [[1, 1], [0, 0]]
