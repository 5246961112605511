"""`Listener`: a process group that says what is asked of it, then has another one do it.

Stands before the group of a name, so it hears the collectives of every program, compiled ones too. Whatever backend does the
work, torch asks for collectives in these words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

#: Called with the kind of a collective, its tensors, and how many rows go to and come from each rank if they say so; the
#: collective runs inside what it gives.
Tell = Callable[[str, Sequence[Tensor], Any, Any], AbstractContextManager[Any]]


class Listener(ProcessGroup):
    """A group before another one."""

    def __init__(self, group: ProcessGroup, tell: Tell) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group, self._tell = group, tell

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Reduce."""
        with self._tell(f"all_reduce({_reduction(opts)})", tensors, None, None):
            return self._group.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Reduce several tensors."""
        with self._tell(f"all_reduce({_reduction(opts)})", tensors, None, None):
            return self._group.allreduce_coalesced(tensors, opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Gather."""
        with self._tell("all_gather", inputs, None, None):
            return self._group.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Reduce and scatter."""
        with self._tell(f"reduce_scatter({_reduction(opts)})", inputs, None, None):
            return self._group.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    def alltoall_base(self, output: Tensor, input: Tensor, coming: list[int], going: list[int], opts: Any) -> Work:  # type: ignore[override]
        """Send and receive rows."""
        even = [input.shape[0] // self.size()] * self.size()
        with self._tell("all_to_all", [input], going or even, coming or even):
            return self._group.alltoall_base(output, input, coming, going, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """Send to all."""
        with self._tell(f"broadcast(from {opts.rootRank})", tensors, None, None):
            return self._group.broadcast(tensors, opts)


def _reduction(opts: Any) -> str:
    """The name of a reduction, as `sum`."""
    return str(opts.reduceOp.op).rpartition(".")[2].lower()
