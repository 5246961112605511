"""`Toolbox`: what a program, which runs on DTensors in place of one operator, may use beside ordinary torch operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor

from .._torch.compiler import tracing_context
from .._torch.tensors import tree_map_only
from ..comm import seen, transport
from ..comm.watch.log import watching
from ..errors import OperatorError
from ..layouts.layout import Layout, PerRank
from ..layouts.mesh import Mesh
from ..random.keys import next_key
from ..redistribution.run import move
from .wrapping import local_on, replicated_on, wrap


def key_on(mesh: Mesh, generator: Generator | None = None) -> tuple[int, int]:
    """The keys of one random call on a mesh, whose ranks compare, when torch was seeded, what these are made of."""
    return next_key(generator, mesh.root, partial(_agree, mesh.root))


def _agree(mesh: Mesh, made_of: str, due: bool) -> None:
    if due or watching.get() is not None:
        transport(mesh, "random numbers").agree(made_of, mesh, due)


torch.library.impl(
    "shardwise::random_key",
    "CompositeExplicitAutograd",
    lambda after, mesh: torch.tensor(key_on(seen(Mesh.read(mesh)))),
)


class Toolbox:
    """What a program, which runs on DTensors in place of one operator, may use beside ordinary torch operators."""

    __slots__ = ("cls", "operator")
    key = staticmethod(key_on)

    def __init__(self, cls: Any, operator: str = "") -> None:
        self.cls, self.operator = cls, operator

    def is_distributed(self, value: Any) -> bool:
        """Whether a value is a DTensor."""
        return isinstance(value, self.cls)

    def layout(self, x: Any) -> Layout:
        """The layout of a DTensor."""
        return x._layout

    def local(self, x: Any) -> Tensor:
        """The local value of a DTensor."""
        return x._local

    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """A DTensor around a local value."""
        return wrap(self.cls, local, layout)

    def move(self, x: Any, layout: Layout, operator: str = "") -> Any:
        """The same tensor in another layout."""
        return wrap(self.cls, move(x._local, x._layout, layout, operator or self.operator), layout)

    def distribute(self, tensor: Tensor, layout: Layout) -> Any:
        """A plain tensor, equal on every rank, in a layout."""
        world, whole = transport(layout.mesh), layout.replicated()
        local = world.replicate(tensor, layout.mesh)
        if layout is whole:
            local = world.each(torch.clone, layout.mesh, local)  # ranks of one process must not share what they write to
        return wrap(self.cls, move(local, whole, layout), layout)

    def replicated(self, x: Any, mesh: Mesh, operator: str = "") -> Any:
        """A DTensor, or a plain tensor, whole on every rank."""
        local, layout = local_on(self.cls, x, mesh)
        return wrap(self.cls, move(local, layout, layout.replicated(), operator), layout.replicated())

    def whole(self, values: Any, mesh: Mesh) -> Any:
        """DTensors around local values that every rank holds whole, also through lists and tuples."""
        return tree_map_only(Tensor, lambda x: wrap(self.cls, x, replicated_on(mesh, x)), values)

    def plain(self, x: Any, operator: str = "") -> Tensor:
        """The whole value as an ordinary tensor, on every rank."""
        layout = x._layout
        return transport(layout.mesh).plain(move(x._local, layout, layout.replicated(), operator))

    def become(self, x: Any, value: Any) -> None:
        """Make `x` show the data of another DTensor, and its shape and layout, in place."""
        cast(Any, Tensor).data.__set__(x, value)  # torch's own attribute: the sizes that the wrapper itself shows
        x._local, x._layout = value._local, value._layout

    def each(self, kernel: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
        """A function of local tensors on every rank; DTensors among the arguments give their locals."""
        locals_ = [a._local if isinstance(a, self.cls) else a for a in args]
        return transport(mesh).each(kernel, mesh, *locals_)

    def look(self, check: Callable[[Tensor], None], x: Any) -> None:
        """Have every rank look at what it holds of a tensor, where there are values to look at: not in a trace, nor on a rank
        outside the mesh; and no device that runs ahead is waited for."""
        if tracing_context() is not None or x.device.type != "cpu":
            return
        if not self.is_distributed(x):
            check(x)
        elif transport(x._layout.mesh).place(x._layout.mesh) >= 0:
            self.each(check, x._layout.mesh, x)

    def offset(self, layout: Layout, dim: int) -> Tensor:
        """The first global index of a dim on each rank, as a local 0-d tensor."""
        return transport(layout.mesh).number(PerRank(lambda place: layout.offset(place)[dim]), layout.mesh)

    def mesh(self, *values: Any) -> Mesh:
        """The mesh of the first DTensor among some arguments (lists included)."""
        for value in values:
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, self.cls):
                    return item._layout.mesh
        raise OperatorError("an operator without a DTensor reached Shardwise; this is a fault of Shardwise")
