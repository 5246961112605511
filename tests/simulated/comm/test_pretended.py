"""Jobs that are not there: groups that stand in for theirs while programs are traced."""

from __future__ import annotations

from shardwise import Mesh
from shardwise._torch.groups import is_group
from shardwise.comm.pretended import Pretended


def test_a_group_stands_in_until_the_last_pretended_job_ends() -> None:
    """Two threads may trace for the same mesh at a time, and the first to end leaves the other its groups."""
    mesh = Mesh(("stand", "in"), (2, 2), range(4), "cpu", "processes")
    alias, (one, other) = mesh.alias(("in",)), (Pretended(mesh, rank) for rank in (0, 3))
    for job in (one, other, one):
        assert job.prepare(mesh, ("in",)).alias == alias and is_group(alias)
    one.leave()
    assert is_group(alias)
    other.leave()
    assert not is_group(alias)
