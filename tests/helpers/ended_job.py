"""A program of ranks that end their job: nothing that this library keeps may keep the job's groups, and their threads."""

import sys
import weakref

import torch
import torch.distributed as dist

import shardwise as sw


def main() -> int:
    dist.init_process_group("gloo")
    mesh = sw.init_mesh(tp=2)
    x = sw.ones(8, mesh=mesh, placements=[sw.Shard(0)])
    with sw.debug_mode():
        x.redistribute(placements=[sw.Replicate()])
    torch.compile(lambda x: x.sum(), backend="aot_eager")(x)
    sw.capture(lambda x: x * x.sum())(x)
    sw.p2p.shift(x.to_local(), mesh=mesh, axis="tp")
    sw.p2p.all_to_all_v(x.to_local(), [2, 2], mesh=mesh)
    job = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    return job() is not None


if __name__ == "__main__":
    sys.exit(main())
