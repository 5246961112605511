"""`Pretended`: the transport to a job that is not there. Programs are traced for its ranks; nothing communicates."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torch.distributed import ProcessGroup

from .._torch.groups import is_group
from ..errors import CompileError
from ..layouts.mesh import Mesh
from .aliases import forget, register
from .processes import Group, Processes

_make_group: Any = ProcessGroup  # torch's own types do not say that it needs no store
#: Groups that do nothing, by alias, and how many pretended jobs, perhaps in several threads, use each.
_stand_ins: dict[str, ProcessGroup] = {}
_users: Counter[str] = Counter()
_changing = threading.Lock()


class Pretended(Processes):
    """A job as one of its ranks would see it, for tracing: the compiler asks groups for their size, and no one for data."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__()
        self._mesh, self._rank = mesh, rank
        self._aliases: set[str] = set()

    def prepare(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group over `axes` by its name and size; one that does nothing stands in for it where there is none."""
        places = mesh.root.peers(self.place(mesh), axes)
        group = Group(mesh.root.alias(axes), len(places))
        with _changing:
            if group.size > 1 and group.alias not in self._aliases and (group.alias in _stand_ins or not is_group(group.alias)):
                self._aliases.add(group.alias)
                _users[group.alias] += 1
                if group.alias not in _stand_ins:
                    _stand_ins[group.alias] = _make_group(places.index(self.place(mesh)), group.size)
                    register(group.alias, _stand_ins[group.alias])
        return group

    def ready(self, mesh: Mesh) -> None:
        """Nothing: groups stand in when they are needed."""

    def place(self, mesh: Mesh) -> int:
        """Where the pretended rank stands in the mesh, which all ranks are in: to others the program would be another."""
        place = mesh.root.place(self._rank)
        if place is None or set(mesh.ranks) != set(self._mesh.ranks):
            raise CompileError(
                f"a program for the {len(self._mesh.ranks)} ranks of mesh {self._mesh} uses the mesh {mesh} of ranks "
                f"{sorted(mesh.ranks)}: it would not be the same on every rank; use meshes of all ranks"
            )
        return place

    def agree(self, fact: str, mesh: Mesh, due: bool) -> None:
        """Nothing: there is no one to ask."""

    def report(self, error: Exception, mesh: Mesh, where: str, alone: bool = False) -> None:
        """Nothing: there is no one to tell."""

    def leave(self) -> None:
        """Forget the stand-ins that no other thread uses."""
        with _changing:
            for alias in self._aliases:
                _users[alias] -= 1
                if not _users[alias]:
                    forget(alias)
                    del _stand_ins[alias]
            self._aliases.clear()
