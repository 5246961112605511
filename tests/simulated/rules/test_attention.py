"""The attention operators of CUDA, on tensors without data: every rank's results have the shapes of their layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import Bundle, DTensor, Layout, Replicate, Shard
from shardwise.propagation.table import TABLE
from tests.samples.attention import ON_CUDA

MESH = sw.init_mesh(a=2, b=2)
R = Replicate()
aten = torch.ops.aten

NAMES = [f"_scaled_dot_product_{name}{end}" for name in ON_CUDA for end in ("", "_backward")]


def without_data(shape: tuple[int, ...], placements: Any, dtype: torch.dtype = torch.float16) -> DTensor:
    layout = sw.layout(shape, MESH, placements, dtype)
    shards = Bundle(torch.empty(layout.local_shape(place), dtype=dtype, device="meta") for place in range(4))
    return DTensor.from_local(shards, MESH, layout, run_check=False)


def inputs(heads: int, groups: int, cuts: list[Any]) -> tuple[DTensor, DTensor, DTensor]:
    key = without_data((3, groups, 7, 8), cuts)
    return without_data((3, heads, 5, 8), cuts), key, key


def bias_for(query: DTensor) -> DTensor:
    return without_data((3, query.shape[1], 5, 7), query.layout.placements)


def forward(name: str, query: DTensor, key: DTensor, value: DTensor) -> Any:
    if name == "flash_attention":
        return aten._scaled_dot_product_flash_attention(query, key, value)
    if name == "fused_attention_overrideable":
        return aten._scaled_dot_product_fused_attention_overrideable(query, key, value)
    return getattr(aten, f"_scaled_dot_product_{name}")(query, key, value, bias_for(query), True)


def backward(name: str, given: tuple[DTensor, ...], outs: Any) -> Any:
    grad, out, lse = outs[0], outs[0], outs[1]
    if name == "flash_attention":
        return aten._scaled_dot_product_flash_attention_backward(
            *(grad, *given, out, lse, None, None, 5, 7, 0.0, False, outs[6], outs[7])
        )
    bias = bias_for(given[0])
    if name == "efficient_attention":
        return aten._scaled_dot_product_efficient_attention_backward(
            *(grad, *given, bias, out, lse, outs[2], outs[3], 0.0, [True] * 4)
        )
    if name == "cudnn_attention":
        return aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, *given, out, lse, outs[6], outs[7], bias, None, None, 5, 7, 0.0, False)
        )
    return aten._scaled_dot_product_fused_attention_overrideable_backward(
        *(grad, *given, bias, [True] * 4, out, lse, None, None, 5, 7, 0.0, False, outs[6], outs[7])
    )


def gradients(name: str, given: tuple[DTensor, ...], outs: Any) -> Any:
    try:
        return backward(name, given, outs)
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__} does not tell the shapes of this operator's results")


def fits(x: Any) -> None:
    if isinstance(x, Tensor):
        layout: Layout = x.layout
        assert [tuple(p.shape) for p in x.to_local().shards] == [layout.local_shape(place) for place in range(4)], repr(x)


@pytest.mark.parametrize("name", NAMES)
def test_sentence_names_every_tensor_of_the_schema(name: str) -> None:
    rule, schema = TABLE[f"aten.{name}"], getattr(aten, name).default._schema
    assert len(rule.inputs) == sum("Tensor" in str(argument.type) for argument in schema.arguments)
    results = [r.name for r in schema.returns if "Tensor" in str(r.type) and not r.name.startswith("cum_seq")]
    assert len(rule.outputs) == len(results)


@pytest.mark.parametrize(("name", "heads"), [*((name, (3, 3)) for name in ON_CUDA), ("flash_attention", (8, 4))], ids=str)
@pytest.mark.parametrize("cuts", [[R, R], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)]], ids=str)
def test_results_have_the_shapes_of_their_layouts(name: str, heads: tuple[int, int], cuts: list[Any]) -> None:
    given = inputs(*heads, cuts)
    with sw.trace_comm() as log:
        outs = forward(name, *given)
        for out in outs:
            fits(out)
        assert outs[0].layout.dims[:2] == given[0].layout.dims[:2]
        for x, grad in zip(given, gradients(name, given, outs), strict=False):
            fits(grad)
            assert grad.shape == x.shape and grad.layout.dims == x.layout.dims
    assert log.records == []


@pytest.mark.parametrize("name", ON_CUDA)
def test_queries_are_gathered(name: str) -> None:
    outs = forward(name, *inputs(3, 3, [Shard(2), R]))
    assert not outs[0].layout.axes_of(2)
