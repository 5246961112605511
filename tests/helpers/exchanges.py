"""Functions that send and receive, to be compiled: a ring, a halo, a mixed batch, rows by a table and by data.

As a program, under torchrun: compiles the first three by Inductor on every rank, compares with what they are in eager mode,
forward and backward, and prints what torch's cache did.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise import Mesh, p2p


def functions(mesh: Mesh) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name, functions of a [4, 8] tensor of a rank; peers are relative, so they are one program."""
    size = mesh.size()

    def ring(x: Tensor) -> Tensor:
        total = x
        for _ in range(size - 1):
            x = p2p.shift(x.sin(), mesh=mesh, axis="pp")
            total = total * x
        return total

    def halo(x: Tensor) -> Tensor:
        y = p2p.halo_exchange(x, 1, 2, 1, mesh=mesh)
        return y[:, 2:-1] + y[:, :-3] * 2 + y[:, 3:]

    def mixed(x: Tensor) -> Tensor:
        further, counts, last = p2p.batch(
            [
                p2p.send(x * 2, mesh=mesh, shift=1),
                p2p.recv(x.shape, x.dtype, mesh=mesh, shift=-1),
                p2p.send((x[:1] * 100).int(), mesh=mesh, shift=-1, wrap=False),
                p2p.recv((1, x.shape[1]), torch.int32, mesh=mesh, shift=1, wrap=False),
                p2p.send(x.exp(), to={0: size - 1}, mesh=mesh),
                p2p.recv(x.shape, x.dtype, {size - 1: 0}, mesh=mesh),
            ]
        )
        return further + counts * last

    def rows(x: Tensor) -> Tensor:
        return p2p.all_to_all_v(x.cos(), [4 // size] * size, mesh=mesh)

    def turned(x: Tensor) -> Tensor:
        return p2p.permute(x.exp(), [(at + 1) % size for at in range(size)], mesh=mesh) * x

    return {f.__name__: f for f in (ring, halo, mixed, rows, turned)}


def shard() -> Tensor:
    """A rank's own numbers."""
    make = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 8, generator=make).requires_grad_()


def both(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """What a function gives, and the gradient of its argument."""
    y = function(x)
    (grad,) = torch.autograd.grad(y, x, torch.arange(float(y.numel())).view_as(y))
    return y.detach(), grad


def is_right(function: Callable[[Tensor], Tensor], backend: str) -> bool:
    """Whether a function compiled is what it is operator by operator."""
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    pairs = zip(both(compiled, shard()), both(function, shard()), strict=True)
    return all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def main() -> None:
    mesh = sw.init_mesh(pp=int(sys.argv[1]))
    every = functions(mesh)
    right = all([is_right(every[name], "inductor") for name in ("ring", "halo", "mixed")])
    report = json.dumps({"right": right, **counters["aot_autograd"]})
    print(f"{report}\n", end="", flush=True)  # one write: unbuffered, a line and its end are two, and ranks print between them


if __name__ == "__main__":
    main()
