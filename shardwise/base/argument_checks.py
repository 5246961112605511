"""Arguments of public callables: each function gives the checked value, or raises an `ArgumentError` that names the parameter.

Reads values and torch's own types; knows nothing of meshes, layouts or ranks. Texts hold no address and no number of a rank, so
that every rank raises the same one. All of it traces.

>>> integer(3, "halo_exchange: dim", least=0)
3
>>> a_dtype("float32", "layout: dtype")
Traceback (most recent call last):
shardwise.errors.ArgumentError: layout: dtype is a torch.dtype, such as torch.float32, got 'float32'
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn

from ..errors import ArgumentError, MissingFileError

Value = TypeVar("Value")
#: Characters of a value that an error shows.
_SHOWN = 60
#: Symbols of a trace stand for the values that they will have.
_SYMBOLS: Any = (SymInt, SymFloat)
_FLAGS: Any = (bool, SymBool)


def refuse(what: str, allowed: str, value: object) -> NoReturn:
    """Say which parameter takes what, and what it was given."""
    raise ArgumentError(f"{what} is {allowed}, got {shown(value)}")


def shown(value: object) -> str:
    """A value in an error, the same in every process.

    >>> shown("tp"), shown(object()), shown([1, 2.5]), shown(torch.ones(2))
    ("'tp'", 'an object', '[1, 2.5]', 'a tensor float32[2]')
    """
    if isinstance(value, Tensor):
        kind = "tensor" if type(value) is Tensor else type(value).__name__
        return f"a {kind} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        inside = ", ".join(shown(item) for item in value[:8]) + (", …" if len(value) > 8 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(key)}: {shown(item)}" for key, item in list(value.items())[:8]) + "}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if type(value).__repr__ is object.__repr__ or " at 0x" in repr(value):
        name = type(value).__name__
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def optional(check: Callable[..., Value], value: Any, *rest: Any) -> Value | None:
    """What a check gives, or None for None."""
    return None if value is None else check(value, *rest)


def instance(value: Any, kind: type[Value] | tuple[type, ...], what: str, allowed: str) -> Value:
    """The value, if it is of a class."""
    kinds: Any = kind
    if not isinstance(value, kinds):
        refuse(what, allowed, value)
    return value


def integer(value: Any, what: str, least: int | None = None, most: int | None = None) -> int:
    """An integer within bounds; truth values and tensors are none."""
    if isinstance(value, _SYMBOLS):
        return value
    if type(value) is not int:
        if isinstance(value, bool | Tensor) or not hasattr(value, "__index__") or isinstance(value, type):
            refuse(what, _within("an integer", least, most), value)
        value = operator.index(value)
    if (least is not None and value < least) or (most is not None and value > most):
        refuse(what, _within("an integer", least, most), value)
    return value


def number(value: Any, what: str, above: float | None = None, least: float | None = None, most: float = math.inf) -> float:
    """A number, which is not NaN, within bounds."""
    if isinstance(value, _SYMBOLS):
        return value
    bound = f" above {above:g}" if above is not None else f" of at least {least:g}" if least is not None else ""
    bound += f" up to {most:g}" if most < math.inf else ""
    known = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if not known or (above is not None and value <= above) or (least is not None and value < least) or value > most:
        refuse(what, f"a number{bound}", value)
    return value


def flag(value: Any, what: str) -> bool:
    """True or False."""
    if not isinstance(value, _FLAGS):
        refuse(what, "True or False", value)
    return value


def _within(kind: str, least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f"{kind} from {least:,} to {most:,}"
    return f"{kind} of at least {least:,}" if least is not None else f"{kind} of at most {most:,}" if most is not None else kind


def several(value: Any, what: str, allowed: str) -> tuple[Any, ...]:
    """The items of a list, a tuple or what else can be gone through; a text, a dictionary and a tensor are none."""
    if isinstance(value, str | bytes | Mapping | Tensor | type | nn.Module) or not isinstance(value, Iterable):
        refuse(what, allowed, value)
    return tuple(value)


def integers(value: Any, what: str, least: int | None = None) -> tuple[int, ...]:
    """Several integers, of at least so much each, that fit into 64 bits."""
    allowed = f"several {_within('integer', least, None)}".replace("integer", "integers")
    return tuple([integer(item, what, least, 2**63 - 1) for item in several(value, what, allowed)])


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """The sizes of a tensor that can be: none is negative, and their product can be counted."""
    if torch.compiler.is_compiling():
        return tuple(value)  # comparing would settle sizes that a program is traced without
    found = integers(value, what, 0)
    if not any(isinstance(size, SymInt) for size in found) and math.prod(max(size, 1) for size in found) >= 2**63:
        refuse(what, "the sizes of a tensor of fewer than 2**63 elements", value)
    return found


def a_text(value: Any, what: str, allowed: str = "a text") -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        refuse(what, allowed, value)
    return value


def choice(value: Any, what: str, choices: Iterable[Any]) -> Any:
    """One of a few values."""
    known = list(choices)
    if not isinstance(value, str | int | None) or isinstance(value, bool) or value not in known:
        refuse(what, f"one of {', '.join(map(repr, known))}", value)
    return value


def a_tensor(value: Any, what: str) -> Tensor:
    """A tensor."""
    return instance(value, Tensor, what, "a tensor")


def a_dtype(value: Any, what: str) -> torch.dtype:
    """A dtype."""
    return instance(value, torch.dtype, what, "a torch.dtype, such as torch.float32")


def a_device(value: Any, what: str) -> str:
    """The name of a kind of device that this torch knows, perhaps with a number."""
    try:
        if isinstance(value, str | torch.device):
            return str(torch.device(value))
    except RuntimeError:
        pass
    refuse(what, "the name of a device, such as 'cpu' or 'cuda'", value)


def a_function(value: Any, what: str, allowed: str = "a function") -> Callable[..., Any]:
    """Something to call."""
    if not callable(value):
        refuse(what, allowed, value)
    return value


def a_module(value: Any, what: str) -> nn.Module:
    """A module."""
    return instance(value, nn.Module, what, "a torch.nn.Module")


def file_to_write(value: Any, what: str) -> Path:
    """A path at which a file can be written: not a folder, in a folder that is there."""
    path = _file(value, what, "write")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"{what} is a file to write, got {str(path)!r}, whose folder is not there; make it first")
    return path


def file_to_read(value: Any, what: str) -> Path:
    """The path of a file that is there."""
    path = _file(value, what, "read")
    if not path.exists():
        raise MissingFileError(f"{what} is a file to read, got {str(path)!r}, which is not there")
    return path


def _file(value: Any, what: str, use: str) -> Path:
    path = a_path(value, what)
    if path.is_dir():
        raise ArgumentError(f"{what} is a file to {use}, got the folder {str(path)!r}; name a file in it")
    return path


def a_path(value: Any, what: str) -> Path:
    """The path of a file, wherever it is."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        refuse(what, "the path of a file", value)
    return Path(value)
