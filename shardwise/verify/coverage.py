"""Writes docs/coverage.md: what the sweeps over torch's operators found, and what serves the operators without a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .sweeps import Sweep, Verdict, names, sweep_operators

SWEEPS = (Sweep((2,)), Sweep((2, 2)), Sweep((2,), inplace=True))

#: Why operators that raise do.
REASONS = {
    "as_strided_scatter": "its gradient is written through `as_strided`, and no view of a shard is one of all its memory",
    "tensor_split": "torch reads split points that are a tensor out of its memory before it asks anyone; give them as numbers",
    "addbmm": "in place it would give its argument another shape, which torch itself deprecates",
}

HEAD = """# Coverage

Written by `python -m shardwise verify --coverage docs/coverage.md`, with torch {version} on a CPU; not to be edited.

Every operator of `torch.testing`'s database (float32 where it has it) is called on up to 6 samples with up to 14 combinations
of placements each: replicated, sharded along every dim (uneven and empty shards included) and Partial(sum) of unlike summands.
Results, arguments after the call, and gradients for a random cotangent are compared with those of one device on every rank.
*Right*: on every combination. *Raises*: an error on some combination. *Wrong*: another value without an error. Where a gradient
is nan on one device it is not compared.
"""


def write(path: str, workers: int) -> None:
    """Sweep everything and write the page."""
    Path(path).write_text(page([sweep_operators(names(sweep), sweep, workers) for sweep in SWEEPS]))


def page(results: Sequence[Sequence[Verdict]]) -> str:
    """The page for the verdicts of each of `SWEEPS`."""
    first, every = results[0], [verdict for verdicts in results for verdict in verdicts]
    tried = [verdict for verdict in every if verdict.tried]
    raising = {verdict.name: verdict for verdict in tried if verdict.outcome == "error"}.values()
    parts = [
        HEAD.format(version=torch.__version__.partition("+")[0]),
        _figures(results),
        "## Operators that raise\n",
        *_lines(f"- `{v.name}`: {REASONS.get(v.name, 'not known')} ({v.text})" for v in raising),
        "## Operators that are wrong, hang or abort\n",
        *_lines(f"- `{v.name}`: {v.outcome}: {v.text}" for v in tried if v.outcome not in ("right", "error")),
        "## Served by gathering\n\nThese have no rule and no decomposition: their inputs are gathered, and `sw.trace_comm` "
        "tells. Behind each, the operators that come to it, in their forward or backward.\n",
        *_lines(_served(tried, "gathered")),
        "## Served by decomposition\n\nThese have no rule: torch's decomposition of them is run, and `sw.trace_comm` tells.\n",
        *_lines(_served(tried, "decomposed")),
        "## Not compared\n",
        *(f"{title}: {_quoted(v.name for v in first if v.outcome == word)}.\n" for word, title in ASIDE.items()),
        "## Right on every combination\n",
        f"{_quoted(v.name for v in first if v.outcome == 'right')}.\n",
    ]
    return "\n".join(parts)


ASIDE = {
    "random": "Random numbers, which come from other generators than on one device",
    "uninitialised": "Memory as it is found",
    "no samples": "No tensors among their arguments, or none that are dense on a CPU",
}


def _figures(results: Sequence[Sequence[Verdict]]) -> str:
    lines = [
        "| sweep | operators | right | raise | wrong | hang or abort | combinations | right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sweep, verdicts in zip(SWEEPS, results, strict=True):
        tried = [v for v in verdicts if v.tried]
        counts = Counter(v.outcome for v in tried)
        cells = [
            f"{sweep.shape}{', in place' if sweep.inplace else ''}",
            len(tried),
            f"{counts['right']} ({counts['right'] / max(1, len(tried)):.1%})",
            counts["error"],
            counts["WRONG"],
            counts["hang"] + counts["abort"],
            f"{sum(sum(v.counts.values()) for v in tried):,}",
            f"{sum(v.counts.get('right', 0) for v in tried):,}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _served(verdicts: Sequence[Verdict], how: str) -> list[str]:
    reached: dict[str, set[str]] = {}
    for verdict in verdicts:
        for name in getattr(verdict, how):
            reached.setdefault(name, set()).add(verdict.name)
    return [f"- `{name}`: {', '.join(sorted(users))}" for name, users in sorted(reached.items())]


def _lines(lines: Iterable[str]) -> list[str]:
    several = list(lines)
    return [*several, ""] if several else ["None.\n"]


def _quoted(several: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in several) or "none"
