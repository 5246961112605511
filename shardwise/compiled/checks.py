"""Captured programs in debug mode: before each collective of a local program the ranks compare what they are about to do.

A program is written a second time, with the comparisons in it, when it first runs in a block of `debug_mode`: what runs outside
of one stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from .._torch import OpOverload, schema
from ..comm.debug import announce, checks_here, group_text, parcels, shown
from ..comm.session import Post
from ..mesh import Mesh, root_meshes
from .nodes import WAIT
from .program import assemble
from .show import line_of


def with_checks(graph: Graph) -> Callable[[list[Any]], Any]:
    """A local program as a function that compares before each collective in a block of `debug_mode`, and else does not."""
    plain = assemble(graph)
    checked = functools.cache(lambda: assemble(graph, _before))

    def run(inputs: list[Any]) -> Any:
        return checked()(inputs) if checks_here() else plain(inputs)

    return run


def _before(node: Node) -> Callable[..., None] | None:
    if not isinstance(node.target, OpOverload) or node.target is WAIT or node.target.namespace != "_c10d_functional":
        return None
    kind = schema(node.target).name.partition("::")[2]
    operator = str(node.meta.get("shardwise", "")).partition(": ")[0]
    return functools.partial(_compare, kind, operator, line_of(node))


def _compare(kind: str, operator: str, line: str, x: Any, *args: Any) -> None:
    """Tell the others of a group, whose name comes last, of a collective with these arguments."""
    *facts, alias = args
    mesh, axes, ranks = _group(alias)
    post = Post(kind, operator, group_text(mesh, axes), line=line, path="in a captured program")
    if kind == "all_to_all_single":
        receive, send = ({rank: [((n,), x.dtype)] for rank, n in zip(ranks, counts, strict=True)} for counts in facts)
        announce(post._replace(send=parcels(send), receive=parcels(receive)), [ranks])
        return
    value = " and ".join(shown(one.shape, one.dtype) for one in ([x] if isinstance(x, Tensor) else x))
    announce(post._replace(kind=f"{kind}({', '.join(map(str, facts))})", value=value), [ranks])


def _group(alias: str) -> tuple[Mesh, tuple[str, ...], tuple[int, ...]]:
    """The mesh and the axes that the name of a group tells of, and the ranks of this rank's group."""
    _, fingerprint, names = alias.split(":", 2)
    mesh = next(mesh for mesh in root_meshes() if mesh.fingerprint == fingerprint and mesh.world == "processes")
    axes = tuple(names.split(","))
    place = mesh.place(dist.get_rank())
    return mesh, axes, tuple(mesh.ranks[peer] for peer in mesh.peers(place or 0, axes))
