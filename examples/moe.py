"""A mixture of experts whose experts live on different ranks: exactly the tokens that have to move move, and come back.

    python examples/moe.py                                   # four simulated ranks
    torchrun --nproc-per-node 4 examples/moe.py

The layer is written once. On one device tokens stay where they are; with a mesh they go to the ranks of their experts by an
all-to-all of as many rows as there are, which differ from rank to rank and from step to step.
"""

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard


def choose(x, gate, k):
    """For each token its k experts and their weights, and the order of all choices by expert, with how many each expert has."""
    weights, experts = F.softmax(x @ gate, -1).topk(k)
    experts = experts.flatten()
    order = experts.argsort(stable=True)
    counts = (experts == torch.arange(gate.shape[1], device=x.device)[:, None]).sum(1)
    return x[order // k], weights.flatten()[order], order, counts


def by_expert(tokens, counts):
    """Tokens of every rank, each rank's by expert, put together by expert; and how many each expert has."""
    starts = counts.flatten().cumsum(0) - counts.flatten()
    ends = counts.t().flatten().cumsum(0)
    runs = torch.repeat_interleave(starts.view_as(counts).t().flatten() - (ends - counts.t().flatten()), counts.t().flatten())
    index = runs + torch.arange(len(runs), device=runs.device)
    return tokens[index], index, counts.sum(0)


def feed(tokens, up, down, counts):
    """Each expert's two products on its own tokens; the last ranks may have fewer experts than others."""
    ends = counts[: len(up)].cumsum(0).to(torch.int32)
    return sw.grouped_mm(F.silu(sw.grouped_mm(tokens, up, offs=ends)), down, offs=ends)


def back(tokens, index):
    """Tokens in the order in which they came."""
    return torch.zeros_like(tokens).index_copy(0, index, tokens)


def combine(tokens, weights, order, x, k):
    """The weighted sum of what the experts of each token made of it."""
    return torch.zeros_like(x).index_add(0, order // k, tokens * weights[:, None])


class MoE(nn.Module):
    """A gate and experts; with a mesh, experts are sharded along an axis of it, and so are tokens."""

    def __init__(self, dim, hidden, experts, k=2, mesh=None, axis="ep"):
        super().__init__()
        self.k, self.mesh, self.axis = k, mesh, axis
        self.gate = nn.Parameter(torch.randn(dim, experts) / dim**0.5)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)
        if mesh is not None:
            self.gate = nn.Parameter(sw.distribute_tensor(self.gate.detach(), mesh))
            self.up, self.down = (
                nn.Parameter(sw.distribute_tensor(w.detach(), mesh, {axis: Shard(0)})) for w in (self.up, self.down)
            )

    def forward(self, x):
        if self.mesh is None:
            tokens, weights, order, counts = choose(x, self.gate, self.k)
            return combine(feed(tokens, self.up, self.down, counts), weights, order, x, self.k)
        ranks, here = self.mesh.size_of(self.axis), x.to_local()
        tokens, weights, order, counts = sw.each_rank(choose, here, self._local(self.gate), self.k)
        # for each rank, what its experts get from here
        each = sw.each_rank(lambda counts: F.pad(counts, (0, -len(counts) % ranks)).view(ranks, -1), counts)
        going = sw.each_rank(lambda each: each.sum(1), each)
        told = sw.p2p.all_to_all_v(each, [1] * ranks, mesh=self.mesh, axis=self.axis)
        coming = sw.each_rank(lambda told: told.sum(1), told)
        tokens = sw.p2p.all_to_all_v(tokens, going, coming, mesh=self.mesh, axis=self.axis)
        tokens, index, counts = sw.each_rank(by_expert, tokens, told)
        tokens = sw.each_rank(feed, tokens, self._local(self.up), self._local(self.down), counts)
        tokens = sw.p2p.all_to_all_v(sw.each_rank(back, tokens, index), coming, going, mesh=self.mesh, axis=self.axis)
        out = sw.each_rank(combine, tokens, weights, order, here, self.k)
        return DTensor.from_local(out, self.mesh, x.placements, shape=x.shape, stride=x.stride())

    def _local(self, parameter):
        """A rank's own part; ranks with the same part have other tokens, so its gradient is their sum."""
        partials = [Partial() if placement == Replicate() else placement for placement in parameter.placements]
        return parameter.to_local(grad_placements=partials)


def main():
    mesh = sw.init_mesh(dp=2, ep=2)
    torch.manual_seed(0)
    dense = MoE(32, 64, experts=6)
    torch.manual_seed(0)
    spread = MoE(32, 64, experts=6, mesh=mesh)
    x = torch.randn(64, 32)
    y = spread(sw.distribute_tensor(x, mesh, [Shard(0), Shard(0)]))
    loss, want = y.square().mean(), dense(x).square().mean()
    loss.backward()
    want.backward()
    off = max(
        (one.grad.full_tensor() - other.grad).abs().max().item()
        for one, other in zip(spread.parameters(), dense.parameters(), strict=True)
    )
    print(f"loss {loss.item():.6f}, on one device {want.item():.6f}; gradients differ by at most {off:.1e}")


if __name__ == "__main__":
    main()
