"""What a DTensor means beside its values: numbers out, writes through views, gradients' layouts, copies, pickles, modules."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from tests.helpers.one_device import distributed, equal

MESH = sw.init_mesh(dp=2, tp=2)
LAYOUTS: list[Any] = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
    [Partial(), Shard(0)],
    [Partial("avg"), Partial()],
]


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_the_whole_value_comes_out(placements: Any) -> None:
    x = values(5, 3)
    d = distributed(x, MESH, placements)
    assert d.sum().item() == pytest.approx(x.sum().item(), abs=1e-5)
    assert float(d[2, 1]) == pytest.approx(float(x[2, 1]), abs=1e-5)
    assert bool((d.sum() > 0).item()) == bool(x.sum() > 0)
    np.testing.assert_allclose(d.numpy(), x.numpy(), atol=1e-5)
    np.testing.assert_allclose(np.asarray(d), x.numpy(), atol=1e-5)
    assert np.allclose(d.tolist(), x.tolist(), atol=1e-5)
    assert f"{d.sum():.3f}" == f"{x.sum():.3f}"
    assert str(d).startswith(repr(d)) and "tensor([[" in str(d)
    assert len(d) == 5 and d.shape == (5, 3) and d.numel() == 15


def test_repr_shows_the_layout_and_does_not_communicate() -> None:
    d = sw.zeros(8, 16, mesh=sw.init_mesh(dp=2, tp=4), placements={"dp": Shard(0)})
    with sw.trace_comm() as log:
        assert repr(d) == "DTensor(f32[8@dp, 16], mesh=(dp=2, tp=4))"
    assert not log.records


def test_to_local_is_the_bundle_of_shards() -> None:
    x = values(5, 3)
    local = distributed(x, MESH, [Shard(0), Replicate()]).to_local()
    assert isinstance(local, sw.Bundle)
    assert [tuple(shard.shape) for shard in local.shards] == [(3, 3), (3, 3), (2, 3), (2, 3)]
    assert torch.equal((local * 2).shards[2], x[3:] * 2)


WRITES: dict[str, Any] = {
    "slice": lambda d: d.__setitem__(slice(1, 5), 0),
    "row": lambda d: d.__setitem__(3, 7.0),
    "element": lambda d: d.__setitem__((2, 1), 5.0),
    "column": lambda d: d.__setitem__((slice(None), -1), torch.arange(6.0)),
    "ellipsis": lambda d: d.__setitem__((Ellipsis, 0), 2.0),
    "row of a tensor": lambda d: d.__setitem__(4, torch.arange(4.0)),
    "init": lambda d: nn.init.zeros_(d[:2]),
    "view": lambda d: d.view(3, 8)[1].mul_(2),
    "transpose": lambda d: d.t()[1].add_(1),
    "narrow": lambda d: d.narrow(1, 1, 2).fill_(9),
    "unbind": lambda d: d.unbind(0)[1].zero_(),
    "split": lambda d: d.split(2)[2].copy_(torch.ones(2, 4)),
    "chunk": lambda d: d.chunk(2, 1)[0].neg_(),
    "squeeze": lambda d: d[1:2].squeeze(0).fill_(4),
    "diagonal-free index": lambda d: d.__setitem__(torch.tensor([0, 3]), 1.0),
    "mask": lambda d: d.__setitem__(d > 0, 0.5),
}
EVEN: list[Any] = [p for p in LAYOUTS if not any(isinstance(q, Partial) for q in p)]


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("placements", EVEN, ids=str)
def test_a_write_through_a_view_changes_the_tensor(name: str, placements: Any) -> None:
    x = values(6, 4)
    d = distributed(x.clone(), MESH, placements)
    try:
        WRITES[name](d)
    except sw.OperatorError as refused:
        assert "would not reach the tensor" in str(refused)
        equal(d, x, "a refused write changes nothing")
        return
    WRITES[name](x)
    equal(d, x, f"{name} on {d!r}")


def test_writes_that_need_no_data_to_move_are_never_refused() -> None:
    for name in ("slice", "row", "element", "column", "init", "narrow", "split", "chunk", "unbind"):
        for placements in EVEN:
            WRITES[name](distributed(values(6, 4), MESH, placements))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.relu_(),
        lambda x: x.mul_(3.0),
        lambda x: x.add_(1.0),
        lambda x: x.fill_(2.0),
        lambda x: x.zero_(),
        lambda x: x.copy_(torch.ones(5, 3)),
        lambda x: x.clamp_(min=0.1),
        lambda x: x[1:3].exp_(),
        lambda x: x.add_(x),
    ],
)
@pytest.mark.parametrize("kind", ["sum", "avg", "max"])
def test_in_place_on_a_partial_tensor_means_the_whole(write: Any, kind: str) -> None:
    x = values(5, 3)
    d = distributed(x.clone(), MESH, [Partial(kind), Replicate()])
    seen = d[1:]
    write(d)
    write(x)
    equal(d, x, "the tensor")
    equal(seen, x[1:], "a view taken before")


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_a_gradient_has_its_tensors_layout_and_is_reduced_once(placements: Any) -> None:
    x, w = values(6, 4), values(4, 4)
    p = nn.Parameter(distributed(w, MESH, placements))
    dense = nn.Parameter(w.clone())
    d = distributed(x, MESH, [Shard(0), Replicate()])
    with sw.trace_comm() as log:
        ((d @ p).sum() + (d @ p * 2).sum()).backward()
    ((x @ dense).sum() + (x @ dense * 2).sum()).backward()
    assert p.grad.layout is p.layout.reduced()
    equal(p.grad, dense.grad, "gradient")
    if placements == LAYOUTS[0]:
        assert log.counts() == {"all_reduce": 1}, str(log)


def test_gradients_accumulate_over_backwards() -> None:
    p = nn.Parameter(distributed(values(4, 4), MESH, [Replicate(), Shard(0)]))
    for _ in range(2):
        (p * p).sum().backward()
    equal(p.grad, 4 * values(4, 4), "twice")


def test_autograd_through_the_ways_in_and_out() -> None:
    x = values(6, 4)
    shards = sw.Bundle([x[:3], x[:3], x[3:], x[3:]]).requires_grad_()
    d = DTensor.from_local(shards, MESH, [Shard(0), Replicate()])
    (d * d).sum().full_tensor().backward()
    assert torch.allclose(shards.grad.shards[2], 2 * x[3:])
    y = distributed(x, MESH, [Shard(0), Replicate()]).requires_grad_()
    (y.to_local() * 3).sum().shards  # noqa: B018  a bundle's sum is one number per rank
    y.full_tensor().square().sum().backward()
    equal(y.grad, 2 * x, "full_tensor")


def test_double_backward() -> None:
    x = values(5, 3)
    d = distributed(x, MESH, [Shard(0), Shard(1)]).requires_grad_()
    (g,) = torch.autograd.grad((d**3).sum(), d, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), d)
    equal(h, 6 * x, "second derivative")


def test_copies_and_pickles() -> None:
    p = nn.Parameter(distributed(values(5, 3), MESH, [Shard(0), Replicate()]))
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert isinstance(other, nn.Parameter) and other.layout is p.layout and other.requires_grad
        equal(other.detach(), values(5, 3), "copy")
        with torch.no_grad():
            other.zero_()
        equal(p.detach(), values(5, 3), "the original stays")
    file = io.BytesIO()
    torch.save({"p": p}, file)
    file.seek(0)
    equal(torch.load(file, weights_only=True)["p"].detach(), values(5, 3), "saved")


def test_modules_keep_their_state() -> None:
    module = nn.Linear(4, 6)
    whole = module.weight.detach().clone()
    module.weight = nn.Parameter(sw.distribute_tensor(module.weight.data, MESH, {"tp": Shard(0)}))
    state = module.state_dict()
    assert state["weight"].layout is module.weight.layout
    twin = copy.deepcopy(module)
    twin.load_state_dict({"weight": torch.zeros(6, 4), "bias": torch.zeros(6)})
    equal(twin.weight.detach(), torch.zeros(6, 4), "loaded from plain tensors")
    twin.load_state_dict(state)
    equal(twin.weight.detach(), whole, "loaded from DTensors")
    double = twin.to(torch.float64)
    assert double.weight.dtype == torch.float64 and double.weight.layout.placements == module.weight.placements


def test_a_torch_device_mesh_is_a_mesh() -> None:
    class DeviceMesh:
        mesh_dim_names = ("dp", "tp")
        mesh = torch.arange(4).view(2, 2)
        device_type = "cpu"

    mesh = sw.Mesh.from_torch(DeviceMesh())
    assert (mesh.axis_sizes, mesh.ranks, mesh.world) == ({"dp": 2, "tp": 2}, (0, 1, 2, 3), "processes")


def test_a_view_of_uneven_shards_that_lie_otherwise_is_severed() -> None:
    odd = sw.Bundle([torch.randn(4, 2).t(), torch.randn(4, 1).t()])
    x = DTensor.from_local(odd, sw.init_mesh(tp=2), [Shard(0)], run_check=True)
    flat = x.view(-1)
    x.add_(1)
    assert torch.equal(flat.full_tensor(), x.full_tensor().view(-1))
    with pytest.raises(sw.OperatorError, match=r"aten.add_ writes to f32\[12@tp\{8,4\}\], a view that data had to move for"):
        flat.add_(1)


def test_severed_views_cannot_be_written_to() -> None:
    d = distributed(values(10), sw.init_mesh(a=4), [Shard(0)])
    moved = d.view(2, 5)
    equal(moved, values(10).view(2, 5), "reading is fine")
    with pytest.raises(sw.OperatorError, match=r"aten.add_ writes to f32\[2, 5\], a view that data had to move for"):
        moved.add_(1)


def test_a_local_tensor_that_cannot_be_viewed_is_copied_and_followed() -> None:
    x = values(4, 6)
    odd = sw.Bundle([shard.t().contiguous().t() for shard in x.chunk(2)])  # lies in memory as no global tensor would
    d = DTensor.from_local(odd, sw.init_mesh(a=2), [Shard(0)], stride=(6, 1))
    for _ in range(2):
        flat = d.view(-1)
        d.mul_(2)
        x.mul_(2)
        equal(flat, x.view(-1), "follows")
        with pytest.raises(sw.OperatorError, match="would not reach the tensor"):
            flat.add_(1)


@pytest.mark.parametrize("kind", ["product", "max"])
def test_pairs_of_what_is_not_a_sum(kind: str) -> None:
    """The parts of a product of complex numbers are not the products of their parts."""
    mesh = sw.init_mesh(a=2)
    shards = [torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([0.5 - 1j, 2 + 2j])]
    if kind == "product":
        spread = sw.DTensor.from_local(sw.Bundle(shards), mesh, [sw.Partial(kind)])
        torch.testing.assert_close(torch.view_as_real(spread).full_tensor(), torch.view_as_real(shards[0] * shards[1]))
    else:
        pairs = [torch.view_as_real(shard) for shard in shards]
        spread = sw.DTensor.from_local(sw.Bundle(pairs), mesh, [sw.Partial(kind)])
        want = torch.view_as_complex(torch.maximum(*pairs))
        torch.testing.assert_close(torch.view_as_complex(spread).full_tensor(), want)


def test_the_gradient_of_a_whole_tensor_is_whole_or_a_summand_on_every_rank() -> None:
    x = sw.ones(4, 6, mesh=MESH, placements=[Shard(0), Shard(1)], requires_grad=True)
    x.full_tensor(grad_placements=[Partial(), Replicate()]).square().sum().backward()
    assert x.grad is not None and x.grad.layout is x.layout
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 6), 4.0))  # the gradient 2, from two ranks along dp
    with pytest.raises(
        sw.LayoutError, match=r"the gradient of a whole tensor is whole on every rank: Replicate\(\) or Partial"
    ):
        x.full_tensor(grad_placements=[Shard(0), Replicate()])


def test_new_tensors_say_which_keywords_they_take() -> None:
    with pytest.raises(TypeError, match=r"a keyword of a new tensor is one of mesh, placements, dtype, .*, got 'device'"):
        sw.zeros(4, mesh=MESH, device="cpu")  # type: ignore[call-arg]
