"""Aliases for process groups, and a hook to listen to every group behind an alias.

Programs name an alias; torch's table says which group that is, when they run. While a block listens, a `Listener` is registered
there in the place of each group, without a change to any program. Other threads may communicate meanwhile: an alias always
leads to one or the other.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import deque
from collections.abc import Iterator
from itertools import starmap
from typing import Any
from weakref import WeakValueDictionary

from torch.distributed import ProcessGroup

from .._groups import register_group, unregister_group
from .listener import Listener, Tell

_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()  # whoever ends a job ends its groups
#: Kept as long as the alias: torch's own table keeps nothing alive, and a thread may be in a collective of one.
_listeners: dict[str, Listener] = {}
_tells: list[Tell] = []
_changing = threading.RLock()


def register(alias: str, group: ProcessGroup) -> None:
    """Let a group go by an alias, which another may have had."""
    with _changing:
        if _groups.get(alias) is group:
            return
        _groups[alias] = group
        _listeners.pop(alias, None)
        _show(alias)


def forget(alias: str) -> None:
    """Let no group go by an alias any more."""
    with _changing:
        unregister_group(alias)
        _groups.pop(alias, None)
        _listeners.pop(alias, None)


def groups() -> list[ProcessGroup]:
    """Every group that goes by a name, each once."""
    held = (found() for found in _groups.valuerefs())  # at once: another thread may make one meanwhile
    return list({id(group): group for group in held if group is not None}.values())


@contextlib.contextmanager
def listening(tell: Tell) -> Iterator[None]:
    """In the block one more is told of the collectives of all groups with an alias, those to come as well."""
    with _changing:
        _tells.append(tell)
        if len(_tells) == 1:
            _show_all()
    try:
        yield
    finally:
        with _changing:
            _tells.remove(tell)
            if not _tells:
                _show_all()


def _show_all() -> None:
    for alias in list(_groups):
        _show(alias)


def _show(alias: str) -> None:
    """Register under an alias what belongs there now."""
    shown: Any = _groups.get(alias)
    if shown is not None and _tells:
        shown = _listeners.get(alias) or _listeners.setdefault(alias, Listener(alias, shown, _tells))
    if shown is not None:
        # In one call of C code, which keeps the interpreter's lock: no other thread finds the alias without a group.
        deque(starmap(operator.call, [(unregister_group, alias), (register_group, alias, shown)]), maxlen=0)
