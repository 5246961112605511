"""Process groups by their ranks: made once for all meshes that need them, and freed by all of their ranks together.

Reads ranks and who needs them, gives process groups. Knows nothing of meshes but when they end. A group costs threads,
descriptors and, on devices, memory, and may be freed when no mesh needs it. But a mesh ends when nothing holds it, later on one
rank than on another perhaps, and ranks would wait forever for one that still has a group to make it again. So ranks that come
together to make a group tell each other which groups among them they can spare, and free those that all of their ranks named.
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from .._torch.groups import job_store, new_group
from .caches import cache_clear

Ranks = tuple[int, ...]
#: From so many groups on it is looked for meshes that only caches hold.
FEW = 12


def group_over(ranks: Ranks, needed_by: Any) -> Any:
    """The process group over these ranks in this order, for as long as `needed_by` is there; collective if it is made now."""
    job = dist.group.WORLD
    if ranks == tuple(range(dist.get_world_size())):
        return job
    with _joining:
        held = _jobs.get(job) or _jobs.setdefault(job, _JobGroups())
    return held.over(ranks, needed_by)


class _SharedGroup:
    """A process group, None while it is made or freed, and who needs it."""

    __slots__ = ("needed_by", "process")

    def __init__(self, needed_by: Any) -> None:
        self.process: Any = None
        self.needed_by: WeakSet[Any] = WeakSet([needed_by])


class _JobGroups:
    """The groups that this rank has made in one job, and how often."""

    def __init__(self) -> None:
        self._groups: dict[Ranks, _SharedGroup] = {}
        self._made: Counter[Ranks] = Counter()
        self._limit = FEW
        self._changing = threading.Condition()
        self._store: Any = None

    def over(self, ranks: Ranks, needed_by: Any) -> Any:
        """The group over these ranks; other threads that want it meanwhile wait for it."""
        with self._changing:
            self._changing.wait_for(lambda: ranks not in self._groups or self._groups[ranks].process is not None)
            group = self._groups.get(ranks)
            if group is not None:
                group.needed_by.add(needed_by)
                return group.process
            group = self._groups[ranks] = _SharedGroup(needed_by)
            self._made[ranks] += 1
        try:
            self._free_others(ranks)
            group.process = new_group(ranks, _name(ranks, self._made[ranks]))
        finally:
            with self._changing:
                if group.process is None:
                    del self._groups[ranks]
                self._changing.notify_all()
        return group.process

    def _free_others(self, ranks: Ranks) -> None:
        """Free the groups among these ranks that all of their ranks can do without."""
        self._look_for_ends()
        with self._changing:
            within = [(r, group) for r, group in self._groups.items() if set(r) <= set(ranks)]
            spare = {r: group.process for r, group in within if group.process is not None and not len(group.needed_by)}
            for each in spare:
                self._groups[each].process = None  # a thread that needs it again waits for what comes of it
        freed: list[Ranks] = []
        try:
            for each in self._agreed(ranks, sorted(spare)):
                dist.destroy_process_group(spare[each])
                freed.append(each)
        finally:
            with self._changing:
                for each, process in spare.items():
                    self._groups[each].process = process
                for each in freed:
                    del self._groups[each]
                self._changing.notify_all()

    def _look_for_ends(self) -> None:
        """Let go of meshes that only caches and uncollected cycles hold: the more rarely, the more are alive."""
        if len(self._groups) < self._limit:
            return
        cache_clear()
        gc.collect()
        with self._changing:
            self._limit = max(FEW, 2 * sum(len(group.needed_by) > 0 for group in self._groups.values()))

    def _agreed(self, ranks: Ranks, spare: list[Ranks]) -> list[Ranks]:
        """Those of the spare groups that every rank of theirs can spare; collective over `ranks`, by way of the job's store."""
        if dist.get_backend() == "fake":
            return []
        if self._store is None:
            self._store = job_store("shardwise/spare")
        me, name, before = dist.get_rank(), _name(ranks, self._made[ranks]), _name(ranks, self._made[ranks] - 1)
        self._store.set(f"{name}/{me}", json.dumps(spare))
        told = {rank: {tuple(each) for each in json.loads(self._store.get(f"{name}/{rank}"))} for rank in ranks}
        self._store.delete_key(f"{before}/{me}")  # all have come here, and so have read it
        return [each for each in spare if all(each in told[rank] for rank in each)]


_jobs: WeakKeyDictionary[Any, _JobGroups] = WeakKeyDictionary()
_joining = threading.Lock()


def _name(ranks: Ranks, number: int) -> str:
    """What the ranks of a group find each other by; each time another name, since the store keeps what was said by old ones."""
    return f"sw:{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}:{number}"
