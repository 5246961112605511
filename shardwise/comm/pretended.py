"""`Pretended`: the transport to a job that is not there. Programs are traced for its ranks; nothing communicates."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from .._torch.aoti import is_group
from ..errors import CompileError
from ..layouts.mesh import Mesh
from .aliases import forget, register
from .processes import Group, Processes

_make_group: Any = ProcessGroup  # torch's own types do not say that it needs no store


class Pretended(Processes):
    """A job as one of its ranks would see it, for tracing: the compiler asks groups for their size, and no one for data."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__()
        self._mesh, self._rank = mesh, rank
        self._stand_ins: dict[str, ProcessGroup] = {}

    def prepare(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group over `axes` by its name and size; one that does nothing stands in for it where there is none."""
        places = mesh.root.peers(self.place(mesh), axes)
        group = Group(mesh.root.alias(axes), len(places))
        if group.size > 1 and not is_group(group.alias):
            made = _make_group(places.index(self.place(mesh)), group.size)
            self._stand_ins[group.alias] = made  # torch's own table does not keep it
            register(group.alias, made)
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
        """Forget the stand-ins."""
        for alias in self._stand_ins:
            forget(alias)
        self._stand_ins.clear()
