"""A local program as text to read."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..layouts.dtypes import DTYPES

_COLLECTIVE = re.compile(r"_c10d_functional\.(?!wait)|shardwise\.(exchange|move)")
#: A frame of a stack trace: file, line and function.
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def show(title: str, gm: GraphModule) -> str:
    """One line for each operator: its result, and behind a collective the user's line that needs it.

    >>> gm = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    >>> print(show("forward", gm))
    forward(x)
      relu = relu(x)
      return relu
    """
    inputs = [_named(node) for node in gm.graph.nodes if node.op == "placeholder"]
    lines = [f"{title}({', '.join(inputs)})"]
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"  return {_value(node.args[0])}")
        elif node.op != "placeholder":
            lines.append(f"  {_named(node)} = {_operation(node)}{_note(node)}")
    return "\n".join(lines)


def _named(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.name
    dtype = DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{node.name}: {dtype}[{', '.join(map(str, value.shape))}]"


def _operation(node: Node) -> str:
    text = str(node.target) if not callable(node.target) or hasattr(node.target, "_schema") else node.target.__name__
    name = text.removeprefix("aten.").removesuffix(".default")
    args = [_value(arg) for arg in node.args] + [f"{key}={_value(arg)}" for key, arg in node.kwargs.items()]
    return f"{args[0]}[{args[1]}]" if name == "getitem" else f"{name}({', '.join(args)})"


def _value(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_value, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)


def line_of(node: Node) -> str:
    """The user's line that a node comes from, as `train.py:12`; nothing where that is not known."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""


def _note(node: Node) -> str:
    if not _COLLECTIVE.search(str(node.target)):
        return ""
    why, where = node.meta.get("shardwise", ""), line_of(node)
    return f"  # {', '.join(filter(None, (where, why)))}" if where or why else ""
