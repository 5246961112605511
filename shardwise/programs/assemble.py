"""Turns a local program into a Python function that calls its operators one after the other, each by its fastest binding.

Reads an fx graph of operators on local tensors. Knows nothing of layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .._torch.tensors import OpOverload, below_autograd, probe, quick_call
from ..comm.source_lines import CAPTURED

#: What to call, with the same arguments, before a node; None: nothing.
Before = Callable[[Node], Callable[..., None] | None]


def assemble(graph: Graph, before: Before | None = None) -> Callable[[list[Any]], Any]:
    """A function of the list of inputs, which it empties, so that memory is freed as soon as possible.

    With `before` it may be made while programs run: faster bindings are then not tried, since that draws random numbers.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(lambda x: torch.ops.aten.add.Tensor(x, 1)).graph
    >>> assemble(graph)([torch.ones(2)])
    tensor([2., 2.])
    """
    names: dict[Node, str] = {}
    scope: dict[str, Any] = {}
    last = _last_uses(graph)
    taken, lines = [], []
    for node in graph.nodes:
        names[node] = f"v{len(names)}"
        if node.op == "placeholder":
            taken.append(names[node])
            continue
        if node.op == "output":
            lines.append(f"return {_written(node.args[0], names, scope)}")
            break
        first = None if before is None else before(node)
        lines += [] if first is None else [f"{_constant(first, scope)}({_given(node, names, scope)})"]
        lines.append(f"{names[node]} = {_call(node, names, scope, _quickest if before is None else attrgetter('target'))}")
        gone = [names[old] for old in last.get(node, ())]
        lines += [f"del {', '.join(gone)}"] if gone else []
    unpack = [f"{', '.join(taken)}, = inputs"] if taken else []
    scope["below_autograd"] = below_autograd  # gradients are the business of whoever runs this
    source = "\n    ".join(
        ["def program(inputs):", *unpack, "inputs.clear()", "with below_autograd():", *[f"    {x}" for x in lines]]
    )
    exec(compile(source, CAPTURED, "exec"), scope)
    return scope["program"]


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node the values that are used there for the last time."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        for value in (*node.all_input_nodes, *(() if node.op in ("placeholder", "output") else (node,))):
            if value not in seen:
                seen.add(value)
                if node.op != "output":
                    last.setdefault(node, []).append(value)
    return last


def _call(node: Node, names: dict[Node, str], scope: dict[str, Any], way: Callable[[Node], Any]) -> str:
    if node.op == "get_attr":
        return _constant(functools.reduce(getattr, str(node.target).split("."), node.graph.owning_module), scope)
    if node.op != "call_function":
        raise AssertionError(f"a local program has operators only, got {node.format_node()}")
    if getattr(node.target, "__name__", "") == "getitem":
        return f"{_written(node.args[0], names, scope)}[{_written(node.args[1], names, scope)}]"
    return f"{_constant(way(node), scope)}({_given(node, names, scope)})"


def _given(node: Node, names: dict[Node, str], scope: dict[str, Any]) -> str:
    given = [_written(arg, names, scope) for arg in node.args]
    return ", ".join(given + [f"{name}={_written(arg, names, scope)}" for name, arg in node.kwargs.items()])


def _quickest(node: Node) -> Any:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return target

    def stand_in(taken: Node) -> Any:
        fake = taken.meta.get("val")
        if not isinstance(fake, Tensor) or any(not isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            raise TypeError("no probe stands for this")
        return probe(fake.shape, fake.stride(), fake.dtype)

    try:
        args, kwargs = map_arg((node.args, node.kwargs), stand_in)
        return quick_call(target, list(args), dict(kwargs))
    except TypeError:
        return target._op


def _written(value: Any, names: dict[Node, str], scope: dict[str, Any]) -> str:
    """A value as code."""
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, list | tuple):
        inside = ", ".join(_written(item, names, scope) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if value is None or type(value) in (int, bool, str):
        return repr(value)
    return _constant(value, scope)


def _constant(value: Any, scope: dict[str, Any]) -> str:
    for name, known in scope.items():
        if known is value:
            return name
    name = f"c{len(scope)}"
    scope[name] = value
    return name
