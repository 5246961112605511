"""A warm compile cache gives the same answers, and nothing is compiled a second time. Run it twice on one cache directory:

    export TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
    torchrun --nproc-per-node 4 examples/warm_cache.py
    torchrun --nproc-per-node 4 examples/warm_cache.py

Every rank prints what it computed, forward and backward, what one device computes, and what torch's cache did. Each program is
compiled on every rank by `torch.compile`; since the graphs are the same on every rank, so are their keys.
"""

import json
import sys

import torch
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise import DTensor, Replicate, Shard


def programs(mesh, rows):
    """Functions of a DTensor, sharded along dim 0, and a replicated weight, by name."""
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]

    def simple(x, w):
        y = torch.relu(x)
        return ((y * y + x) * w).sum()

    def in_and_out(x, w):
        y = DTensor.from_local(torch.sin(x.to_local()), mesh, placements, shape=(rows, 4), run_check=False)
        return (y * w).redistribute(placements=[Shard(1), *placements[1:]]).square().sum()

    def moving(x, w):
        y = (x * w).redistribute(placements=[Replicate()] * mesh.ndim)
        return (y.t() @ x).sum() + sw.ones(rows, 4, mesh=mesh, placements=placements).sum()

    def taking(x, w):
        whole = torch.tanh(w)
        return (whole.redistribute(placements=placements) * x).full_tensor().sum()

    def slicing(x, w):
        return (x[1:-1] * w[1:-1]).exp().sum()  # shards of another size on the first and the last rank

    def plain(x, w):
        y = DTensor.from_local(x.to_local() * 2, mesh, placements, shape=(rows, 4), run_check=False)
        return (y * w)[:3].full_tensor().sum()

    return {f.__name__: f for f in (simple, in_and_out, moving, taking, slicing, plain)}


def main(rows):
    size = torch.distributed.get_world_size()
    meshes = [sw.init_mesh(dp=size), *([sw.init_mesh(dp=2, tp=size // 2)] if size > 2 else [])]
    torch.manual_seed(0)
    full, weight = torch.randn(rows, 4), torch.randn(rows, 4)
    right = True
    for mesh in meshes:
        for name, function in programs(mesh, rows).items():
            x = sw.distribute_tensor(full, mesh, {"dp": Shard(0)}).requires_grad_()
            w = sw.distribute_tensor(weight, mesh).requires_grad_()
            got = torch.compile(function, fullgraph=True)(x, w)
            got.backward()
            a, b = full.clone().requires_grad_(), weight.clone().requires_grad_()
            want = on_one_device(name, a, b)
            want.backward()
            got = got.full_tensor() if isinstance(got, DTensor) else got
            pairs = [(got, want), (x.grad.full_tensor(), a.grad), (w.grad.full_tensor(), b.grad)]
            right = right and all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
            say(f"{mesh} {name}: {got.item():.6f}, one device {want.item():.6f}")
    cache = {key: value for key, value in counters["aot_autograd"].items() if "cache" in key}
    say(json.dumps({"rank": torch.distributed.get_rank(), "right": right, **cache}))
    return right


def on_one_device(name, x, w):
    if name == "simple":
        return ((torch.relu(x) ** 2 + x) * w).sum()
    if name == "in_and_out":
        return (torch.sin(x) * w).square().sum()
    if name == "moving":
        return ((x * w).t() @ x).sum() + x.numel()
    if name == "slicing":
        return (x[1:-1] * w[1:-1]).exp().sum()
    return (torch.tanh(w) * x).sum() if name == "taking" else (x * 2 * w)[:3].sum()


def say(line):
    """Print a line in one shard, though other ranks print too."""
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    sys.exit(not main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
