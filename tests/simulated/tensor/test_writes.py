"""No write is lost: every operator that writes, to plain tensors and DTensors together, against one device."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, Partial
from shardwise.errors import OperatorError
from tests.helpers.writes import (
    KINDS,
    MADE,
    MESH,
    calls,
    compared,
    distributed,
    out_of_database,
    runs,
    several,
    with_out,
    writers,
)

aten = torch.ops.aten

#: Operators whose own `.out` does not write all that its schema says, or reduces what it wrote before.
WRONG_ON_ONE_DEVICE = (
    "_amp_foreach_non_finite_check_and_unscale.out",
    "_amp_update_scale.out",
    "_fused_adagrad.",
    "_fused_adam.",
    "_fused_adamw.",
    "_fused_moving_avg_obs_fq_helper.out",
    "_fused_sgd.",
    "binary_cross_entropy.out",
)
#: Writers of several tensors that nothing here calls: of other devices, of quantized or nested tensors, drawing random numbers,
#: internal, or made of operators that are compared.
NOT_CALLED = re.compile(
    "cudnn|miopen|mps|mkldnn|thnn|slow_conv2d|overrideable|quantize|nested|dropout|multi_head|transform_bias|linear_backward|"
    "matmul_backward|ctc_loss|embedding_bag_forward_only|batch_norm_stats|batch_norm_gather|batch_norm_backward_reduce|"
    "cummax_helper|cummin_helper|linalg_|slogdet|qr|svd|fused_moving_avg_obs_fake_quant|weight_norm_interface_backward|"
    "_aminmax.dim|rrelu_with_noise|native_layer_norm_backward|histogram.bin_ct|no_stats|_foreach_powsum"
)


def _check(ops: list[Any], **words: Any) -> set[Any]:
    texts, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls(ops, **words):
            if torch.Tag.nondeterministic_seeded in call.op.tags or any(name in str(call.op) for name in WRONG_ON_ONE_DEVICE):
                continue
            for read, kind in itertools.product((0, None), KINDS) if runs(call) else ():
                text = compared(call, read, kind)
                texts += [f"{call}, read {read}, written {kind}: {text}"] if text is not None else []
            seen.add(call.op)
    assert not texts, "\n".join(texts)
    return seen


def test_operators_that_write_to_several_tensors() -> None:
    lists = (
        "add_.List",
        "add_.Scalar",
        "addcmul_.Tensor",
        "mul.List_out",
        "lerp_.ScalarList",
        "norm.Scalar_out",
        "zero_.default",
    )
    names = [f"aten._foreach_{name}" for name in lists]
    ops = [op for op in writers() if several(op) and (op._schema.name[6:].rstrip("_") in MADE or str(op) in names)]
    assert len(_check(ops, names=lambda name: False)) > 20


@pytest.mark.slow
def test_every_operator_that_writes() -> None:
    every = writers()
    seen = _check(every)
    left = [str(op) for op in every if several(op) and op not in seen]
    assert not [op for op in left if not NOT_CALLED.search(op) and not any(name in op for name in WRONG_ON_ONE_DEVICE)]
    assert len(seen) > 700


SAMPLE = (
    *("add", "sort", "msort", "topk", "cummax", "frexp", "aminmax", "max.reduction_with_dim", "kron", "lu", "histogram"),
    *("split_with_sizes_copy", "native_batch_norm", "nn.functional.logsigmoid", "linalg.inv", "linalg.slogdet"),
    *("linalg.lu_factor", "linalg.ldl_factor", "linalg.solve", "linalg.svdvals", "linalg.matrix_rank"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_out(name: str) -> None:
    assert not out_of_database(name, 1)


@pytest.mark.slow
def test_every_out() -> None:
    texts = [text for name in with_out() for text in out_of_database(name, 3)]
    assert not texts, "\n".join(texts)


def test_one_of_two_running_buffers_is_plain() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5)
    for function in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm):
        want = [torch.zeros(3), torch.ones(3)]
        training = {"training": True} if function is torch.nn.functional.batch_norm else {"use_input_stats": True}
        function(x, *want, momentum=0.5, **training)
        for first in (0, 1):
            got: list[Any] = [torch.zeros(3), torch.ones(3)]
            got[first] = distributed(got[first], 0)
            function(distributed(x, 0), *got, momentum=0.5, **training)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one.full_tensor() if isinstance(one, DTensor) else one, other)


@pytest.mark.parametrize("out", [torch.zeros(0), distributed(torch.zeros(0), None)], ids=["plain", "DTensor"])
def test_an_out_without_elements_takes_the_shape_of_the_result(out: Any) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    result = torch.mm(distributed(x, 0), x.T, out=out)
    assert result is out and out.shape == (4, 4)
    torch.testing.assert_close(out.full_tensor() if isinstance(out, DTensor) else out, x @ x.T)
    assert float((out + 1).sum()) == float((x @ x.T + 1).sum())


REFUSED: dict[str, tuple[Any, str]] = {
    "dtype": (lambda x: torch.add(x, 1, out=x.to(torch.int64)), "can't be cast|cannot be cast"),
    "dtype of a plain tensor": (lambda x: torch.add(x, 1, out=torch.zeros(4, 3, dtype=torch.int64)), "can't be cast"),
    "dtype of indices": (lambda x: torch.topk(x, 2, out=(x[:, :2].clone(), torch.zeros(4, 2))), "(?i)index|long|int64"),
    "dtype in place": (lambda x: torch.zeros(4, 3, dtype=torch.int64).add_(x), "can't be cast|cannot be cast"),
    "shape": (lambda x: torch.add(x, 1, out=distributed(torch.zeros(2), 0)), "would resize .* from .2. to .4, 3."),
    "shape in place": (lambda x: torch.zeros(3).add_(x), "would resize|doesn't match"),
    "a view that data moved for": (lambda x: torch.add(torch.zeros(3, 4), 1, out=x.view(3, 4)), "would not reach the tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=text):
        call(distributed(torch.arange(12.0).reshape(4, 3), 0))


def test_nothing_is_written_where_one_of_several_is_refused() -> None:
    x = distributed(torch.arange(12.0).reshape(4, 3), 0)
    values = distributed(torch.zeros(4, 3), 0)
    with pytest.raises(RuntimeError):
        torch.sort(x, out=(values, distributed(torch.zeros(5, dtype=torch.int64), 0)))
    assert not values.any().item()


def test_set_shares_another_dtensor_and_refuses_plain_memory() -> None:
    x, y = distributed(torch.zeros(4), 0), distributed(torch.ones(2, 2), 1)
    x.set_(y)
    y.mul_(3)
    assert x.shape == (2, 2) and x.sum().item() == 12
    for call in (
        lambda: torch.zeros(4).set_(y),
        lambda: x.set_(torch.zeros(4)),
        lambda: x.set_(torch.zeros(4).untyped_storage()),
    ):
        with pytest.raises(OperatorError, match="share memory"):
            call()


def test_unscaling_reduces_partial_gradients_first() -> None:
    whole = torch.tensor([1.0, 3.0])
    grad = sw.DTensor.from_local(sw.Bundle([torch.tensor([torch.inf, 2.0]), torch.tensor([1.0, 1.0])]), MESH, [Partial()])
    fine = distributed(whole, 0)
    found = torch.zeros(1)
    aten._amp_foreach_non_finite_check_and_unscale_([fine], found, torch.tensor([0.5]))
    assert found.item() == 0 and fine.tolist() == [0.5, 1.5]
    aten._amp_foreach_non_finite_check_and_unscale_([fine, torch.ones(2), grad], found, torch.tensor([0.5]))
    assert found.item() == 1 and grad.tolist()[1] == 1.5 and fine.tolist() == [0.25, 0.75]
