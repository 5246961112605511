"""Programs with known answers that run unchanged on simulated ranks and on processes. Each asserts on every rank.

A case is a function without arguments; `RANKS` says on how many ranks it runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Mesh, Replicate, Shard

RANKS: dict[Callable[[], None], int] = {}


def case(ranks: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        RANKS[function] = ranks
        return function

    return add


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def same(got: Tensor, want: Tensor) -> None:
    """The global value, on every rank."""
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(whole, want, atol=1e-5, rtol=1e-5)


def local_of(mesh: Mesh, shards: list[Tensor]) -> Tensor:
    """This rank's shard; in a simulated world the bundle of all."""
    if mesh.world == "simulated":
        return sw.Bundle(shards)
    return shards[mesh.place(torch.distributed.get_rank())]


@case(2)
def mse_of_an_uneven_shard() -> None:
    mesh = sw.init_mesh(dp=2)
    x = sw.distribute_tensor(torch.tensor([[0.0], [0.0], [9.0]]), mesh, [Shard(0)]).requires_grad_()
    loss = F.mse_loss(x, torch.zeros(3, 1))
    loss.backward()
    assert loss.item() == 27.0
    same(x.grad, torch.tensor([[0.0], [0.0], [6.0]]))


@case(2)
def cumsum_over_a_cut_dim() -> None:
    x = sw.ones(6, mesh=sw.init_mesh(dp=2), placements=[Shard(0)])
    same(x.cumsum(-1), torch.arange(1.0, 7.0))


@case(2)
def item_of_a_sum() -> None:
    x = sw.distribute_tensor(torch.arange(12.0), sw.init_mesh(dp=2), [Shard(0)])
    assert x.sum().item() == 66.0 and float(x.mean()) == 5.5 and bool(x.sum() > 65) and x.numpy()[11] == 11.0
    assert "66." in str(x.sum().redistribute())  # of a partial sum each rank prints what it holds


@case(2)
def linear_of_three_rows_on_two_ranks() -> None:
    x, w = values(3, 4, 8), values(5, 8)
    mesh = sw.init_mesh(dp=2)
    got = F.linear(sw.distribute_tensor(x, mesh, [Shard(0)]), sw.distribute_tensor(w, mesh))
    same(got, F.linear(x, w))
    assert got.placements == (Shard(0),)


@case(4)
def view_of_an_uneven_dim() -> None:
    x = values(6, 256)
    with sw.communication("forbid"):
        got = sw.distribute_tensor(x, sw.init_mesh(dp=4), [Shard(0)]).view(-1)
    same(got, x.view(-1))


@case(4)
def flatten_and_back_of_a_dim_cut_twice() -> None:
    x = values(2, 8, 4)
    d = sw.distribute_tensor(x, sw.init_mesh(a=2, b=2), [Shard(1), Shard(1)])
    with sw.communication("forbid"):
        flat = d.view(16, 4)
        back = flat.view(2, 8, 4)
    same(flat, x.view(16, 4))
    same(back, x)
    assert back.layout is d.layout


@case(8)
def linear_on_three_axes() -> None:
    x, w = values(4, 6, 8), values(10, 8)
    mesh = sw.init_mesh(dp=2, cp=2, tp=2)
    d = sw.distribute_tensor(x, mesh, {"dp": Shard(0), "cp": Shard(1)})
    e = sw.distribute_tensor(w, mesh, {"tp": Shard(0)})
    with sw.communication("forbid"):
        got = F.linear(d, e)
    same(got, F.linear(x, w))
    assert got.placements == (Shard(0), Shard(1), Shard(2)), got


@case(2)
def a_plain_tensor_is_replicated() -> None:
    x = values(8)
    d = sw.distribute_tensor(x, sw.init_mesh(dp=2), [Shard(0)])
    same(d * torch.arange(8.0), x * torch.arange(8.0))
    same(torch.arange(8.0) * d, x * torch.arange(8.0))


@case(4)
def clip_grad_norm_over_sub_meshes() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    dense = [nn.Parameter(values(4, 6) * (i + 1)) for i in range(4)]
    homes = [(mesh["tp"], [Shard(0)]), (mesh["dp"], [Shard(1)]), (mesh, [Shard(0), Shard(1)])]
    spread = [nn.Parameter(sw.distribute_tensor(p.data, on, how)) for p, (on, how) in zip(dense, homes, strict=False)]
    spread.append(nn.Parameter(dense[3].data.clone()))
    for p, q in zip(dense, spread, strict=True):
        (p**3).sum().backward()
        (q**3).sum().backward()
    for foreach in (None, True):
        want = nn.utils.clip_grad_norm_(dense, 1.0, foreach=foreach)
        same(nn.utils.clip_grad_norm_(spread, 1.0, foreach=foreach), want)
        for p, q in zip(dense, spread, strict=True):
            same(q.grad, p.grad)
    for parameters in (dense, spread):
        torch.optim.AdamW(parameters, lr=0.1, foreach=True).step()
    for p, q in zip(dense, spread, strict=True):
        same(q.detach(), p.detach())


@case(4)
def from_local_of_four_widths() -> None:
    x = values(3, 14)
    mesh = sw.init_mesh(tp=4)
    d = DTensor.from_local(local_of(mesh, list(x.split([2, 3, 4, 5], 1))), mesh, [Shard(1)], run_check=True)
    assert d.shape == (3, 14)
    same(d, x)
    same(d @ values(14, 2), x @ values(14, 2))


@case(4)
def swap_of_two_axes() -> None:
    x = values(4, 6)
    d = sw.distribute_tensor(x, sw.init_mesh(a=2, b=2), [Shard(0), Shard(1)])
    with sw.trace_comm() as log:
        e = d.redistribute(placements=[Shard(1), Shard(0)])
    same(e, x)
    assert "all_gather" not in log.counts()


@case(4)
def a_small_gpt_trains_as_on_one_device() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
    spread = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
    spread.load_state_dict(dense.state_dict())
    cuts = {"2.weight": 0, "2.bias": 0, "4.weight": 1, "0.weight": 0}
    for name, p in list(spread.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        how = {"tp": Shard(cuts[name])} if name in cuts else {}
        setattr(spread.get_submodule(owner), leaf, nn.Parameter(sw.distribute_tensor(p.data, mesh, how)))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in (dense, spread)]
    tokens = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        losses = []
        for model, optimizer in zip((dense, spread), optimizers, strict=True):
            given = tokens if model is dense else sw.distribute_tensor(tokens, mesh, {"dp": Shard(0)})
            optimizer.zero_grad()
            loss = F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0]), losses
    for p, q in zip(dense.parameters(), spread.parameters(), strict=True):
        same(q.detach(), p.detach())
    assert all(p.grad.layout is p.layout for p in spread.parameters())


@case(2)
def replicated_is_replicated() -> None:
    assert sw.zeros(4, mesh=sw.init_mesh(dp=2)).placements == (Replicate(),)


# ── operators whose kernels must know where a rank's shard lies ──


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], mesh: Mesh, placements: list[object]) -> None:
    """The value and the gradients of the floating tensors are those of one device."""
    dense = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    spread = [
        sw.distribute_tensor(t, mesh, p).requires_grad_(t.is_floating_point()) for t, p in zip(tensors, placements, strict=True)
    ]
    want, got = function(*dense), function(*spread)
    same(got.detach(), want.detach())
    want.sum().backward()
    got.sum().backward()
    for x, d in zip(spread, dense, strict=True):
        if d.grad is not None:
            same(x.grad, d.grad)


@case(4)
def rows_of_a_cut_table() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    words = torch.tensor([[6, 0, 3], [3, 5, 1], [1, 1, 4]])
    placements = [{"dp": Shard(0)}, {"tp": Shard(0)}]
    gradients(lambda i, w: F.embedding(i, w, padding_idx=1) * 2, [words, values(7, 3)], mesh, placements)
    gradients(lambda i, w: w[i, i % 2], [words, values(7, 3)], mesh, placements)
    gradients(lambda i, w: w.gather(0, i), [words, values(7, 3)], mesh, placements)
    gradients(lambda i, w: torch.ones_like(w).index_add(0, i[:, 0], w[2:5]), [words, values(7, 3)], mesh, placements)


@case(4)
def cross_entropy_of_cut_classes() -> None:
    mesh = sw.init_mesh(dp=2, tp=2)
    target = torch.tensor([4, 0, -100, 2, 4])
    for reduction in ("mean", "sum", "none"):
        gradients(
            lambda x, t, how=reduction: F.cross_entropy(x, t, reduction=how, label_smoothing=0.1),
            [values(5, 5), target],
            mesh,
            [{"dp": Shard(0), "tp": Shard(1)}, {"dp": Shard(0)}],
        )


@case(2)
def causal_attention_of_cut_heads() -> None:
    placements = [{"tp": Shard(1)}] * 3
    tensors = [values(2, 6, 5, 4), values(2, 3, 5, 4), values(2, 3, 5, 4) + 1]
    attend = F.scaled_dot_product_attention
    gradients(lambda *t: attend(*t, is_causal=True, enable_gqa=True), tensors, sw.init_mesh(tp=2), placements)


@case(2)
def random_numbers_are_those_of_the_whole_tensor() -> None:
    drawn = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        torch.manual_seed(0)
        x = sw.ones(5, 7, mesh=sw.init_mesh(tp=2), placements=[placement])
        drawn.append([F.dropout(x, 0.5), torch.rand_like(x), x.normal_(), torch.multinomial(x.abs(), 2)])
    for one in drawn[1:]:
        for x, first in zip(one, drawn[0], strict=True):
            assert torch.equal(x.full_tensor(), first.full_tensor())


@case(2)
def windows_dealt_out_along_a_cut_plane() -> None:
    x = values(1, 2, 5, 7)
    mesh = sw.init_mesh(dp=2)
    for dim in (0, 1, 2, 3):
        gradients(lambda t: F.max_pool2d(F.pad(t, (1, -2, 2, 1)), 2), [x], mesh, [[Shard(dim)]])
        got = F.max_pool2d(sw.distribute_tensor(x, mesh, [Shard(dim)]), 3, 3, return_indices=True)
        for one, other in zip(got, F.max_pool2d(x, 3, 3, return_indices=True), strict=True):
            same(one, other)


@case(4)
def a_small_network_on_images() -> None:
    """Uneven batches and channels; statistics are those of the whole batch."""
    mesh = sw.init_mesh(dp=2, tp=2)

    def network(x: Tensor, weight: Tensor, bias: Tensor, each: Tensor) -> Tensor:
        hidden = F.batch_norm(F.conv2d(x, weight, bias, padding=1), None, None, training=True)
        return F.conv2d(F.max_pool2d(hidden, 2), each, groups=3).mean((2, 3))

    tensors = [values(3, 2, 6, 6), values(3, 2, 3, 3), values(3), values(3, 1, 2, 2)]
    placements = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    gradients(network, tensors, mesh, placements)


@case(2)
def lstm_of_a_cut_batch() -> None:
    torch.manual_seed(0)
    module, x = nn.LSTM(3, 2, num_layers=2), values(4, 3, 3)
    want, _ = module(x)
    got, (state, _) = module(sw.distribute_tensor(x, sw.init_mesh(dp=2), [Shard(1)]))
    same(got.detach(), want.detach())
    assert got.placements == state.placements == (Shard(1),)


@case(3)
def orders_counts_and_masks_of_a_cut_dim() -> None:
    mesh, numbers = sw.init_mesh(tp=3), torch.tensor([3, 0, 5, 5, 1, 0, 3])
    floats = torch.tensor([0.5, 2.0, 2.0, -1.0, float("nan"), 7.0, 2.0])
    n, x = (sw.distribute_tensor(t, mesh, [Shard(0)]) for t in (numbers, floats))
    orders = [(x.cummax(0), floats.cummax(0)), (n.cummin(0), numbers.cummin(0)), (n.median(0), numbers.median(0))]
    for got, want in ((g, w) for pair in orders for g, w in zip(*pair, strict=True)):
        torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)
    same(torch.bincount(n, minlength=4), torch.bincount(numbers, minlength=4))
    same(n.float().histc(4), numbers.float().histc(4))
    same(n.nonzero(), numbers.nonzero())
    assert n[n > 1].placements == (Shard(0, (2, 1, 1)),)
    same(n[n > 1], numbers[numbers > 1])
    n[n > 1] = torch.arange(4)
    numbers[numbers > 1] = torch.arange(4)
    same(n, numbers)
    same(n.masked_scatter(n > 0, n), numbers.masked_scatter(numbers > 0, numbers))
    long = torch.arange(40).roll(7)
    same(sw.distribute_tensor(long, mesh, [Shard(0)]).topk(3)[1], long.topk(3)[1])


def experts_and_rows_of_bags_that_are_cut() -> None:
    mesh, ends = sw.init_mesh(tp=2), torch.tensor([3, 3, 5], dtype=torch.int32)
    tokens, experts = values(5, 8), values(3, 8, 8)
    out = torch.ops.aten._grouped_mm(tokens, sw.distribute_tensor(experts, mesh, [Shard(0)]), ends)
    same(out, torch.cat([tokens[:3] @ experts[0], tokens[3:] @ experts[2]]))
    table, words = values(7, 4), torch.tensor([[0, 6], [5, 5]])
    same(F.embedding_bag(words, sw.distribute_tensor(table, mesh, [Shard(0)])), table[words].mean(1))


@case(2)
def tangents_and_gradients_of_each_sample() -> None:
    x, w = values(3, 4), values(4, 2)
    spread = sw.distribute_tensor(x, sw.init_mesh(dp=2), [Shard(0)])
    same(torch.func.jvp(torch.sin, (spread,), (torch.ones(3, 4),))[1], x.cos())
    of_each = torch.func.vmap(torch.func.grad(lambda w, y: (y @ w).sum()), in_dims=(None, 0))
    same(of_each(w, spread), x[:, :, None].expand(3, 4, 2))


@case(4)
def a_local_tensor_is_written_through_its_dtensor() -> None:
    mesh, local = sw.init_mesh(tp=4), torch.zeros(2)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    x[0] = 5.0
    same(x, torch.tensor([5.0, 0, 0, 0, 0, 0, 0, 0]))
    x.fill_(3.0)
    assert local.tolist() == [3.0, 3.0], "the tensor that was given is the shard of its rank (simulated: of the first)"


@case(4)
def an_optimizer_step_of_a_parameter_made_from_local_tensors() -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), sw.init_mesh(tp=4), [Shard(0)]))
    (parameter * torch.arange(8.0)).sum().backward()
    torch.optim.SGD([parameter], lr=1.0).step()
    same(parameter, -torch.arange(8.0))


@case(2)
def what_is_written_to_a_full_tensor_stays_there() -> None:
    mesh = sw.init_mesh(tp=2)
    for placements in ([Replicate()], [Shard(0)]):
        x = sw.zeros(4, mesh=mesh, placements=placements)
        x.full_tensor().fill_(1.0)
        x.requires_grad_().full_tensor().mul_(2.0).sum().backward()
        same(x, torch.zeros(4))
        same(x.grad, torch.full((4,), 2.0))


@case(2)
def gradients_by_way_of_plain_and_local_tensors_add_up() -> None:
    x = sw.ones(4, mesh=sw.init_mesh(tp=2)).requires_grad_()
    for _ in range(2):
        x.full_tensor().sum().backward()
    same(x.grad, torch.full((4,), 2.0))
    for _ in range(2):
        x.to_local().sum().backward(torch.ones(()) if x.mesh.world == "processes" else sw.Bundle([torch.ones(())] * 2))
    same(x.grad, torch.full((4,), 4.0))


@case(2)
def gradients_are_unscaled_and_what_is_not_finite_in_one_shard_is_found_everywhere() -> None:
    """`GradScaler` on a module with DTensors and plain tensors: the same parameters and scales as on one device."""

    def trained(mesh: Mesh | None) -> tuple[list[Tensor], list[float]]:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        x = values(8, 4)
        if mesh is not None:
            model[0].weight = nn.Parameter(sw.distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
            model[1].weight = nn.Parameter(sw.distribute_tensor(model[1].weight.detach(), mesh, [Replicate()]))
            x = sw.distribute_tensor(x, mesh, [Shard(0)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            if step == 2:  # in the last row, which the last rank holds
                weight = model[0].weight.grad
                weight[5:, 3:] = torch.inf
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [p.detach() for p in model.parameters()], scales

    want, scales = trained(None)
    got, found = trained(sw.init_mesh(dp=2))
    assert scales == found == [8.0, 16.0, 8.0, 8.0, 16.0]
    for one, other in zip(got, want, strict=True):
        same(one, other)


@case(2)
def values_that_torch_refuses_are_refused_on_every_rank() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    bad = torch.tensor([0, 6])
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (IndexError, lambda: x.__setitem__(6, 5.0)),
        (IndexError, lambda: x[bad]),
        (IndexError, lambda: x.index_copy(0, bad, torch.ones(2))),
        (RuntimeError, lambda: x.scatter(0, bad, 1.0)),
        (RuntimeError, lambda: F.one_hot(sw.distribute_tensor(bad, mesh, [Replicate()]), 6)),
        (RuntimeError, lambda: torch.bernoulli(x)),
        (RuntimeError, lambda: x.normal_(0.0, -1.0)),
        (RuntimeError, lambda: x[:0].max()),
    ]
    for kind, call in calls:
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    same(x, torch.arange(6.0))


@case(2)
def data_is_read_where_torch_reads_it() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.distribute_tensor(torch.arange(24.0).view(2, 4, 3), mesh, [Shard(1)])
    assert torch.tensor([x.sum(), x.max()]).tolist() == [276.0, 23.0]
    parts = torch.tensor_split(x, sw.distribute_tensor(torch.tensor([1]), mesh, [Replicate()]), 1)
    assert [part.shape[1] for part in parts] == [1, 3]
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]), batch_first=True)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert lengths.tolist() == [4, 2] and isinstance(padded, DTensor)
    same(padded, torch.where(torch.tensor([4, 2])[:, None, None] > torch.arange(4)[:, None], x.full_tensor(), 0.0))
