"""`agree`: ranks compare a text that must be the same on all of them, through the job's store.

No group takes part, so that one which comes alone, where ranks differ already, meets no other communication. Knows nothing of
meshes and tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from .._torch.groups import job_timeout
from ..errors import RankError, WorldError
from .failures import close_groups, joined
from .source_lines import caller

#: Seconds between two looks: at first, and at most; and between two looks for a failure of the job.
_SOON, _LATER, _LOOK = 0.0005, 0.02, 0.1


def agree(fact: str, ranks: Sequence[int], what: str, remedy: str) -> None:
    """Raise a `WorldError` on every one of the ranks if they do not all give the same text; all have to call it."""
    job, rank = joined(), dist.get_rank()
    name = f"agree/{','.join(map(str, sorted(ranks)))}"
    job.reports[name] += 1
    number = job.reports[name]
    key = f"{name}/{number}"
    job.store.set(f"{key}/{rank}", fact)
    if job.store.add(f"{key}/count", 1) == len(ranks):  # the last one compares
        facts = job.store.multi_get([f"{key}/{other}" for other in ranks])
        job.store.set(f"{key}/verdict", _difference(dict(zip(ranks, [fact.decode() for fact in facts], strict=True))))
    _wait(key, ranks, f"{what}: rank {rank} has {fact} at {caller()}", remedy)
    verdict = job.store.get(f"{key}/verdict").decode()
    job.store.delete_key(f"{name}/{number - 1}/{rank}")
    if rank == min(ranks):
        for word in ("count", "verdict"):  # all have come here, and so have read the one before
            job.store.delete_key(f"{name}/{number - 1}/{word}")
    if verdict:
        raise WorldError(f"{what} at {caller()}: the ranks would differ in them:\n{verdict}\n{remedy}")


def _difference(facts: dict[int, str]) -> str:
    """Which ranks gave which text, if not all gave the same.

    >>> print(_difference({0: "seed 1", 1: "seed 2", 2: "seed 1"}))
      rank 0, 2: seed 1
      rank 1: seed 2
    """
    if len(set(facts.values())) == 1:
        return ""
    lines = {text: [str(rank) for rank, other in facts.items() if other == text] for text in facts.values()}
    return "\n".join(f"  rank {', '.join(several)}: {text}" for text, several in lines.items())


def _wait(key: str, ranks: Sequence[int], what: str, remedy: str) -> None:
    """Wait for what the last one says of a comparison; as long as the job waits for a communication."""
    job, pause = joined(), _SOON
    start = looked = time.monotonic()
    while not job.store.check([f"{key}/verdict"]):
        now = time.monotonic()
        if now - looked > _LOOK:
            looked = now
            late = [str(rank) for rank in ranks if not job.store.check([f"{key}/{rank}"])]
            if late and now - start > job_timeout().total_seconds():
                job.word(f"{what}, and rank {', '.join(late)} did not come to compare within {now - start:.1f} s; {remedy}")
            if why := job.word():
                close_groups()
                raise RankError(why)
        time.sleep(pause)
        pause = min(2 * pause, _LATER)
