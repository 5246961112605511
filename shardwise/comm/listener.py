"""`Listener`: a process group that calls a hook before each collective, then has another group do it.

Registered under the alias of a group, so it sees the collectives of every program, compiled ones too. Whatever backend does
the work, torch calls these methods.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ..base.settings import Setting

#: Called before a collective with the alias of its group, its kind, its reduction or who broadcasts, its tensors, and how many
#: rows go to and come from each rank, where they say so; the collective runs inside the context manager that it returns.
Hook = Callable[[str, str, str, Sequence[Tensor], tuple[list[int], list[int]] | None], AbstractContextManager[Any]]

#: True while a collective was issued through the transport, so that listeners do not count it twice.
through_transport = Setting("through transport", False)
#: For which operator, and from which line, a captured program is about to communicate, in the thread that runs it.
_known = threading.local()
_NOTHING = nullcontext()


def expect(operator: str, line: str) -> None:
    """Say what the next collectives of a program are for; their own line is not one of the user's. Nothing: it is unknown."""
    _known.now = (operator, line)


def expected() -> tuple[str, str]:
    """For which operator, and from which line, the next collective is; nothing where it is unknown."""
    return getattr(_known, "now", ("", ""))


def _collective(name: str, kind: str, given: int = 0) -> Any:
    """A method of a listener: calls the hook with the tensors at a position of the arguments, then the other group."""

    def method(self: Listener, *args: Any) -> Work:
        with self._about(kind, args[given], args):
            return getattr(self._group(), name)(*args)

    return method


class Listener(ProcessGroup):
    """A group in front of another one. While any block listens, the hook is called before each collective; else a listener adds
    4 microseconds to each."""

    def __init__(self, alias: str, group: ProcessGroup, hooks: Sequence[Hook]) -> None:
        initialise: Any = super().__init__
        initialise(group.rank(), group.size())
        self._alias, self._hooks = alias, hooks
        self._group: Any = weakref.ref(group)  # whoever ends a job ends its groups

    def _about(self, kind: str, given: Any, args: Sequence[Any]) -> AbstractContextManager[Any]:
        hooks = () if through_transport.get() else tuple(self._hooks)
        if not hooks:
            return _NOTHING
        rows = None
        if kind == "all_to_all":
            even, (_, _, coming, going, _) = [given.shape[0] // self.size()] * self.size(), args
            rows, given = (going or even, coming or even), [given]
        return hooks[-1](self._alias, kind, _detail(args[-1]), given, rows)  # each block has the same

    allreduce: Any = _collective("allreduce", "all_reduce")
    allreduce_coalesced: Any = _collective("allreduce_coalesced", "all_reduce")
    allgather_into_tensor_coalesced: Any = _collective("allgather_into_tensor_coalesced", "all_gather", 1)
    reduce_scatter_tensor_coalesced: Any = _collective("reduce_scatter_tensor_coalesced", "reduce_scatter", 1)
    alltoall_base: Any = _collective("alltoall_base", "all_to_all", 1)
    broadcast: Any = _collective("broadcast", "broadcast")


def _detail(opts: Any) -> str:
    """What the options of a collective say about it: the name of the reduction, as `sum`, who broadcasts, or nothing."""
    if hasattr(opts, "reduceOp"):
        return str(opts.reduceOp.op).rpartition(".")[2].lower()
    return f"from {opts.rootRank}" if hasattr(opts, "rootRank") else ""
