"""The names by which the process groups of a job go in programs, and who stands before them.

Programs say a name; torch's table says which group that is, when they run. So a block can put something before every group
without a change to any program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch.distributed import ProcessGroup

from .._groups import register_group, unregister_group

#: Makes of a name and its group what goes by the name instead.
Before = Callable[[str, ProcessGroup], Any]

_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()  # whoever ends a job ends its groups
_shown: dict[str, Any] = {}  # what stands before them: torch's own table keeps nothing alive
_before: list[Before] = []


def register(alias: str, group: ProcessGroup) -> None:
    """Let a group go by a name, which another may have had."""
    forget(alias)
    _groups[alias] = group
    for before in _before:
        group = _shown[alias] = before(alias, group)
    register_group(alias, group)


def forget(alias: str) -> None:
    """Let no group go by a name any more."""
    unregister_group(alias)
    _groups.pop(alias, None)
    _shown.pop(alias, None)


def groups() -> list[ProcessGroup]:
    """Every group that goes by a name, each once."""
    return list({id(group): group for group in _groups.values()}.values())


@contextlib.contextmanager
def standing_before(before: Before) -> Iterator[None]:
    """In the block something stands before every group, those to come as well, and before whatever stood there."""
    _before.append(before)
    _renew()
    try:
        yield
    finally:
        _before.remove(before)
        _renew()


def _renew() -> None:
    for alias, group in list(_groups.items()):
        register(alias, group)
