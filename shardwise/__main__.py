"""The command line: `python -m shardwise verify`."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections import Counter
from functools import partial

import torch

from .verify.operators import Sweep, Verdict, check_operator, names
from .verify.pool import run


def main(arguments: list[str] | None = None) -> int:
    """Run a command; gives its exit code."""
    parser = argparse.ArgumentParser("shardwise", description="Distributed tensors that mean what one device means.")
    verify = parser.add_subparsers(dest="command", required=True).add_parser("verify", help="prove rules and operators")
    add = verify.add_argument
    add("pattern", nargs="?", default="*", help="names to take, as in 'nn.functional.*pool*'; several are separated by commas")
    add("--operators", action="store_true", help="sweep torch's operator database")
    add("--inplace", action="store_true", help="the in-place forms of the operators")
    add("--mesh", default="2", help="2, 3 or 2x2 ranks")
    add("--dtype", help="float32 where an operator has it, if left out")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    add("--shards", type=int, default=1, help="take one of so many parts of the names")
    add("--shard", type=int, default=0, help="which part")
    given = parser.parse_args(arguments)
    return _operators(given)


def _operators(given: argparse.Namespace) -> int:
    sweep = Sweep(tuple(map(int, given.mesh.split("x"))), given.dtype and getattr(torch, given.dtype), given.inplace)
    chosen = [name for name in names(sweep) if any(fnmatch.fnmatch(name, p) for p in given.pattern.split(","))]
    chosen = chosen[given.shard :: given.shards]
    verdicts = []
    for done in run(partial(check_operator, sweep=sweep), chosen, given.workers):
        verdict = done.result or Verdict(done.task, done.failure)
        print(verdict, flush=True)
        verdicts.append(verdict)
    print(_summary(verdicts))
    return int(any(v.outcome in ("WRONG", "hang", "abort") for v in verdicts))


def _summary(verdicts: list[Verdict]) -> str:
    tried = [v for v in verdicts if v.tried]
    counts = Counter(v.outcome for v in verdicts)
    served = Counter(v.served for v in tried)
    aside = ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if outcome in ("random", "uninitialised", "no samples"))
    return (
        f"{len(tried)} operators: {counts['right']} right on every combination, {counts['error']} raise, "
        f"{counts['WRONG']} WRONG, {counts['hang']} hang, {counts['abort']} abort; served by "
        + ", ".join(f"{how} {n}" for how, n in served.items())
        + (f"; set aside: {aside}" if aside else "")
    )


if __name__ == "__main__":
    sys.exit(main())
