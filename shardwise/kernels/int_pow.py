"""`int_pow`: integers to integer powers, exact modulo two to the width of their type, as operators that trace and compile.

A power that is a number is a chain of few multiplications; powers that differ from element to element are found bit by bit. On
a GPU this is done by a Triton kernel, one pass over memory; on the host in blocks that stay in the cache, or by torch's own
loop where that takes no longer: it is exact as well.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import SymBool, SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from .._torch.compiler import constant_result, is_decomposing
from ..base.argument_checks import integer
from ..errors import ArgumentError, OperatorError

#: Elements of a block for each thread of the host: torch gives a thread no fewer, and a few blocks fit into its cache.
BLOCK = 32768
#: Elements that torch's own loop takes no longer for than Python does for a block.
FEW = 4096
#: Powers below are taken apart into factors, others bit by bit.
SMALL = 128
#: Modulo two to the width there is no difference, and torch hardly computes with most unsigned types.
SIGNED = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
INTEGERS = frozenset((*SIGNED, *SIGNED.values()))
#: Those that compilers multiply.
FUSED = (torch.uint8, *SIGNED.values())


def int_pow(base: Tensor | int, exponent: Tensor | int) -> Tensor:
    """Integers to integer powers, exact modulo two to the width of their type, whatever the result.

    The type is that of `torch.pow`. A negative power in a tensor gives what is left of the fraction: 0, or 1 and -1 of
    themselves; a negative number is an error. In compiled programs the power may be a symbol.

    >>> int_pow(torch.tensor([3, -7]), 41)
    tensor([-420491770248316829, 6596974204628493241])
    >>> int_pow(torch.tensor([-1, 2, 3]), torch.tensor([-3, -1, 4]))
    tensor([-1,  0, 81])
    """
    _check_given(base, exponent)
    if isinstance(exponent, Tensor):
        number = not isinstance(base, Tensor)
        return power(base, exponent, _with_number(exponent)) if number else torch.ops.shardwise.int_pow.Tensor(base, exponent)
    if torch.compiler.is_compiling() and type(base) is Tensor and has_static_value(exponent):
        return _decomposed(base, exponent, _with_number(base))
    return torch.ops.shardwise.int_pow(base, exponent)


def _check_given(base: Any, exponent: Any) -> None:
    numbers = [(name, x) for name, x in (("base", base), ("exponent", exponent)) if not isinstance(x, Tensor)]
    for name, x in numbers:
        integer(x, f"int_pow: {name}", -(2**63), 2**63 - 1)
    if len(numbers) == 2:
        raise ArgumentError("int_pow: base, exponent or both are tensors of integers, got two numbers; use base**exponent")


def power(base: Any, exponent: Any, dtype: torch.dtype) -> Tensor:
    """The same of numbers and symbols as well, for what traces operators; `dtype`: the type that the result has."""
    if not isinstance(base, Tensor):
        base, exponent = torch.full((), base, dtype=torch.int64, device=exponent.device).to(dtype), exponent.to(dtype)
    if isinstance(exponent, Tensor):
        return torch.ops.shardwise.int_pow.Tensor(base, exponent)
    if isinstance(exponent, SymBool):
        exponent = torch.sym_ite(exponent, 1, 0)
    if not isinstance(exponent, SymInt) and is_decomposing():
        return _decomposed(base, exponent, dtype)
    return torch.ops.shardwise.int_pow(base, exponent)


def pow_kernel(call: Any, wants: Any) -> Callable[..., Tensor] | None:
    """What computes `pow` on each rank where its result is of integers: operators that every compiler takes."""
    dtype = call.results[0].dtype
    return functools.partial(power, dtype=dtype) if dtype in INTEGERS else None


def of_truths(call: Any) -> bool:
    """Whether a truth value that is a number takes part with tensors of truth values: the result has this type too, though
    torch's operators on tensors without data say otherwise."""
    given = any(isinstance(x, bool | SymBool) for x in call.arguments.values())
    return given and all(x.dtype == torch.bool for x in call.tensors)


def truths(tools: Any, op: Any, base: Any, exponent: Any) -> Tensor:
    """Truth values to the power of one: themselves or true, as on one device."""
    if not isinstance(base, Tensor):
        raise NotImplementedError(f"{base} to the power of truth values: torch has no such power; take integers")
    return base.clone() if exponent else torch.ones_like(base)


# ── the type and the shape of a result ────────────────────────────────────────────────────────────────────────────────


def _with_number(x: Tensor) -> torch.dtype:
    """The type of a tensor and an integer together."""
    return torch.int64 if x.dtype == torch.bool else x.dtype


def _checked(dtype: torch.dtype, base: Tensor, exponent: Any) -> torch.dtype:
    if dtype not in INTEGERS:
        other = exponent.dtype if isinstance(exponent, Tensor) else "an integer"
        raise OperatorError(
            f"int_pow takes integers to integer powers, and got {base.dtype} to the power of {other}; torch.pow computes "
            "with other numbers, and has gradients"
        )
    return dtype


def _scalar_fake(base: Tensor, exponent: Any) -> Tensor:
    return torch.empty_like(base, dtype=_checked(_with_number(base), base, exponent))


def _tensor_fake(base: Tensor, exponent: Tensor) -> Tensor:
    _checked(torch.result_type(base, exponent), base, exponent)
    return torch.mul(base, exponent)  # of the same type and strides


def _like(base: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a result, laid out as operators of torch do."""
    if base.is_contiguous() and exponent.is_contiguous():
        return torch.empty(torch.broadcast_shapes(base.shape, exponent.shape), dtype=dtype, device=base.device)
    made = (torch.empty_strided(x.shape, x.stride(), dtype=torch.int8, device="meta") for x in (base, exponent))
    like = torch.mul(*made)
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=base.device)


def _flat(x: Tensor, out: Tensor) -> Tensor:
    """The elements of a tensor in the order that those of the result have in memory."""
    if x.numel() == 1:
        return x.reshape(1).expand(out.numel())
    if x.shape != out.shape or x.stride() != out.stride():
        x = torch.empty_like(out).copy_(x)
    return _line(x)


def _line(x: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of memory."""
    return x.as_strided((x.numel(),), (1,))


# ── a power that is a number ──────────────────────────────────────────────────────────────────────────────────────────


@constant_result
def reduced(exponent: int, dtype: torch.dtype) -> int:
    """The least exponent with the same powers modulo two to the width of a type: an even number is 0 from its width on, and the
    powers of an odd one repeat after a quarter as many as there are numbers of the type.

    >>> reduced(15, torch.int64), reduced(2**40 + 3, torch.int8)
    (15, 67)
    """
    if exponent < 0:
        raise OperatorError(
            f"Integers to negative integer powers are not allowed: got the power {exponent}; give it in a tensor for what is "
            "left of the fraction (0, 1 or -1), or take floats"
        )
    width = 8 * dtype.itemsize
    return int(exponent) if exponent < width else width + (int(exponent) - width) % 2 ** (width - 2)


def _decomposed(base: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """A constant power for a compiler, which makes multiplications of it and fuses them. (Multiplications in the graph it would
    take apart again and again: a square has its factor twice.)"""
    if dtype not in FUSED:
        return torch.ops.shardwise.int_pow(base, exponent)
    return torch.pow(base.to(dtype), reduced(exponent, dtype))


def raised(x: Tensor, exponent: int, out: Tensor | None = None) -> Tensor:
    """A power from the second on, by the factor method: hardly ever more than one multiplication above the fewest."""
    if exponent == 2:
        return torch.mul(x, x, out=out)
    factor = next((prime for prime in ((2, 3, 5, 7) if exponent < SMALL else (2,)) if not exponent % prime), exponent)
    if factor not in (2, exponent):
        return raised(raised(x, exponent // factor), factor, out)
    last = raised(x, exponent - 1 if factor == exponent else exponent // 2)
    return torch.mul(last, x if factor == exponent else last, out=last if out is None else out)


def _raise_block(x: Tensor, out: Tensor, exponent: int) -> None:
    if exponent > 1:
        raised(x, exponent, out)
    else:
        out.copy_(x) if exponent else out.fill_(1)


def _in_blocks(kernel: Callable[..., None], out: Tensor, *given: Tensor) -> None:
    size, flat = BLOCK * torch.get_num_threads(), [*(_flat(x, out) for x in given), _line(out)]
    for start in range(0, out.numel(), size):
        kernel(*(x[start : start + size] for x in flat))


def _quick(out: Tensor) -> bool:
    """Whether torch's own loop is the quickest: for a product of 64 bits its vectors take as long as four of its numbers."""
    return out.device.type != "cpu" or out.dtype.itemsize == 8 or out.numel() < FEW


def _scalar_now(base: Tensor, exponent: int) -> Tensor:
    dtype = _checked(_with_number(base), base, exponent)
    if dtype in SIGNED:
        return _scalar_now(base.view(SIGNED[dtype]), exponent).view(dtype)
    exponent, base = reduced(exponent, dtype), base.to(dtype)
    out = torch.empty_like(base)
    kernels = triton_kernels() if out.is_cuda else None
    if kernels is not None and exponent > 1:
        kernels.power(_flat(base, out), exponent, _line(out))
    elif exponent != 2 and _quick(out):
        torch.pow(base, exponent, out=out)
    else:
        _in_blocks(functools.partial(_raise_block, exponent=exponent), out, base)
    return out


# ── powers that differ from element to element ────────────────────────────────────────────────────────────────────────


def _tensor_now(base: Tensor, exponent: Tensor) -> Tensor:
    dtype = _checked(torch.result_type(base, exponent), base, exponent)
    if dtype in SIGNED:
        base, exponent = (x.to(dtype).view(SIGNED[dtype]) for x in (base, exponent))
        return _tensor_now(base, _positive(exponent)).view(dtype)
    out = _like(base, exponent, dtype)
    base, exponent = base.to(dtype), exponent.to(dtype)
    kernels = triton_kernels() if out.is_cuda else None
    if kernels is not None:
        kernels.powers(_flat(base, out), _flat(exponent, out), _line(out))
    elif _quick(out):
        torch.pow(base, exponent, out=out)
    else:
        _in_blocks(_raise_by_bits, out, base, exponent)
    return out


def _positive(exponent: Tensor) -> Tensor:
    """Unsigned powers, seen as signed, without those that then are negative: others that give the same (see `reduced`)."""
    quarter = 2 ** (8 * exponent.dtype.itemsize - 2)
    return torch.where(exponent < 0, (exponent & (quarter - 1)) | quarter, exponent)


def _raise_by_bits(base: Tensor, exponent: Tensor, out: Tensor) -> None:
    """Powers of a block, from the lowest bits on. Without a choice by elements, for which torch branches at each: a factor is
    1 and, where the bit is set, what the square is more."""
    least, most = (int(bound) for bound in torch.aminmax(exponent))
    if least == most >= 0:
        return _raise_block(base, out, reduced(most, out.dtype))
    square, factor, last = base.clone(), torch.empty_like(out), 8 * out.dtype.itemsize - 1
    out.fill_(1)
    for bit in range(max(most, 1).bit_length()):
        if bit:
            square.mul_(square)
        torch.bitwise_left_shift(exponent, last - bit, out=factor).bitwise_right_shift_(last)  # all bits are this one
        out.mul_(factor.bitwise_and_(square - 1).add_(1))
    if least < 0:  # 1 and -1 are right by their lowest bit, other numbers have no whole part
        out.mul_((base.abs() == 1).logical_or_(exponent >= 0))


# ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def triton_kernels() -> Any:
    """The kernels for GPUs, if Triton is here; it takes seconds to import."""
    module = importlib.import_module(".int_pow_triton", __package__)
    return module if module.AVAILABLE else None


def _tensor_batched(info: Any, dims: Any, base: Tensor, exponent: Tensor) -> tuple[Tensor, int]:
    pairs = ((base, dims[0]), (exponent, dims[1]))
    dtype = torch.result_type(*(x if dim is None else x.select(dim, 0) for x, dim in pairs))
    rank = 1 + max(x.ndim - (dim is not None) for x, dim in pairs)
    whole = (x[None] if dim is None else x.movedim(dim, 0) for x, dim in pairs)
    return int_pow(*(x.to(dtype)[(slice(None), *[None] * (rank - x.ndim))] for x in whole)), 0


torch.library.define("shardwise::int_pow", "(Tensor base, SymInt exponent) -> Tensor")
torch.library.define("shardwise::int_pow.Tensor", "(Tensor base, Tensor exponent) -> Tensor")
torch.library.register_vmap("shardwise::int_pow", lambda info, dims, base, exponent: (int_pow(base, exponent), dims[0]))
torch.library.register_vmap("shardwise::int_pow.Tensor", _tensor_batched)
for _name, _now, _fake in (("int_pow", _scalar_now, _scalar_fake), ("int_pow.Tensor", _tensor_now, _tensor_fake)):
    torch.library.impl(f"shardwise::{_name}", "CompositeExplicitAutograd", _now)
    torch.library.register_fake(f"shardwise::{_name}", _fake)
