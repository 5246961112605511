"""torch.nn.functional on DTensors, forward and backward: values and gradients are those of one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Mesh, Replicate, Shard
from tests.helpers.one_device import distributed, equal

MESHES = {"2": sw.init_mesh(a=2), "3": sw.init_mesh(a=3), "2x2": sw.init_mesh(a=2, b=2)}
R = Replicate()

pytestmark = pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def every(mesh: Mesh, *dims: Sequence[int]) -> Iterator[list[tuple[Any, ...]]]:
    """Placements of tensors, each replicated or shard on one of its `dims`: by the first axis, then by each axis its own
    way."""
    options = [[R, *(Shard(d) for d in own)] for own in dims]
    if mesh.ndim == 1:
        yield from ([(p,) for p in choice] for choice in itertools.product(*options))
        return
    for first in itertools.product(*options):
        for second in itertools.product(*options):
            if sum(p != R for p in first + second) <= 3:
                yield list(zip(first, second, strict=True))


def check(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], mesh: Mesh, placements: Sequence[Any], leaves: int = 9
) -> None:
    """Value and gradients of the first `leaves` tensors, for a random cotangent."""
    wanted = [i < leaves and t.is_floating_point() for i, t in enumerate(tensors)]
    dense = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    want = function(*dense)
    cotangent = randn(*want.shape)
    want.backward(cotangent)
    spread = [distributed(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
    for x, w in zip(spread, wanted, strict=True):
        x.requires_grad_(w)
    about = f"{[repr(x.layout) for x in spread]} on {mesh}"
    got = function(*spread)
    equal(got, want.detach(), about)
    got.backward(distributed(cotangent, mesh, [R] * mesh.ndim))
    for x, d in zip(spread, dense, strict=True):
        if x.requires_grad:
            assert x.grad.layout.dims == x.layout.dims and not x.grad.layout.partials, f"{about}: {x.grad!r}"
            equal(x.grad, d.grad, f"gradient of {x!r}: {about}")


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 2, 4), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(mesh: Mesh, shape: tuple[int, ...], bias: bool) -> None:
    tensors = [randn(*shape), randn(5, 4), *([randn(5)] if bias else [])]
    for placements in every(mesh, range(len(shape)), (0, 1), *([(0,)] if bias else [])):
        check(F.linear, tensors, mesh, placements)


@pytest.mark.parametrize(
    "shapes",
    [((3,), (3,)), ((5, 3), (3,)), ((3,), (2, 3, 5)), ((2, 1, 5, 3), (3, 3, 2)), ((3, 5, 3), (3, 2))],
    ids=str,
)
def test_matmul(mesh: Mesh, shapes: tuple[tuple[int, ...], ...]) -> None:
    for placements in every(mesh, *(range(len(shape)) for shape in shapes)):
        check(torch.matmul, [randn(*shape) for shape in shapes], mesh, placements)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("bij,bjk->bik", ((3, 2, 5), (3, 5, 2))), ("bhld,bhsd->bhls", ((2, 3, 2, 5), (2, 3, 3, 5))), ("i,j->ij", ((3,), (5,)))],
)
def test_einsum(mesh: Mesh, equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    for placements in every(mesh, *(range(min(2, len(shape))) for shape in shapes)):
        check(lambda *t: torch.einsum(equation, *t), [randn(*shape) for shape in shapes], mesh, placements)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention_placements(mesh: Mesh) -> Iterator[list[tuple[Any, ...]]]:
    """Query, key and value sharded alike or not at all, on batch, heads and queries."""
    for cuts in ((0, 0, 0), (1, 1, 1), (2, None, None), (None, 1, 1), (1, None, 0), (2, 2, 3)):
        one = [R if d is None else Shard(d) for d in cuts]
        if mesh.ndim == 1:
            yield [(p,) for p in one]
        else:
            yield [(p, Shard(1)) for p in one]
            yield [(Shard(0), p) for p in one]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 3), (4, 2), (3, 1)], ids=str)
def test_attention(mesh: Mesh, causal: bool, heads: tuple[int, int]) -> None:
    query, key, value = randn(2, heads[0], 3, 4), randn(2, heads[1], 5, 4), randn(2, heads[1], 5, 4) * 2
    for placements in attention_placements(mesh):
        check(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads[0] != heads[1]),
            (query, key, value),
            mesh,
            placements,
        )


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 3, 5), (1, 3, 1, 5)], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_masked_attention(mesh: Mesh, shape: tuple[int, ...], kind: torch.dtype) -> None:
    mask = randn(*shape)
    mask = mask > -0.8 if kind is torch.bool else mask
    tensors = randn(2, 3, 3, 4), randn(2, 3, 5, 4), randn(2, 3, 5, 4) * 2

    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, m)

    for placements in attention_placements(mesh):
        for own in (R, Shard(0), Shard(len(shape) - 2)):
            check(attend, (*tensors, mask), mesh, [*placements, [own] * mesh.ndim])


def test_attention_that_is_computed_from_its_parts(mesh: Mesh) -> None:
    tensors = randn(2, 3, 3, 4), randn(2, 3, 5, 4), randn(2, 3, 5, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for placements in attention_placements(mesh):
            check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), tensors, mesh, placements)


def test_attention_over_sharded_heads_communicates_nothing(mesh: Mesh) -> None:
    cut = [distributed(randn(2, 6, 3, 4), mesh, [Shard(1)] + [R] * (mesh.ndim - 1)) for _ in range(3)]
    grouped = [cut[0], *(distributed(randn(2, 3, 3, 4), mesh, [Shard(1)] + [R] * (mesh.ndim - 1)) for _ in range(2))]
    for x in (*cut, *grouped):
        x.requires_grad_()
    if mesh.axes == ("a",) and mesh.size() == 3:
        with sw.communication("forbid"):
            F.scaled_dot_product_attention(*grouped, is_causal=True, enable_gqa=True).sum().backward()
    with sw.trace_comm() as log:
        F.scaled_dot_product_attention(*cut, is_causal=True).backward(cut[0].detach())
    assert log.counts() == {}


# ── embedding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("words", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("indices", [torch.tensor(3), torch.tensor([[4, 0, 1], [2, 4, 4]])], ids=["0d", "2d"])
def test_embedding(mesh: Mesh, words: dict[str, Any], indices: Tensor) -> None:
    for placements in every(mesh, range(indices.ndim), (0, 1)):
        check(lambda i, w: F.embedding(i, w, **words), (indices, randn(5, 3)), mesh, placements)


def test_embedding_of_an_unknown_word_raises(mesh: Mesh) -> None:
    table = distributed(randn(5, 3), mesh, [Shard(0)] * mesh.ndim)
    for bad in (5, -1):
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([0, bad]), table)


def test_one_hot(mesh: Mesh) -> None:
    words = torch.tensor([[4, 0, 1], [2, 4, 4]])
    for placement in (R, Shard(0), Shard(1)):
        equal(F.one_hot(distributed(words, mesh, [placement] * mesh.ndim), 5), F.one_hot(words, 5), f"{placement}")


# ── losses ────────────────────────────────────────────────────────────────────────────────────────────────────────────

TARGETS = torch.tensor([4, 0, -100, 2, 4])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25])
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "logits": F.binary_cross_entropy_with_logits,
    "kl": F.kl_div,
    "poisson": F.poisson_nll_loss,
    "hinge": F.hinge_embedding_loss,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(mesh: Mesh, reduction: str, smoothing: float, weighted: bool) -> None:
    def loss(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)

    tensors = [randn(5, 5), TARGETS, *([WEIGHTS] if weighted else [])]
    for placements in every(mesh, (0, 1), (0,)):
        placements += [(Shard(0), *[R] * (mesh.ndim - 1))] if weighted else []
        check(loss, tensors, mesh, placements, leaves=1)


@pytest.mark.parametrize("shape", [(5,), (3, 5, 2), (3, 5, 2, 1)], ids=str)
def test_cross_entropy_of_more_dims(mesh: Mesh, shape: tuple[int, ...]) -> None:
    dim = min(1, len(shape) - 1)
    size = [n for i, n in enumerate(shape) if i != dim]
    target = torch.arange(torch.Size(size).numel()).view(size) % 5
    for placements in every(mesh, range(len(shape)), range(min(1, len(size)))):
        check(lambda x, t: F.cross_entropy(x, t, ignore_index=1), (randn(*shape), target), mesh, placements)


def test_cross_entropy_with_probabilities(mesh: Mesh) -> None:
    for placements in every(mesh, (0, 1), (0, 1)):
        check(F.cross_entropy, (randn(5, 3), randn(3, 5).T.softmax(1)), mesh, placements)


def test_cross_entropy_leaves_sharded_logits_where_they_are(mesh: Mesh) -> None:
    logits = distributed(randn(64, 40), mesh, [Shard(1)] + [R] * (mesh.ndim - 1)).requires_grad_()
    target = torch.arange(64) % 40
    with sw.trace_comm() as log:
        F.cross_entropy(logits, target, ignore_index=7).backward()
    assert set(log.counts()) == {"all_reduce"} and log.fallbacks == []
    assert max(record.bytes for record in log.records) < 64 * 40


def test_a_target_out_of_range_raises(mesh: Mesh) -> None:
    logits = distributed(randn(5, 5), mesh, [Shard(1)] * mesh.ndim)
    for bad in (5, -1):
        with pytest.raises(IndexError, match="out of bounds"):
            F.nll_loss(logits, torch.tensor([0, 1, 2, 3, bad]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(mesh: Mesh, name: str, reduction: str) -> None:
    how = "batchmean" if (name, reduction) == ("kl", "mean") else reduction
    for placements in every(mesh, (0, 1), (0, 1)):
        tensors = randn(5, 3), randn(3, 5).T.sigmoid()
        check(lambda x, y: LOSSES[name](x, y, reduction=how), tensors, mesh, placements, leaves=1 + (name != "hinge"))


def test_a_mean_over_uneven_shards_counts_elements(mesh: Mesh) -> None:
    x = distributed(torch.tensor([[0.0], [0.0], [9.0]]), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
    loss = F.mse_loss(x, torch.zeros(3, 1))
    loss.backward()
    assert loss.item() == 27 and x.grad.tolist() == [[0], [0], [6]]


# ── indexing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = torch.tensor([[3, 0], [0, 4], [2, 2]])
INDEXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, i: x.gather(0, i),
    "index_select": lambda x, i: x.index_select(0, i[:, 0]),
    "rows": lambda x, i: x[i],
    "elements": lambda x, i: x[i, i // 3],
    "columns": lambda x, i: x[:, i // 3],
    "mask": lambda x, i: x[x > 0],
    "take": lambda x, i: x.take(i),
    "take_along": lambda x, i: x.take_along_dim(i, 0),
    "scatter": lambda x, i: torch.zeros_like(x).scatter(0, i[:2], x[:2]),
    "scatter_add": lambda x, i: torch.ones_like(x).scatter_add(0, i, x[:3]),
    "scatter_reduce": lambda x, i: torch.ones_like(x).scatter_reduce(0, i[:1], x, "prod"),
    "index_add": lambda x, i: torch.ones_like(x).index_add(0, i[:, 0], x[:3]),
    "index_copy": lambda x, i: torch.ones_like(x).index_copy(0, i[1], x[:2]),
    "index_put": lambda x, i: torch.ones_like(x).index_put((i[:, 1],), x[1:4], accumulate=True),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "masked_fill": lambda x, i: x.masked_fill(x > 0, 2.0),
    "tril": lambda x, i: x.tril(-1),
    "slice": lambda x, i: x[1:4:2],
    "narrow": lambda x, i: x.narrow(0, 2, 3),
    "select": lambda x, i: x[-2] * x[:, 1].sum(),
    "max": lambda x, i: x.max(0).values,
    "sort": lambda x, i: x.sort(0).values,
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(mesh: Mesh, name: str) -> None:
    for placements in every(mesh, (0, 1), (0, 1)):
        check(INDEXING[name], (randn(5, 2), ROWS), mesh, placements)


def test_writing_by_index(mesh: Mesh) -> None:
    for placement in (R, Shard(0), Shard(1)):
        dense, x = randn(5, 3), distributed(randn(5, 3), mesh, [placement] * mesh.ndim)
        for t in (dense, x):
            t[torch.tensor([0, -1])] = 7
            t[t < -0.5] = 0
            t[:, torch.tensor([True, False, True])] *= 2
            t[torch.tensor([1, 2]), 1:] += torch.ones(2)
        equal(x, dense, f"{placement}")


def test_looking_up_in_a_large_sharded_table_moves_what_is_found(mesh: Mesh) -> None:
    table = distributed(randn(3000, 8), mesh, [Shard(0)] + [R] * (mesh.ndim - 1))
    rows = torch.tensor([1, 2999, 1500])
    for find in (lambda: table[rows], lambda: table.index_select(0, rows), lambda: F.embedding(rows, table)):
        with sw.trace_comm() as log:
            assert find().full_tensor().shape == (3, 8)
        assert log.counts() == {"all_reduce": 1} and log.bytes <= 2 * 3 * 8 * 4


# ── dropout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dropout_is_the_same_on_every_mesh_and_layout(mesh: Mesh) -> None:
    whole = sw.init_mesh(a=1)
    torch.manual_seed(3)
    want = F.dropout(distributed(torch.ones(40, 30), whole, [R]), 0.3).full_tensor()
    assert set(want.unique().tolist()) == {0.0, want.max().item()} and abs((want > 0).float().mean() - 0.7) < 0.05
    for placement in (R, Shard(0), Shard(1)):
        torch.manual_seed(3)
        got = F.dropout(distributed(torch.ones(40, 30), mesh, [placement] * mesh.ndim), 0.3)
        equal(got, want, f"{placement}")


def test_gradient_of_dropout(mesh: Mesh) -> None:
    x = distributed(torch.ones(7, 5), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
    out = F.dropout(x, 0.5)
    out.sum().backward()
    equal(x.grad, out.detach().full_tensor(), "dropout of ones")


def test_checkpoint_draws_the_same_numbers_again(mesh: Mesh) -> None:
    x = distributed(torch.ones(7, 5), mesh, [Shard(0)] * mesh.ndim).requires_grad_()

    def twice(x: DTensor) -> Any:
        return F.dropout(F.dropout(x, 0.5) * 2, 0.3)

    out = torch.utils.checkpoint.checkpoint(twice, x, use_reentrant=False)
    out.sum().backward()
    equal(x.grad, out.detach().full_tensor(), "dropout of ones")


def test_attention_with_dropout_keeps_its_mean(mesh: Mesh) -> None:
    tensors = [distributed(randn(2, 3, 5, 4), mesh, [Shard(1)] * mesh.ndim) for _ in range(2)]
    ones = distributed(torch.ones(2, 3, 5, 4), mesh, [Shard(1)] * mesh.ndim)
    got = torch.stack([F.scaled_dot_product_attention(*tensors, ones, dropout_p=0.2).mean() for _ in range(20)])
    assert abs(got.mean().item() - 1) < 0.1 and got.std().item() > 0


def test_indexing_a_dim_of_several_factors(mesh: Mesh) -> None:
    """A flattened dim of which an inner factor is sharded: a rank holds several runs of it."""
    index = torch.tensor([11, 0, 5, 5, 7])
    programs: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.index_select(0, index),
        lambda x: x.gather(0, index[:, None].expand(5, 2)),
        lambda x: x[index, index % 2],
        lambda x: x.scatter_add(0, index[:, None].expand(5, 2), torch.ones(5, 2)),
        lambda x: x.index_put((index[:3],), torch.ones(2)),
        lambda x: x.tril(-3),
        lambda x: x[3:9:2],
        lambda x: F.embedding(index, x),
        lambda x: F.cross_entropy(x.T, torch.tensor([9, 2])),
    ]
    for program in programs:
        placements = [(R, *[Shard(1)] * (mesh.ndim - 1)) if mesh.ndim > 1 else (Shard(1),)]
        for cuts in (*placements, [Shard(1)] * mesh.ndim):
            check(lambda x, run=program: run(x.flatten(0, 1)), [randn(3, 4, 2)], mesh, [cuts])


# ── what needs no communication ───────────────────────────────────────────────────────────────────────────────────────

aten = torch.ops.aten
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
ONE = torch.tensor([0, 1, 0])
FREE: dict[str, tuple[Callable[..., Any], list[tuple[Any, Any]]]] = {
    "mm, inner dim": (torch.mm, [(randn(5, 6), S1), (randn(6, 3), S0)]),
    "addmm, inner dim": (torch.addmm, [(randn(3), R), (randn(5, 6), S1), (randn(6, 3), S0)]),
    "linear, outputs": (F.linear, [(randn(2, 5, 6), R), (randn(3, 6), S0), (randn(3), S0)]),
    "linear, tokens": (F.linear, [(randn(2, 5, 6), S1), (randn(3, 6), R), (randn(3), R)]),
    "baddbmm": (torch.baddbmm, [(randn(5, 1, 4), S0), (randn(5, 3, 2), S0), (randn(5, 2, 4), S0)]),
    "embedding, rows": (lambda w, i: F.embedding(i, w), [(randn(5, 3), S0), (ONE, R)]),
    "embedding, columns": (lambda w, i: F.embedding(i, w), [(randn(5, 3), S1), (ONE, R)]),
    "embedding, words": (lambda w, i: F.embedding(i, w), [(randn(5, 3), R), (ONE, S0)]),
    "embedding gradient": (lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, False), [(randn(3, 4), S0), (ONE, S0)]),
    "nll, batch": (lambda x, t: F.nll_loss(x, t, reduction="sum"), [(randn(3, 5), S0), (ONE, S0)]),
    "nll, classes": (lambda x, t: F.nll_loss(x, t, reduction="none"), [(randn(3, 5), S1), (ONE, R)]),
    "mse": (F.mse_loss, [(randn(5, 3), S0), (randn(5, 3), S0)]),
    "gather, other dim": (lambda x, i: x.gather(0, i), [(randn(5, 3), S1), (ONE[None], S1)]),
    "gather, index": (lambda x, i: x.gather(1, i), [(randn(1, 5), R), (ONE[None], S1)]),
    "gather, along": (lambda x, i: x.gather(0, i), [(randn(500, 3), S0), (ONE[None], R)]),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), [(randn(3, 5), S0), (ONE[:, None], S0), (randn(3, 1), S0)]),
    "scatter, along": (lambda x, i: x.scatter(0, i, 1.0), [(randn(5, 3), S0), (ONE[None], R)]),
    "index_add, source": (lambda x, i, y: x.index_add(0, i, y), [(randn(5, 3), R), (ONE, S0), (randn(3, 3), S0)]),
    "index, other dim": (lambda x, i: x[i], [(randn(5, 3), S1), (ONE, R)]),
    "index, numbers": (lambda x, i: x[:, i], [(randn(5, 3), R), (ONE, S0)]),
    "index_put": (lambda x, i, y: x.index_put((i,), y), [(randn(5, 3), S0), (ONE, R), (randn(3, 3), R)]),
    "tril": (torch.tril, [(randn(5, 3), S0)]),
    "slice gradient": (lambda g: aten.slice_backward(g, [9, 3], 0, 2, 7, 1), [(randn(5, 3), S0)]),
    "select gradient": (lambda g: aten.select_backward(g, [4, 5, 3], 0, 2), [(randn(5, 3), S0)]),
    "attention, batch": (F.scaled_dot_product_attention, [(randn(3, 2, 5, 4), S0)] * 3),
    "attention, queries": (F.scaled_dot_product_attention, [(randn(3, 2, 5, 4), S2), *[(randn(3, 2, 5, 4), R)] * 2]),
    "dropout": (F.dropout, [(randn(5, 3), S1)]),
}


@pytest.mark.parametrize("name", FREE)
def test_it_needs_no_communication(mesh: Mesh, name: str) -> None:
    function, given = FREE[name]
    others = [R] * (mesh.ndim - 1)
    spread = [distributed(tensor, mesh, [placement, *others]) for tensor, placement in given]
    with sw.trace_comm() as log:
        out = function(*spread)
    assert log.records == [] and log.fallbacks == []
    if name != "dropout":
        equal(out, function(*(tensor for tensor, _ in given)), name)
