"""`Pretended`: the door to a job that is not there. Programs are traced for its ranks; nothing communicates."""

from __future__ import annotations

from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from .._aoti import is_group
from .._torch import register_group, unregister_group
from ..mesh import Mesh
from .groups import Group, Processes


class Pretended(Processes):
    """A job as one of its ranks would see it, for tracing: the compiler asks groups for their size, and no one for data."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._stand_ins: dict[str, ProcessGroup] = {}

    def prepare(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        """The group over `axes` by its name and size; one that does nothing stands in for it where there is none."""
        places = mesh.root.peers(self.place(mesh), axes)
        group = Group(mesh.root.alias(axes), len(places))
        if group.size > 1 and not is_group(group.alias):
            made = ProcessGroup(HashStore(), places.index(self.place(mesh)), group.size)
            self._stand_ins[group.alias] = made  # torch's own table does not keep it
            register_group(group.alias, made)
        return group

    def ready(self, mesh: Mesh) -> None:
        """Nothing: groups stand in when they are needed."""

    def place(self, mesh: Mesh) -> int:
        """Where the pretended rank stands in the mesh."""
        place = mesh.root.place(self._rank)
        return -1 if place is None else place

    def leave(self) -> None:
        """Forget the stand-ins."""
        for alias in self._stand_ins:
            unregister_group(alias)
        self._stand_ins.clear()
