"""Laws of a Bundle (an operator on it is the operator on each shard) and of the transport made of bundles."""

import copy
import io
import pickle
from itertools import product

import pytest
import torch

from shardwise.comm import Bundle, PerRank, Simulated
from shardwise.errors import MeshError, OperatorError, WorldError
from shardwise.layouts.mesh import Mesh

DOOR = Simulated()
MESH = Mesh(("dp", "tp"), (2, 3), range(6), "cpu", "simulated")
AXES = [("dp",), ("tp",), ("dp", "tp")]


def bundle(*shape, places=6, dtype=torch.float32, requires_grad=False):
    """Small whole numbers, different at each place, so that sums are exact in any order."""
    make = torch.Generator().manual_seed(0)
    shards = [torch.randint(-4, 5, shape, generator=make).to(dtype) for _ in range(places)]
    return Bundle(shards, requires_grad)


def assert_pieces(found, expected):
    assert isinstance(found, Bundle)
    assert len(found.shards) == len(expected)
    for mine, theirs in zip(found.shards, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


# ── a Bundle ──

FUNCTIONS = [
    lambda x: x + 1,
    lambda x: x @ x.t(),
    lambda x: torch.cat([x, x * 2, torch.ones(1, 3)]),
    lambda x: torch.where(x > 0, x, torch.zeros(())),
    lambda x: x[1:, ::2],
    lambda x: torch.stack(x.unbind(1)),
    lambda x: torch.nn.functional.layer_norm(x, (3,), weight=torch.ones(3)),
    lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: x.sum(),
    lambda x: x.new_zeros(3),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_operator_runs_on_each_shard(function):
    x = bundle(2, 3)
    assert_pieces(function(x), [function(shard) for shard in x.shards])


def test_operators_with_several_outputs():
    x = bundle(4, 3)
    values, places = torch.max(x, 0)
    assert_pieces(values, [shard.max(0).values for shard in x.shards])
    assert_pieces(places, [shard.max(0).indices for shard in x.shards])
    assert_pieces(x.split(3)[1], [shard.split(3)[1] for shard in x.shards])


def test_shards_may_differ_in_shape():
    x = Bundle([torch.ones(2, 3), torch.ones(0, 3), torch.ones(1, 3)])
    assert x.shape == (2, 3)
    assert_pieces(x.sum(0), [torch.full((3,), 2.0), torch.zeros(3), torch.ones(3)])


def test_in_place_operators_write_to_the_shards_and_return_their_argument():
    x, y = bundle(2, 3), bundle(2, 3)
    shards = x.shards
    assert x.add_(1) is x
    x[0] = 7
    assert_pieces(x, [torch.cat([torch.full((1, 3), 7.0), shard[1:] + 1]) for shard in y.shards])
    assert all(mine is before for mine, before in zip(x.shards, shards, strict=True))


def test_out_operators_return_their_argument():
    x = bundle(2, 3)
    out, places = torch.empty_like(x[0]), torch.empty_like(x[0], dtype=torch.int64)
    assert torch.add(x[0], 1, out=out) is out
    assert_pieces(out, [shard[0] + 1 for shard in x.shards])
    result = torch.max(x, 0, out=(out, places))
    assert result[0] is out
    assert result[1] is places
    assert_pieces(places, [shard.max(0).indices for shard in x.shards])


def test_lists_are_written_in_place():
    x = bundle(2, 3)
    torch._foreach_mul_([x], 2.0)
    assert_pieces(x, [shard * 2 for shard in bundle(2, 3).shards])


def test_a_view_shares_the_memory_of_the_shards():
    x = bundle(2, 3)
    x.view(-1)[2:].zero_()
    assert all(shard.view(-1)[2:].eq(0).all() for shard in x.shards)


def test_in_place_operators_that_reshape():
    x = bundle(2, 3)
    assert x.t_().shape == (3, 2)
    assert x.unsqueeze_(0).shape == (1, 3, 2)
    assert x.squeeze_(0).shape == x.shards[1].shape == (3, 2)
    assert x.stride() == x.shards[1].stride()


def test_a_value_that_all_places_agree_on():
    x = Bundle([torch.ones(2), torch.ones(2)])
    assert x.sum().item() == 2.0
    assert bool((x > 0).all())
    assert torch.equal(x, x)
    assert x.tolist() == [1.0, 1.0]
    assert torch.full_like(x, float("nan"))[0].isnan()
    assert str((x[0] / 0 * 0).item()) == "nan"


@pytest.mark.parametrize("ask", [lambda x: x[0].item(), lambda x: bool(x[0] > 1), lambda x: x.tolist()])
def test_a_value_that_differs_is_an_error(ask):
    with pytest.raises(WorldError, match=r"at place 0 and .* at place 1 of a simulated world.*Look at `\.shards`"):
        ask(Bundle([torch.ones(2), torch.full((2,), 2.0)]))


def test_bundles_of_different_worlds_do_not_mix():
    with pytest.raises(WorldError, match=r"bundles of \[2, 3\] places"):
        bundle(2, places=2) + bundle(2, places=3)
    with pytest.raises(WorldError, match="at least one shard"):
        Bundle([])


def test_autograd_is_that_of_each_shard():
    x, w = bundle(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    y = torch.nn.functional.gelu(x @ w.detach()).square()
    y[1:].sum().backward()
    expected = [shard.clone().requires_grad_() for shard in x.shards]
    for shard in expected:
        torch.nn.functional.gelu(shard @ w.detach()).square()[1:].sum().backward()
    assert_pieces(x.grad, [shard.grad for shard in expected])
    assert not any(shard.requires_grad for shard in (*x.shards, *y.shards))


def test_autograd_through_an_in_place_write_to_a_view():
    x = bundle(4, requires_grad=True)
    y = x * 1
    y[1:3].mul_(5)
    y.sum().backward()
    assert_pieces(x.grad, [torch.tensor([1.0, 5.0, 5.0, 1.0])] * 6)


def test_a_parameter_and_its_optimizer():
    x = torch.nn.Parameter(bundle(3))
    assert isinstance(x, Bundle) and x.requires_grad
    optimizer = torch.optim.AdamW([x], lr=0.1)
    x.square().sum().backward()
    optimizer.step()
    twins = [torch.nn.Parameter(shard) for shard in bundle(3).shards]
    for twin in twins:
        one = torch.optim.AdamW([twin], lr=0.1)
        twin.square().sum().backward()
        one.step()
    assert_pieces(x.detach(), [twin.detach() for twin in twins])


def through_save(x):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["x"]


COPIES = [copy.deepcopy, torch.clone, lambda x: pickle.loads(pickle.dumps(x)), through_save]


@pytest.mark.parametrize(("copied", "requires_grad"), list(product(COPIES, [False, True])))
def test_copies(copied, requires_grad):
    x = bundle(2, 3, requires_grad=requires_grad)
    y = copied(x)
    assert_pieces(y, x.shards)
    assert y.requires_grad == requires_grad
    assert not any(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(x.shards, y.shards, strict=True))
    assert_pieces(x.detach(), x.shards)


def test_repr_lists_the_shards():
    assert repr(Bundle([torch.zeros(1), torch.ones(1)])) == "Bundle(\n  0: tensor([0.])\n  1: tensor([1.])\n)"
    assert "grad_fn" in repr(bundle(2, requires_grad=True) * 2)
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = bundle(2).colour


def test_compiled():
    x = bundle(4, requires_grad=True)
    found = torch.compile(lambda t: t.sin().view(2, 2).sum(0) + 1, backend="aot_eager", fullgraph=True)(x)
    assert_pieces(found, [shard.sin().view(2, 2).sum(0) + 1 for shard in x.shards])
    found.sum().backward()
    assert_pieces(x.grad, [shard.cos() for shard in x.shards])


class Outer(torch.Tensor):
    """Another wrapper, as a DTensor is to bundles."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.tensor(7)


def test_a_bundle_leaves_the_operator_to_another_wrapper():
    assert torch.ops.aten.add.Tensor(bundle(2), Outer(torch.ones(2))).item() == 7


# ── the transport ──

REDUCTIONS = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def assert_no_shared_memory(found, *others):
    pointers = [shard.data_ptr() for x in (found, *others) for shard in x.shards if shard.numel()]
    assert len(set(pointers)) == len(pointers)
    assert all(shard.is_contiguous() for shard in found.shards)


@pytest.mark.parametrize(("axes", "kind"), list(product(AXES, REDUCTIONS)))
def test_all_reduce(axes, kind):
    x = bundle(2, 3)
    found = DOOR.all_reduce(x, kind, MESH, axes)
    of = [torch.stack([x.shards[peer] for peer in MESH.peers(place, axes)]) for place in range(6)]
    assert_pieces(found, [REDUCTIONS[kind](stacked) for stacked in of])
    assert_no_shared_memory(found, x)


def test_all_reduce_of_bits_and_unknown_kinds():
    x = bundle(4, dtype=torch.int64)
    for kind, combine in {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}.items():
        found = DOOR.all_reduce(x, kind, MESH, ("dp",))
        assert_pieces(found, [combine(x.shards[place % 3], x.shards[place % 3 + 3]) for place in range(6)])
    with pytest.raises(OperatorError, match="no collective reduces by 'median'; use one of sum, product"):
        DOOR.all_reduce(x, "median", MESH, ("dp",))


def test_replicas_are_bitwise_equal():
    x = Bundle(torch.randn(6, 100).unbind())
    found = DOOR.all_reduce(x, "sum", MESH, ("dp", "tp"))
    assert all(torch.equal(shard, found.shards[0]) for shard in found.shards)


@pytest.mark.parametrize("axes", AXES)
def test_all_gather_and_reduce_scatter(axes):
    x = bundle(2, 3)
    whole = DOOR.all_gather(x, MESH, axes)
    assert_pieces(whole, [torch.cat([x.shards[peer] for peer in MESH.peers(place, axes)]) for place in range(6)])
    assert_no_shared_memory(whole, x)
    part = DOOR.reduce_scatter(whole, "max", MESH, axes)
    assert_pieces(part, x.shards)
    assert_no_shared_memory(part, whole)


def test_reduce_scatter_refuses_unequal_chunks():
    with pytest.raises(OperatorError, match=r"reduce_scatter over axes \('tp',\): dim 0 has 4 rows, which 3 ranks"):
        DOOR.reduce_scatter(bundle(4), "sum", MESH, ("tp",))


@pytest.mark.parametrize("axes", AXES)
def test_all_to_all(axes):
    """Place p sends (p + i) % 3 copies of the number p to the i-th of its group."""
    size = len(MESH.peers(0, axes))
    send = PerRank(lambda place: tuple((place + i) % 3 for i in range(size)))
    receive = PerRank(
        lambda place: tuple((peer + MESH.peers(place, axes).index(place)) % 3 for peer in MESH.peers(place, axes))
    )
    x = Bundle(torch.full((sum(send.at(place)),), float(place)) for place in range(6))
    found = DOOR.all_to_all(x, send, receive, MESH, axes)
    for place in range(6):
        counts = zip(MESH.peers(place, axes), receive.at(place), strict=True)
        assert found.shards[place].tolist() == [float(peer) for peer, count in counts for _ in range(count)]
    assert_pieces(DOOR.all_to_all(found, receive, send, MESH, axes), x.shards)


def test_all_to_all_checks_that_ranks_agree():
    with pytest.raises(WorldError, match=r"place 0 expects \(2, 0\) elements from places \(0, 3\), which send it \(1, 1\)"):
        DOOR.all_to_all(bundle(2), (1, 1), (2, 0), MESH, ("dp",))


def test_broadcast_number_shapes_replicate_plain():
    x = bundle(2, 3)
    assert_pieces(DOOR.broadcast(x, MESH), [x.shards[0]] * 6)
    assert_no_shared_memory(DOOR.broadcast(x, MESH), x)
    assert_pieces(DOOR.number(PerRank(lambda place: place * 7), MESH), [torch.tensor(place * 7) for place in range(6)])
    uneven = Bundle(torch.ones(place, 2) for place in range(6))
    assert DOOR.shapes(uneven, MESH) == tuple((place, 2) for place in range(6))
    with pytest.raises(WorldError, match="differ in number of dims: 0 on rank 0"):
        DOOR.shapes(Bundle(torch.ones((1,) * place) for place in range(6)), MESH)
    t = torch.ones(2)
    assert_pieces(DOOR.replicate(t, MESH), [t] * 6)
    assert DOOR.plain(x) is x.shards[0]
    assert DOOR.plain(t) is t


def test_each():
    x = bundle(2, 3)
    scale = PerRank(lambda place: place)

    def function(a, factors, b):
        return a * factors[0] + factors[1], None, (b, 5)

    first, none, (second, five) = DOOR.each(function, MESH, x, [scale, (scale, x)[1]], torch.ones(1))
    assert_pieces(first, [shard * place + shard for place, shard in enumerate(x.shards)])
    assert none is None
    assert five == 5
    assert_pieces(second, [torch.ones(1)] * 6)
    assert_pieces(DOOR.each(torch.full, MESH, (2,), scale), [torch.full((2,), place) for place in range(6)])


def test_a_plain_tensor_is_the_same_at_every_place():
    assert_pieces(DOOR.all_reduce(torch.ones(2), "sum", MESH, ("tp",)), [torch.full((2,), 3.0)] * 6)


def test_a_bundle_of_another_mesh_is_refused():
    with pytest.raises(MeshError, match=r"a bundle of 4 shards meets mesh \(dp=2, tp=3\) of 6 ranks"):
        DOOR.all_gather(bundle(2, places=4), MESH, ("tp",))


def test_a_sub_mesh_reaches_the_same_groups():
    x = bundle(2)
    assert_pieces(DOOR.all_gather(x, MESH["tp"], ("tp",)), DOOR.all_gather(x, MESH, ("tp",)).shards)
