"""Everything that needs a GPU, one row each, with what it printed last: `make gpu`.

    python benchmarks/gpu.py             all rows; ends within nine minutes
    python benchmarks/gpu.py powers      the rows whose name holds one of the given words

A row has a time limit of its own; one that is over it, or ends with an error, is told so and the others still run. Exits with 1
if any did. The whole output of each row goes to the file named by `--log`.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One command, and how many seconds it may take."""

    name: str
    command: tuple[str, ...]
    limit: float


_STEP = ("benchmarks/step.py", "--device", "cuda", "--rounds", "10")
ROWS = (
    Row("tests on the device", ("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"), 300),
    Row("integer powers beside a copy", ("benchmarks/int_pow.py", "--device", "cuda", "--rounds", "5"), 60),
    Row("random numbers beside torch's", ("benchmarks/random_numbers.py", "--device", "cuda", "--rounds", "3"), 150),
    Row("a training step", (*_STEP, "--rows", "plain eager", "ours eager", "ours captured"), 120),
)


def run(row: Row) -> tuple[str, float, str]:
    """How a row ended, in how many seconds, and all that it printed."""
    start = time.monotonic()
    try:
        done = subprocess.run([sys.executable, *row.command], capture_output=True, text=True, timeout=row.limit)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return "too long", time.monotonic() - start, printed
    return ("ok" if not done.returncode else f"exit {done.returncode}"), time.monotonic() - start, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    chosen = [row for row in ROWS if not options.words or any(word in row.name for word in options.words)]
    failed, lines, logged = False, [f"{'what':32}{'ended':>10}{'seconds':>9}   last line"], []
    for row in chosen:
        ended, took, printed = run(row)
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        lines.append(f"{row.name:32}{ended:>10}{took:>9.0f}   {last[:100]}")
        failed |= ended != "ok"
        logged.append(f"== {row.name}: {ended}\n{printed}")
        print(logged[-1], flush=True)
    if options.log:
        options.log.write_text("\n".join(logged))
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
