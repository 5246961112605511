"""A program of several ranks, started by torchrun, and what each of its ranks reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WARM_CACHE = Path(__file__).parents[2] / "examples" / "warm_cache.py"


def run(ranks: int, rows: int, cache: Path, hash_seed: str, program: Path = WARM_CACHE) -> list[dict[str, int]]:
    """What every rank reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([*command, str(program), str(rows)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
