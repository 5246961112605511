"""`Listener`: a process group that tells whoever listens what is asked of it, then has another one do it.

Registered under the alias of a group, so it hears the collectives of every program, compiled ones too. Whatever backend does
the work, torch asks for collectives in these words.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ..base.settings import Setting

#: Called with the alias of a group, the kind of a collective, its tensors, and how many rows go to and come from each rank if
#: they say so; the collective runs inside what it gives.
Tell = Callable[[str, str, Sequence[Tensor], Any, Any], AbstractContextManager[Any]]

#: Whether this library asks for the communication by its transport: whoever watches there has heard of it.
asked = Setting("asked", False)
#: For which operator, and from which line, a captured program is about to communicate, in the thread that runs it.
_known = threading.local()
_NOTHING = nullcontext()


def expect(operator: str, line: str) -> None:
    """Say what the next collectives of a program are for; their own line is not one of the user's. Nothing: it is unknown."""
    _known.now = (operator, line)


def expected() -> tuple[str, str]:
    """For which operator, and from which line, the next collective is; nothing where it is unknown."""
    return getattr(_known, "now", ("", ""))


class Listener(ProcessGroup):
    """A group before another one. All who are in `tells` when a collective begins are told, the last one first; while there are
    none it adds 4 microseconds to each collective."""

    def __init__(self, alias: str, group: ProcessGroup, tells: Sequence[Tell]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._alias, self._tells = alias, tells
        self._group: Any = weakref.ref(group)  # whoever ends a job ends its groups

    def _told(
        self, kind: str, tensors: Sequence[Tensor], opts: Any = None, rows: Any = (None, None)
    ) -> AbstractContextManager[Any]:
        if not self._tells or asked.get():
            return _NOTHING
        kind = kind if opts is None else f"{kind}({_detail(opts)})"
        with ExitStack() as telling:
            for tell in reversed(tuple(self._tells)):
                telling.enter_context(tell(self._alias, kind, tensors, *rows))
            return telling.pop_all()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Reduce."""
        with self._told("all_reduce", tensors, opts):
            return self._group().allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Reduce several tensors."""
        with self._told("all_reduce", tensors, opts):
            return self._group().allreduce_coalesced(tensors, opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Gather."""
        with self._told("all_gather", inputs):
            return self._group().allgather_into_tensor_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Reduce and scatter."""
        with self._told("reduce_scatter", inputs, opts):
            return self._group().reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    def alltoall_base(self, output: Tensor, input: Tensor, coming: list[int], going: list[int], opts: Any) -> Work:  # type: ignore[override]
        """Send and receive rows."""
        even = [input.shape[0] // self.size()] * self.size()
        with self._told("all_to_all", [input], rows=(going or even, coming or even)):
            return self._group().alltoall_base(output, input, coming, going, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Send to all."""
        with self._told("broadcast", tensors, opts):
            return self._group().broadcast(tensors, opts)


def _detail(opts: Any) -> str:
    """What the options of a collective say about it: the name of the reduction, as `sum`, or who sends."""
    return str(opts.reduceOp.op).rpartition(".")[2].lower() if hasattr(opts, "reduceOp") else f"from {opts.rootRank}"
