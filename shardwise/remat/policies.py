"""`sw.save`: policies of rematerialisation, which say what a block saves for its backward and what it recomputes.

A policy is a value: it prints as the expression that makes it, policies that print alike are equal, and neither depends on the
process, so that one can be part of a key. Policies combine: `a | b` saves what either saves, `a & b` what both save, `~a` what
`a` does not. `must_*` outranks the rest; on a tie `a | b` saves and `a & b` recomputes.

>>> (matmuls | collectives) & up_to(64 * 2**20)
(save.matmuls | save.collectives) & save.up_to(67108864)
>>> matmuls.choose(Made("aten.mm.default")), (~matmuls).choose(Made("aten.mm.default")), matmuls == ~~matmuls
(<Choice.SAVE: 1>, <Choice.RECOMPUTE: -1>, False)
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any

from .._torch.compiler import OpaqueBaseMeta, constant_type
from ..base.argument_checks import a_text, integer, shown
from ..errors import RematError

__all__ = [
    "Choice",
    "Made",
    "Policy",
    "attention",
    "by",
    "collectives",
    "custom",
    "default",
    "everything",
    "matmuls",
    "nothing",
    "operators",
    "random",
    "regions",
    "up_to",
]


class Choice(enum.Enum):
    """What becomes of a result. Without MUST, a compiler may decide otherwise."""

    MUST_RECOMPUTE = -2
    RECOMPUTE = -1
    SAVE = 1
    MUST_SAVE = 2

    @property
    def saves(self) -> bool:
        """Whether the result is saved."""
        return self.value > 0


@dataclass(frozen=True, slots=True)
class Made:
    """The call that a policy decides on: its operator, the region that makes it, which call of this operator in the region it
    is, the bytes of its results on the rank that holds most of them, and whether it draws random numbers."""

    operator: str
    region: str = ""
    number: int = 0
    bytes: int = 0
    random: bool = False


class Policy(metaclass=OpaqueBaseMeta):
    """Which results are saved; combine policies with `|`, `&` and `~`. In traced programs policies are constants."""

    __slots__ = ()
    #: Whether the choice depends on nothing but the operator, so that it can be remembered.
    by_operator = True

    def __init_subclass__(cls) -> None:
        constant_type(cls)

    def choose(self, made: Made, op: Any = None, args: Sequence[Any] = ()) -> Choice:
        """What becomes of the results of a call."""
        raise RematError(f"{type(self).__name__} does not say what it keeps; give it a method `choose`")

    def __or__(self, other: Policy) -> Policy:
        return _Combined("|", self, checked(other))

    def __and__(self, other: Policy) -> Policy:
        return _Combined("&", self, checked(other))

    def __invert__(self) -> Policy:
        return _Inverse(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest(), "big")

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return repr(self), {}


def checked(policy: object, name: str = "") -> Policy:
    """A policy, and nothing else."""
    if not isinstance(policy, Policy):
        text = "is no policy: give one of `sw.save`, such as sw.save.matmuls, or make one of a function by `sw.save.by`"
        raise RematError(f"{name}{shown(policy)} {text}")
    return policy


class _Combined(Policy):
    __slots__ = ("by_operator", "left", "right", "sign")

    def __init__(self, sign: str, left: Policy, right: Policy) -> None:
        self.sign, self.left, self.right = sign, left, right
        self.by_operator = left.by_operator and right.by_operator

    def choose(self, made: Made, op: Any = None, args: Sequence[Any] = ()) -> Choice:
        one, other = self.left.choose(made, op, args), self.right.choose(made, op, args)
        if abs(one.value) != abs(other.value):
            return max(one, other, key=lambda choice: abs(choice.value))
        return (max if self.sign == "|" else min)(one, other, key=lambda choice: choice.value)

    def __repr__(self) -> str:
        return f" {self.sign} ".join(
            f"({side!r})" if isinstance(side, _Combined) and side.sign != self.sign else repr(side)
            for side in (self.left, self.right)
        )


class _Inverse(Policy):
    __slots__ = ("by_operator", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy, self.by_operator = policy, policy.by_operator

    def choose(self, made: Made, op: Any = None, args: Sequence[Any] = ()) -> Choice:
        return Choice(-self.policy.choose(made, op, args).value)

    def __repr__(self) -> str:
        return f"~({self.policy!r})" if isinstance(self.policy, _Combined) else f"~{self.policy!r}"


# ── by operator ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Test(Policy):
    """Saves the results of the calls that pass a test; `name` is its own in this module, or that of what makes it of `args`."""

    __slots__ = ("args", "by_operator", "name", "test")

    def __init__(self, name: str, test: Callable[[Made], bool], args: Any = None, by_operator: bool = True) -> None:
        self.name, self.test, self.args, self.by_operator = name, test, args, by_operator

    def choose(self, made: Made, op: Any = None, args: Sequence[Any] = ()) -> Choice:
        return Choice.SAVE if self.test(made) else Choice.RECOMPUTE

    def __repr__(self) -> str:
        return f"save.{self.name}" if self.args is None else f"save.{self.name}({', '.join(map(repr, self.args))})"

    def __reduce__(self) -> Any:
        return self.name if self.args is None else (globals()[self.name], self.args)


_MATMULS = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot", "einsum"),
        *("_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "mkldnn_linear"),
    )
) | {"shardwise.grouped_mm"}
_COLLECTIVES = frozenset(("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d"))
#: Moves of a DTensor between layouts: in eager programs, and the operators of traced ones.
_MOVES = frozenset(
    f"shardwise.{name}"
    for name in ("move", "exchange", "messages", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
)
_OWN = frozenset(("aten", "prim", "prims", "inductor", "shardwise", "higher_order", "rngprims", "quantized", *_COLLECTIVES))


def _base(operator: str) -> str:
    """The name of an operator without its overload."""
    return ".".join(operator.split(".")[:2])


def _is_attention(made: Made) -> bool:
    name = _base(made.operator)
    forward = name.startswith(("aten.", "shardwise.")) and "attention" in name and "backward" not in name
    return forward or name in ("higher_order.flex_attention", "flex_attention")


nothing = _Test("nothing", lambda made: False)
everything = _Test("everything", lambda made: True)
#: Matrix multiplications.
matmuls = _Test("matmuls", lambda made: _base(made.operator) in _MATMULS)
#: Fused attention.
attention = _Test("attention", _is_attention)
#: Redistributions of DTensors, and torch's own collectives.
collectives = _Test("collectives", lambda made: made.operator.split(".")[0] in _COLLECTIVES or _base(made.operator) in _MOVES)
#: Random numbers, dropout among them.
random = _Test("random", lambda made: made.random)
#: Operators of other libraries and of the user.
custom = _Test("custom", lambda made: made.operator.split(".")[0] not in _OWN)
#: What `remat` saves by default: no collective and no attention runs twice.
default = collectives | attention


def operators(*ops: Any) -> Policy:
    """Save the results of these operators, given as `torch.ops.aten.mm` (all overloads), as one overload, or by name.

    >>> import torch
    >>> operators(torch.ops.aten.mm, "aten.sin.default")
    save.operators('aten.mm', 'aten.sin.default')
    """
    for op in ops:
        if not (isinstance(op, str) or callable(op)) or "." not in str(op) or " " in str(op):
            text = "give `torch.ops.aten.mm`, one of its overloads, or a name such as 'aten.mm'"
            raise RematError(f"{shown(op)} of *ops is no operator: {text}")
    names = tuple(sorted(set(map(str, ops))))
    return _Test("operators", lambda made: f"{made.operator}.".startswith(tuple([f"{name}." for name in names])), names)


# ── by anything else ──────────────────────────────────────────────────────────────────────────────────────────────────


class _By(Policy):
    __slots__ = ("function", "text")
    by_operator = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.text = function, _fingerprint(function)

    def choose(self, made: Made, op: Any = None, args: Sequence[Any] = ()) -> Choice:
        answer = self.function(op, args, made)
        try:
            return answer if isinstance(answer, Choice) else Choice[answer.upper()]
        except (KeyError, AttributeError):
            raise RematError(
                f"the policy {self!r} gives {answer!r} for {made.operator}; it has to give 'save', 'recompute', 'must_save' or "
                "'must_recompute'"
            ) from None

    def __repr__(self) -> str:
        return f"save.by({self.text})"


def regions(pattern: str) -> Policy:
    """Save all results of regions with such a name: blocks by the name of their function or module, and compiled regions in
    them, as `block/compiled name`.

    >>> regions("blocks.0*")
    save.regions('blocks.0*')
    """
    a_text(pattern, "save.regions: pattern", "a text with the name of a region, such as 'blocks.*'")
    return _Test("regions", lambda made: fnmatchcase(made.region, pattern), (pattern,), by_operator=False)


def up_to(limit: int) -> Policy:
    """Save results of at most so many bytes: with `&`, nothing larger; for a DTensor, on the rank that holds most of it.

    >>> matmuls & up_to(64 * 2**20)
    save.matmuls & save.up_to(67108864)
    """
    limit = integer(limit, "save.up_to: limit", 0)
    return _Test("up_to", lambda made: made.bytes <= limit, (limit,), by_operator=False)


def by(function: Callable[[Any, Sequence[Any], Made], Choice | str]) -> Policy:
    """Let a function of the operator, its arguments and a `Made` decide: 'save', 'recompute', 'must_save' or 'must_recompute'.
    It has to decide the same on every rank and in every process.

    >>> def products(op, args, made):
    ...     return "must_save" if made.operator.startswith("aten.mm") else "recompute"
    >>> by(products).choose(Made("aten.mm.default"))
    <Choice.MUST_SAVE: 2>
    """
    if not callable(function):
        raise RematError(f"{shown(function)} is no function of an operator, its arguments and a `sw.save.Made`")
    return _By(function)


def _fingerprint(function: Any) -> str:
    """The name of a function and a digest of its code, the same in every process."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    words = re.sub(r" at 0x\w+", "", f"{_code(code)}{getattr(function, '__defaults__', None)!r}{held!r}")
    return f"{name} #{hashlib.blake2b(words.encode(), digest_size=4).hexdigest()}"


def _code(code: CodeType | None) -> str:
    if code is None:
        return ""
    constants = [_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{constants}"
