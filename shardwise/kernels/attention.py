"""Attention of queries to a part of the keys, with its log-sum-exp, forward and backward, by the device's kernel for the dtype.

`joined` makes one result of those that `attend` gives for two parts of the keys. `attend_backward` takes the result and the
log-sum-exp for all keys, and gives the part of the gradients that comes from the keys at hand. Reads and gives ordinary tensors
of one rank; knows nothing of meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
#: Kernels for CUDA take rows whose length is a multiple of this, and log-sum-exps by as many; the quickest, rows up to this.
_ROW, _LOGARITHMS, _WIDEST = 8, 32, 256


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients are added up.

    >>> accumulated(torch.bfloat16), accumulated(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


class Way(NamedTuple):
    """How to attend: each query to the keys up to its own number only, and what scores are multiplied by."""

    is_causal: bool
    scale: float


def attend(query: Tensor, key: Tensor, value: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys, and the log-sum-exp of their scores. Groups of query heads may share a head of keys.

    >>> x = torch.ones(1, 2, 3, 4)
    >>> [tuple(part.shape) for part in attend(x, x, x, Way(True, 0.5))]
    [(1, 2, 3, 4), (1, 2, 3)]
    """
    given = _laid_out(query, key, value)
    out, lse = _kernels(given[0])[0](*given, **way._asdict())[:2]
    out, lse = out[..., : value.shape[-1]], lse[..., : query.shape[-2]]
    lse = lse.reshape(query.shape[:-1]).to(accumulated(query.dtype))
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse.contiguous()


def attend_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, way: Way
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values (`inputs`) that come from these keys; `out` and `lse` are those of all keys."""
    query, key, value = inputs
    given = _laid_out(*inputs)
    width = given[2].shape[-1]
    grad, out = (_padded(_four(x), width) for x in (grad, out))
    found = _kernels(given[0])[1](grad, *given, out, _four(lse[..., None])[..., 0], **way._asdict())
    dtype = accumulated(query.dtype)
    dq, dk, dv = (x[..., : like.shape[-1]].to(dtype) for x, like in zip(found, inputs, strict=False))
    return dq.reshape(query.shape), _by_group(dk, key), _by_group(dv, value)


def joined(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys together, from that to each.

    >>> joined(torch.zeros(1, 2), torch.tensor([-torch.inf]), torch.ones(1, 2), torch.tensor([3.0]))
    (tensor([[1., 1.]]), tensor([3.]))
    """
    share = torch.sigmoid(more_lse - lse)[..., None]
    return torch.lerp(out, more.to(out.dtype), share), torch.logaddexp(lse, more_lse)


# ── what kernels take ─────────────────────────────────────────────────────────────────────────────────────────────────


def _laid_out(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Four dims each, as many heads of keys as of queries, and rows of one length that the kernels take: zeros behind the
    elements of a row change no score, and give zeros."""
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cuda":
        width = -(-width // _ROW) * _ROW
    query, key, value = _four(query), _four(key), _four(value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return [_padded(x, width) for x in (query, key, value)]


def _four(x: Tensor) -> Tensor:
    shape = (1, 1, *x.shape) if x.ndim < 4 else x.shape
    return x.reshape(math.prod(shape[:-3]), *shape[-3:]).contiguous()


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _by_group(grad: Tensor, like: Tensor) -> Tensor:
    """The sum over the query heads that share a head."""
    heads = like.shape[-3] if like.ndim > 2 else 1
    return (grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)).reshape(like.shape)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


_cpu = aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = partial(aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0)
_flash = aten._scaled_dot_product_flash_attention
_efficient = partial(aten._scaled_dot_product_efficient_attention, attn_bias=None, compute_log_sumexp=True)


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, *rest: Tensor, **words: Any) -> Sequence[Tensor]:
    seed, offset = (grad.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))  # where random numbers would start
    lengths = {"cum_seq_q": None, "cum_seq_k": None, "max_q": query.shape[2], "max_k": key.shape[2]}
    drawn = {"dropout_p": 0.0, "philox_seed": seed, "philox_offset": offset}
    return aten._scaled_dot_product_flash_attention_backward(grad, query, key, *rest, **lengths, **drawn, **words)


def _efficient_backward(*given: Tensor, **words: Any) -> Sequence[Tensor]:
    *tensors, out, lse = given
    lse = F.pad(lse, (0, -lse.shape[-1] % _LOGARITHMS), value=torch.inf)
    drawn = (torch.zeros((), dtype=torch.int64, device=lse.device) for _ in range(2))
    wanted = (0.0, [True, True, True, False])
    return aten._scaled_dot_product_efficient_attention_backward(*tensors, None, out, lse, *drawn, *wanted, **words)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if is_causal else scores


def _plain(*given: Tensor, is_causal: bool, scale: float) -> Sequence[Tensor]:
    query, key, value = (x.to(accumulated(x.dtype)) for x in given)
    scores = _scores(query, key, is_causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value, lse


def _plain_backward(*given: Tensor, is_causal: bool, scale: float) -> Sequence[Tensor]:
    grad, query, key, value, out, lse = (x.to(accumulated(x.dtype)) for x in given)
    weights = (_scores(query, key, is_causal, scale) - lse[..., None]).exp()
    change = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return change @ key, change.mT @ query, weights.mT @ grad


_HALVES = (torch.bfloat16, torch.float16)
#: Before 2.13 torch tells tracers that the logarithms of float64 are float32, and Inductor reads them as such: garbage.
_ON_CPU = (*_HALVES, torch.float32, *((torch.float64,) if torch.__version__ >= "2.13" else ()))


def _kernels(query: Tensor) -> tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]]:
    kind, dtype = query.device.type, query.dtype
    if kind == "cpu" and dtype in _ON_CPU:
        return _cpu, _cpu_backward
    if kind != "cuda" or dtype not in (*_HALVES, torch.float32):
        return _plain, _plain_backward
    is_quick = dtype in _HALVES and query.shape[-1] <= _WIDEST and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return (_flash, _flash_backward) if is_quick else (_efficient, _efficient_backward)
