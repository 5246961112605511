"""What every test shares: one thread per process, so that parallel workers do not fight over cores; and the seed, shown."""

import os

import torch

torch.set_num_threads(1)

#: How many random programs are tried, and from which seed (see tests/simulated/test_programs.py).
PROGRAMS = int(os.environ.get("SHARDWISE_PROGRAMS", "400"))
SEED = int(os.environ.get("SHARDWISE_SEED", "20261115"))


def pytest_report_header() -> str:
    return f"random programs: {PROGRAMS}, seed {SEED} (SHARDWISE_PROGRAMS, SHARDWISE_SEED)"
