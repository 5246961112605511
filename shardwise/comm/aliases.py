"""Aliases for process groups, and `Listener`: a group behind an alias that calls a hook before each collective.

Programs name an alias; torch's table says which group that is, when they run. While a block listens, a `Listener` is registered
there in the place of each group, so that it sees the collectives of every program, compiled ones too.

torch's table has no way to replace a group: for a moment the alias leads nowhere, and a thread that communicates in that moment
fails, since torch's operators look there without the interpreter's lock. So the listeners stay as long as there are other
threads, for blocks to come, and pass on what is asked of them. What remains is the first block: a program of several threads
enters one before it starts those that communicate.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from .._torch.groups import register_group, unregister_group
from ..base.settings import Setting

#: Called before a collective with the alias of its group, its kind, its reduction or who broadcasts, its tensors, and how many
#: rows go to and come from each rank, where they say so; the collective runs inside the context manager that it returns.
Hook = Callable[[str, str, str, Sequence[Tensor], tuple[list[int], list[int]] | None], AbstractContextManager[Any]]

#: True while a collective was issued through the transport, so that listeners do not count it twice.
through_transport = Setting("through transport", False)
_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()  # whoever ends a job ends its groups
#: Kept as long as the alias: torch's own table keeps nothing alive, and a thread may be in a collective of one.
_listeners: dict[str, Listener] = {}
#: The aliases that lead to listeners now.
_heard: set[str] = set()
_hooks: list[Hook] = []
_changing = threading.RLock()


class _Expected(threading.local):
    origin = ("", "")


#: For which operator, and from which line, a captured program is about to communicate in this thread; nothing: it is unknown.
expected = _Expected()


def _collective(name: str, kind: str, given: int = 0) -> Any:
    """A method of a listener: calls the hook with the tensors at a position of the arguments, then the other group."""

    def method(self: Listener, *args: Any) -> Work:
        with self._about(kind, args[given], args):
            return getattr(self._group(), name)(*args)

    return method


class Listener(ProcessGroup):
    """A group in front of another one. While any block listens, the hook is called before each collective; else a listener adds
    4 microseconds to each. Whatever backend does the work, torch calls these methods."""

    def __init__(self, alias: str, group: ProcessGroup) -> None:
        initialise: Any = super().__init__
        initialise(group.rank(), group.size())
        self._alias = alias
        self._group: Any = weakref.ref(group)  # whoever ends a job ends its groups

    def _about(self, kind: str, given: Any, args: Sequence[Any]) -> AbstractContextManager[Any]:
        hooks = () if through_transport.get() else tuple(_hooks)
        if not hooks:
            return nullcontext()
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


def register(alias: str, group: ProcessGroup) -> None:
    """Let a group go by an alias, which another may have had."""
    with _changing:
        if _groups.get(alias) is group:
            return
        _groups[alias] = group
        _listeners.pop(alias, None)
        _lead(alias, bool(_hooks or _heard))


def forget(alias: str) -> None:
    """Let no group go by an alias any more."""
    with _changing:
        unregister_group(alias)
        _groups.pop(alias, None)
        _listeners.pop(alias, None)
        _heard.discard(alias)


def groups() -> list[ProcessGroup]:
    """Every group that goes by a name, each once."""
    held = (group() for group in _groups.valuerefs())  # at once: another thread may make one meanwhile
    return list({id(group): group for group in held if group is not None}.values())


@contextlib.contextmanager
def listening(hook: Hook) -> Iterator[None]:
    """In the block the hook is called before the collectives of all groups with an alias, those to come as well."""
    with _changing:
        _hooks.append(hook)
        for alias in [alias for alias in _groups if alias not in _heard]:
            _lead(alias, True)
    try:
        yield
    finally:
        with _changing:
            _hooks.remove(hook)
            if not _hooks and threading.active_count() == 1:
                for alias in list(_heard):
                    _lead(alias, False)


def _lead(alias: str, to_listener: bool) -> None:
    """Let an alias lead to the listener of its group, or to the group."""
    group = _groups.get(alias)
    (_heard.add if to_listener and group is not None else _heard.discard)(alias)
    if group is None:
        return
    if to_listener:
        group = _listeners.get(alias) or _listeners.setdefault(alias, Listener(alias, group))
    unregister_group(alias)
    register_group(alias, group)
