"""Every private name of `torch.distributed` used in Shardwise, each with the reason it is needed: process groups and meshes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed._functional_collectives  # gives the collective operators their fake kernels, for tracing
import torch.distributed.device_mesh
from torch._C import _distributed_c10d

#: A name of our own for a process group, equal on every rank, so that a traced graph holds nothing of one rank.
register_group: Any = _distributed_c10d._register_process_group
unregister_group: Any = _distributed_c10d._unregister_process_group
_resolve_group: Any = _distributed_c10d._resolve_process_group

#: The work that fills a tensor, where `wait_tensor` finds it: a traced program holds tensors, and no work.
register_work: Any = _distributed_c10d._register_work


def coalesces(group: Any, device: torch.device) -> bool:
    """Whether a group's backend for a device launches many messages as one."""
    return bool(group._get_backend(device).supports_coalescing)


def coalesce(group: Any, device: torch.device) -> Any:
    """Messages begun inside the block are one launch, whose works the block's value has."""
    return torch.distributed.distributed_c10d._coalescing_manager(group, device, async_ops=True)


#: A tensor that waits for the work that fills it when it is first used.
AsyncTensor: Any = torch.distributed._functional_collectives.AsyncCollectiveTensor


_c10d: Any = torch.distributed.distributed_c10d


def job_timeout() -> timedelta:
    """How long communication of the job may take, as `init_process_group` was told: torch gives new groups a default."""
    job = _c10d.GroupMember.WORLD
    options: list[Any] = [getattr(job._get_backend(device), "options", None) for device in job._device_types]
    found = [option._timeout for option in options if hasattr(option, "_timeout")]
    return min(found, default=_c10d._get_default_timeout(_c10d.Backend(_c10d._world.pg_map[job][0])))


def new_group(ranks: tuple[int, ...], name: str) -> Any:
    """A process group of that name over these ranks in this order; only they come together.

    The public function names a group by the number of groups that this process made before. Ranks that are in different meshes
    differ in that, and would wait for each other under different names forever. Before torch 2.13 it also sorts the ranks.
    """
    job = _c10d.GroupMember.WORLD
    backend, store = _c10d._world.pg_map[job]
    words = {"timeout": job_timeout(), "device_id": job.bound_device_id}
    place = ranks.index(job.rank())
    made, _ = _c10d._new_process_group_helper(len(ranks), place, list(ranks), backend, store, name, **words)
    _c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def current_device_mesh() -> Any:
    """The `DeviceMesh` whose `with` block this is in, if any; no public function tells."""
    stack = torch.distributed.device_mesh._mesh_resources.mesh_stack
    return stack[-1] if stack else None


def job_store(prefix: str) -> Any:
    """The store in which the ranks of the job found each other, for names of that prefix: it takes no collective to tell things
    there. It has a connection of its own: a thread that waits in the store holds its connection, for minutes perhaps."""
    store = _c10d._get_default_store()
    store.check([prefix])  # fails at once if the store is gone, where a new connection would be tried for minutes
    return _c10d.PrefixStore(prefix, store.clone())


def is_group(name: str) -> bool:
    """Whether a process group goes by this name."""
    try:
        _resolve_group(name)
    except RuntimeError:
        return False
    return True
