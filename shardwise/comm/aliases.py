"""Aliases for process groups, and a hook to listen to every group behind an alias.

Programs name an alias; torch's table says which group that is, when they run. While a block listens, a `Listener` is registered
there in the place of each group, without a change to any program.

torch's table has no way to replace a group: for a moment the alias leads nowhere, and a thread that communicates in that moment
fails, since torch's operators look there without the interpreter's lock. So the listeners stay as long as there are other
threads, for blocks to come, and pass on what is asked of them. What remains is the first block: a program of several threads
enters one before it starts those that communicate.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from weakref import WeakValueDictionary

from torch.distributed import ProcessGroup

from .._torch.groups import register_group, unregister_group
from .listener import Hook, Listener

_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()  # whoever ends a job ends its groups
#: Kept as long as the alias: torch's own table keeps nothing alive, and a thread may be in a collective of one.
_listeners: dict[str, Listener] = {}
#: The aliases that lead to listeners now.
_heard: set[str] = set()
_hooks: list[Hook] = []
_changing = threading.RLock()


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
    held = (found() for found in _groups.valuerefs())  # at once: another thread may make one meanwhile
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
        group = _listeners.get(alias) or _listeners.setdefault(alias, Listener(alias, group, _hooks))
    unregister_group(alias)
    register_group(alias, group)
