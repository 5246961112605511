"""Compiled functions whose graphs break, in loops and where data decides, have the values and gradients of uncompiled ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame
from torch import Tensor
from torch._dynamo import graph_break

import shardwise as sw
from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.tensor.dispatch import dispatch

MESH = sw.init_mesh(tp=2)

# In each of these Dynamo gives up the whole frame: a loop is not resumed in its middle. What it calls may still be compiled.


def operators(x: Any, w: Any) -> Any:
    out = torch.zeros_like(x)
    for i in range(3):
        x = x @ w
        graph_break()
        out = out + x.sin() * i
    return out


def writes(x: Any, w: Any) -> Any:
    y = x.clone()
    for _ in range(2):
        graph_break()
        y[0] = 3
        y[:, 1] = w[0, :4]
        y += 1
        y.mul_(2)
    return y


def moves(x: Any, w: Any) -> Any:
    for _ in range(2):
        graph_break()
        x = x.redistribute(placements=[Shard(1)]) @ w
        x = DTensor.from_local(x.to_local() * 2, MESH, x.placements, shape=x.shape)
        x = x * x.full_tensor().sum() / len(str(x.detach()))
    return x


def copies(x: Any, w: Any) -> Any:
    for _ in range(2):
        graph_break()
        x = x + copy.deepcopy(x.detach()) + pickle.loads(pickle.dumps(w.detach()))[:4] + x.detach().tolist()[0][0]
    return x


def makes(x: Any, w: Any) -> Any:
    for _ in range(2):
        graph_break()
        ones = sw.ones(4, 6, mesh=MESH, placements=[Shard(0)])
        x = x * ones + sw.distribute_tensor(torch.ones(4, 6), MESH, [Shard(1)]) @ w
    return x


def backwards(x: Any, w: Any) -> Any:
    p = torch.nn.Parameter(x.detach().clone())
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    for _ in range(2):
        graph_break()
        (p @ w.detach().redistribute(placements=[Shard(0)])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return p.detach()


LOOPS = [operators, writes, moves, copies, makes, backwards]

# Here the graph breaks at one operator, and goes on behind it.

AT_DATA: dict[str, Callable[[Any, Any], Any]] = {
    "branch": lambda x, w: x @ w if x.sum() > 0 else x * 3,
    "number": lambda x, w: x * x.sum().item(),
    "nonzero": lambda x, w: x * (x > 0).nonzero().sum(),
    "where": lambda x, w: x[torch.where(x[:, 0] > -9)[0]] @ w,
    "mask": lambda x, w: x[x > 0] * 2,
    "counts": lambda x, w: x * torch.bincount((x > 0).long().view(-1), minlength=2).sum(),
    "experts": lambda x, w: sum(x[(x[:, i] > 0).nonzero()[:, 0]].sum(0) * w[i] for i in range(2)),
}


def inputs() -> list[DTensor]:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 6, generator=draw), torch.randn(6, 6, generator=draw)
    return [sw.distribute_tensor(t, MESH, [Shard(i)]).requires_grad_() for i, t in enumerate((x, w))]


def results(function: Callable[[Any, Any], Any]) -> list[Tensor]:
    """The value of a function and the gradients of its inputs, as plain tensors."""
    given = inputs()
    value = function(*given)
    if value.requires_grad:
        value.square().sum().backward()
    return [value.detach().full_tensor(), *[x.grad.full_tensor() for x in given if x.grad is not None]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("function", [*LOOPS, *AT_DATA.values()], ids=[*(f.__name__ for f in LOOPS), *AT_DATA])
def test_graphs_that_break(function: Callable[[Any, Any], Any]) -> None:
    want = results(function)
    torch._dynamo.reset()
    torch.testing.assert_close(results(torch.compile(function, backend="aot_eager")), want)
    seen = {code() for code in torch._dynamo.convert_frame.input_codes.seen}
    assert dispatch.__code__ not in seen and DTensor.redistribute.__code__ not in seen


def test_where_no_break_is_allowed_the_error_says_what_to_do() -> None:
    with pytest.raises(Exception, match=r"aten\.index in a compiled function: how many elements it selects depends on data"):
        torch.compile(AT_DATA["mask"], backend="aot_eager", fullgraph=True)(*inputs())


@pytest.mark.parametrize("one", [Replicate(), Shard(2), Partial()], ids=str)
@pytest.mark.parametrize("other", [Replicate(), Shard(1), Shard(2)], ids=str)
def test_views_of_local_tensors_that_only_copies_give(one: Placement, other: Placement) -> None:
    """The strides of a sum are those of its first argument, unless that had to be moved on the ranks."""

    def function(y: Any, h: Any) -> Any:
        return (y.transpose(1, 2) + h).transpose(1, 2).view(6, 8).sin()

    torch._dynamo.reset()
    y = sw.distribute_tensor(torch.randn(2, 3, 8), MESH, [one]).requires_grad_()
    h = sw.distribute_tensor(torch.randn(2, 8, 3), MESH, [other]).requires_grad_()
    want, got = function(y, h), torch.compile(function, backend="aot_eager", fullgraph=True)(y, h)
    torch.testing.assert_close(got.full_tensor(), want.full_tensor())
    for grad, wanted in zip(*(torch.autograd.grad(out.square().sum(), [y, h]) for out in (got, want)), strict=True):
        torch.testing.assert_close(grad.full_tensor(), wanted.full_tensor())
