"""`grouped_mm` of plain tensors: every form, size and stride, groups without rows, gradients; eager and traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw

ENDS = (2, 2, 5, 9)
#: The shapes of the factors: nothing, or not everything, begins at a multiple of 16 bytes.
FORMS = {
    "rows": ((9, 3), (4, 3, 5)),
    "columns": ((4, 5, 3), (3, 9)),
    "sums": ((5, 9), (9, 3)),
    "batch": ((4, 5, 3), (4, 3, 7)),
    "wide": ((9, 16), (4, 16, 24)),
}


def by_group(x: Tensor, w: Tensor, ends: Sequence[int]) -> Tensor:
    """The products one by one."""
    runs = [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]
    if x.ndim == w.ndim == 3:
        return x @ w
    if x.ndim == 3:
        return torch.cat([x[i] @ w[:, run] for i, run in enumerate(runs)], 1)
    if w.ndim == 3:
        return torch.cat([x[run] @ w[i] for i, run in enumerate(runs)])
    return torch.stack([x[:, run] @ w[run] for run in runs])


def made(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, turned: bool = False) -> list[Tensor]:
    """Factors; `turned`, in memory that lies by columns."""
    make = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=make).to(dtype) for shape in shapes]
    return [x.mT.contiguous().mT.requires_grad_() if turned else x.requires_grad_() for x in found]


def compare(function: Callable[..., Tensor], name: str, dtype: torch.dtype, turned: bool = False) -> None:
    x, w = made(FORMS[name], dtype, turned)
    a, b = (t.detach().float().requires_grad_() for t in (x, w))
    ends = None if name == "batch" else torch.tensor(ENDS, dtype=torch.int32)
    got, want = function(x, w, offs=ends), by_group(a, b, ENDS)
    assert got.dtype == dtype
    near = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(got.float(), want, atol=near, rtol=near)
    pairs = zip(torch.autograd.grad(got.sin().sum(), (x, w)), torch.autograd.grad(want.sin().sum(), (a, b)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.float(), other, atol=3 * near, rtol=3 * near)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_as_one_by_one(name: str, dtype: torch.dtype, turned: bool) -> None:
    compare(sw.grouped_mm, name, dtype, turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_traced(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compare(torch.compile(sw.grouped_mm, backend="aot_eager", fullgraph=True, dynamic=True), name, dtype)


def test_registered_as_torch_wants_operators() -> None:
    for shapes in FORMS.values():
        ends = None if shapes[0][0] == shapes[1][0] == 4 else torch.tensor(ENDS, dtype=torch.int32)
        torch.library.opcheck(torch.ops.shardwise.grouped_mm, (*made(shapes, torch.float32), ends))


def test_no_groups_and_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert sw.grouped_mm(torch.ones(0, 3), torch.ones(0, 3, 5), offs=none).shape == (0, 5)
    x, w = torch.ones(0, 3, requires_grad=True), torch.ones(2, 3, 5, requires_grad=True)
    sw.grouped_mm(x, w, offs=torch.zeros(2, dtype=torch.int32)).sum().backward()
    assert w.grad is not None and w.grad.eq(0).all()


def test_gradients_of_gradients() -> None:
    """Of what is linear in each factor, by those of products one by one."""
    found = []
    for function in (lambda x, w: sw.grouped_mm(x, w, offs=torch.tensor(ENDS, dtype=torch.int32)), by_group):
        x, w = made(FORMS["rows"], torch.float32)
        out: Any = function(x, w) if function is not by_group else by_group(x, w, ENDS)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, w)))
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-4)


def test_what_torch_takes_is_left_to_torch() -> None:
    """bfloat16 of aligned sizes: compilers have a kernel for torch's operator."""
    seen = list[str]()

    def backend(gm: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    x, w = made(FORMS["wide"], torch.bfloat16)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    torch._dynamo.reset()
    torch.compile(sw.grouped_mm, backend=backend, fullgraph=True)(x, w, offs=ends)
    assert "_grouped_mm" in seen[-1] and not any("shardwise" in name for name in seen)
    assert torch.equal(sw.grouped_mm(x, w, offs=ends), F.grouped_mm(x, w, offs=ends))
