"""Encodings of tensors for collectives, since backends know few dtypes and lose NaN.

Reads a tensor or a dtype, gives another that every backend takes, and the way back. Knows nothing of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, dtype

from ..errors import OperatorError

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
#: Dtypes that Gloo and NCCL both move and sum as they are.
NATIVE = _FLOATS | _INTS
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


# ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def packed(x: Tensor) -> Tensor:
    """`x`, contiguous, as bytes that every backend moves; dim 0 stays dim 0, and nothing is copied that need not be.

    >>> packed(torch.tensor([True, False]))
    tensor([1, 0], dtype=torch.uint8)
    """
    x = x.resolve_neg()
    if x.dtype in NATIVE:
        return x.contiguous()
    x = x.resolve_conj().contiguous()
    return torch.view_as_real(x) if x.element_size() > 8 else x.view(_CARRIERS[x.element_size()])


def unpacked(x: Tensor, kind: dtype) -> Tensor:
    """The way back from `packed`.

    >>> unpacked(torch.tensor([1, 0], dtype=torch.uint8), torch.bool)
    tensor([ True, False])
    """
    if kind in NATIVE:
        return x
    return torch.view_as_complex(x) if kind is torch.complex128 else x.view(kind)


# ── reducing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


#: How two partial values combine; the same operators as in the dense program, so NaN and overflow mean the same.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def combine(values: Sequence[Tensor], kind: str) -> Tensor:
    """The values reduced by `kind`, from the first to the last; may be the first itself if there is one only.

    >>> combine([torch.tensor(2), torch.tensor(5)], "max")
    tensor(5)
    """
    return reduce(_combiner(kind), values)


def combine_into(out: Tensor, values: Sequence[Tensor], kind: str) -> Tensor:
    """The same, written into a tensor of the same shape, which must be none of the values.

    >>> combine_into(torch.empty(()), [torch.tensor(2.0), torch.tensor(5.0)], "sum")
    tensor(7.)
    """
    combiner = _combiner(kind)
    out.copy_(values[0]) if len(values) == 1 else combiner(values[0], values[1], out=out)
    for value in values[2:]:
        combiner(out, value, out=out)
    return out


def _combiner(kind: str) -> Callable[..., Tensor]:
    if kind not in COMBINE:
        raise OperatorError(f"no collective reduces by {kind!r}; use one of {', '.join(COMBINE)}")
    return COMBINE[kind]


class Encoding(NamedTuple):
    """A reduction that every backend does: the tensor to give it, its kind, and the way back."""

    encode: Callable[[Tensor], Tensor]
    kind: str
    decode: Callable[[Tensor], Tensor]


#: Bools are reduced as the bytes 0 and 1; the sum of bools is their "or", as `torch.add` has it.
_BOOLS = {"sum": "max", "bor": "max", "max": "max", "product": "min", "band": "min", "min": "min", "bxor": "sum"}


@lru_cache(maxsize=256)
def encoding(kind: str, of: dtype) -> Encoding | None:
    """How tensors of dtype `of` are reduced by `kind`; None: no backend does, so gather them and reduce here.

    >>> encoding("sum", torch.bool).kind, encoding("bxor", torch.int64)
    ('max', None)
    """
    if of is torch.bool and kind in _BOOLS:
        return Encoding(lambda x: x.view(torch.uint8), _BOOLS[kind], lambda x: x.bitwise_and(1).view(torch.bool))
    if of in _FLOATS and kind in ("max", "min"):
        # Gloo and NCCL lose NaN in max and min; integers in the order of the numbers, with NaN outermost, do not.
        return Encoding(
            partial(_ordered, kind=kind),
            kind,
            lambda x: _turned(x).view(torch.float64 if x.dtype is torch.int64 else torch.float32).to(of),
        )
    if of in (torch.complex64, torch.complex128) and kind == "sum":
        return Encoding(lambda x: torch.view_as_real(x.resolve_conj()), "sum", torch.view_as_complex)
    if of is torch.int16 and kind in ("sum", "product", "max", "min"):
        return Encoding(lambda x: x.to(torch.int32), kind, lambda x: x.to(torch.int16))
    if of in NATIVE and kind in ("sum", "product", "max", "min"):
        return Encoding(lambda x: x, kind, lambda x: x)
    return None


def _ordered(x: Tensor, kind: str) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    bits = wide.view(torch.int64 if wide.dtype is torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    return torch.where(wide.isnan(), limits.max if kind == "max" else limits.min, _turned(bits))


def _turned(bits: Tensor) -> Tensor:
    """All bits but the sign inverted where it is set: from sign and magnitude to two's complement, and back."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
