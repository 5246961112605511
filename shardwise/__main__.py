"""The command line: `python -m shardwise rules` prints the table of rules, `python -m shardwise verify` proves it."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys

import torch

from .rules.listing import listing
from .verify.coverage import write
from .verify.sweeps import Sweep, check_rules, names, sweep_operators


def main(arguments: list[str] | None = None) -> int:
    """Run a command; gives its exit code."""
    given = _parser().parse_args(arguments)
    if given.command == "rules":
        text = listing(given.name)
        print(text or f"no rule for {given.name!r}: torch takes such an operator apart, or it runs on whole tensors")
        return int(not text)
    torch.set_num_threads(1)
    if given.coverage:
        write(given.coverage, given.workers)
        return 0
    if given.operators or given.inplace:
        sweep = Sweep(tuple(map(int, given.mesh.split("x"))), given.dtype and getattr(torch, given.dtype), given.inplace)
        chosen = [name for name in names(sweep) if _matches(name, given.pattern)][given.shard :: given.shards]
        verdicts = sweep_operators(chosen, sweep, given.workers)
        return int(any(verdict.outcome in ("WRONG", "hang", "abort", "fault") for verdict in verdicts))
    rules = check_rules(lambda name: _matches(name, given.pattern), given.workers, given.quick)
    return int(any(rule.unsound for rule in rules))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shardwise", description="Distributed tensors that mean what one device means.")
    commands = parser.add_subparsers(dest="command", required=True)
    rules = commands.add_parser("rules", help="print the table of rules: how each operator may be sharded")
    rules.add_argument("name", nargs="?", default="", help="an operator, as mm, max.dim or '*pool*': explains its rules")
    verify = commands.add_parser("verify", help="prove that rules, and torch's operators, mean what they mean on one device")
    add = verify.add_argument
    add("pattern", nargs="?", default="*", help="names to take, as 'aten.*pool*' or 'nn.functional.*'; commas between several")
    add("--quick", action="store_true", help="a few operators only")
    add("--operators", action="store_true", help="sweep torch's operator database instead of the rules")
    add("--inplace", action="store_true", help="the same for in-place forms")
    add("--mesh", default="2", help="of a sweep: 2, 3 or 2x2 ranks")
    add("--dtype", help="of a sweep: float32 where an operator has it, if left out")
    add("--coverage", metavar="FILE", help="sweep everything and write docs/coverage.md")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    add("--shards", type=int, default=1, help="of a sweep: take one of so many parts of the names")
    add("--shard", type=int, default=0, help="which part")
    return parser


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


if __name__ == "__main__":
    sys.exit(main())
