"""`agree`: ranks compare a text that must be the same on all of them, through the job's store.

No group takes part, so that one which comes alone, where ranks differ already, meets no other communication. Knows nothing of
meshes and tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from .._torch.groups import job_timeout
from ..errors import RankError, WorldError
from .failures import close_groups, joined
from .source_lines import caller
from .store import wait_for


def agree(fact: str, ranks: Sequence[int], what: str, remedy: str) -> None:
    """Raise a `WorldError` on every one of the ranks if they do not all give the same text; all have to call it."""
    job, rank = joined(), dist.get_rank()
    name = f"agree/{','.join(map(str, sorted(ranks)))}"
    job.reports[name] += 1
    number, key = job.reports[name], f"{name}/{job.reports[name]}"
    job.store.set(f"{key}/{rank}", fact)
    if job.store.add(f"{key}/count", 1) == len(ranks):  # the last one compares
        facts = [fact.decode() for fact in job.store.multi_get([f"{key}/{other}" for other in ranks])]
        job.store.set(f"{key}/verdict", by_text(dict(zip(ranks, facts, strict=True))) if len(set(facts)) > 1 else "")

    def trouble(waited: float) -> str:
        late = [other for other in ranks if not job.store.check([f"{key}/{other}"])]
        if late and waited > job_timeout().total_seconds():
            head = f"{what}: rank {rank} has {fact} at {caller()}"
            job.word(f"{head}, and {named(late)} did not come to compare within {waited:.1f} s; {remedy}")
        return job.word()

    if why := wait_for(job.store, [f"{key}/verdict"], trouble):
        close_groups()
        raise RankError(why)
    verdict = job.store.get(f"{key}/verdict").decode()
    job.store.delete_key(f"{name}/{number - 1}/{rank}")
    if rank == min(ranks):
        for word in ("count", "verdict"):  # all have come here, and so have read the one before
            job.store.delete_key(f"{name}/{number - 1}/{word}")
    if verdict:
        raise WorldError(f"{what} at {caller()}: the ranks would differ in them:\n{verdict}\n{remedy}")


def by_text(facts: Mapping[int, object]) -> str:
    """A line for each text, with all ranks that gave it.

    >>> print(by_text({0: "seed 1", 1: "seed 2", 2: "seed 1"}))
      ranks 0, 2: seed 1
      rank 1: seed 2
    """
    ranks: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        ranks.setdefault(str(fact), []).append(rank)
    return "\n".join(f"  {named(several)}: {text}" for text, several in ranks.items())


def named(ranks: Iterable[int]) -> str:
    """Ranks in an error."""
    several = sorted(ranks)
    return f"rank{'s' if len(several) > 1 else ''} {', '.join(map(str, several))}"
