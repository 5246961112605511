"""What a change of layout costs on a mesh: seconds, from latency and bytes. Pure arithmetic on sizes.

The defaults describe one node of accelerators; what matters for decisions is the ratio of a collective's latency to a byte.
"""

from __future__ import annotations

#: Seconds to start a collective.
LATENCY = 2e-5
#: Seconds to receive a byte.
PER_BYTE = 1 / 50e9
#: Seconds to read or write a byte of local memory.
PER_LOCAL_BYTE = 1 / 1000e9
#: Seconds for one multiply-add.
PER_WORK = 1 / 50e12


def all_gather(nbytes: float, ranks: int) -> float:
    """Each rank holds `nbytes` and receives what the others hold."""
    return 0.0 if ranks == 1 else LATENCY + nbytes * (ranks - 1) * PER_BYTE


def reduce_scatter(nbytes: float, ranks: int) -> float:
    """Each rank holds `nbytes` pending and ends with its part of the sum."""
    return 0.0 if ranks == 1 else LATENCY + nbytes * (ranks - 1) / ranks * PER_BYTE


def all_reduce(nbytes: float, ranks: int) -> float:
    """Each rank holds `nbytes` pending and ends with the whole sum."""
    return 0.0 if ranks == 1 else LATENCY + 2 * nbytes * (ranks - 1) / ranks * PER_BYTE


def all_to_all(nbytes: float, ranks: int) -> float:
    """Each rank holds `nbytes`, keeps one part and sends the others."""
    return 0.0 if ranks == 1 else LATENCY + nbytes * (ranks - 1) / ranks * PER_BYTE


def local(nbytes: float) -> float:
    """A local pass over `nbytes`."""
    return 1e-7 + nbytes * PER_LOCAL_BYTE


def change(have: int | str | None, want: int | str | None, nbytes: float, ranks: int) -> float:
    """Moving one axis of `ranks` from one state to another; `nbytes` is what a rank holds now.

    A state is a dim (cut), a kind (pending) or None (replicated).
    """
    if have == want:
        return 0.0
    if have is None:
        return local(nbytes)
    if isinstance(have, str):
        if isinstance(want, int):
            return reduce_scatter(nbytes, ranks)
        return all_reduce(nbytes, ranks) + (0.0 if want is None else local(nbytes))
    if isinstance(want, int):
        return all_to_all(nbytes, ranks)
    return all_gather(nbytes, ranks) + (0.0 if want is None else local(nbytes * ranks))
