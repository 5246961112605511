"""Counts the kernels that the C++ compiler is run for, in the processes that are started with `settings(folder)`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

CXX = """#!/bin/sh
for word in "$@"; do case "$word" in *.main.cpp) echo "$word" >> "{log}";; esac; done
exec g++ "$@"
"""


def settings(folder: str | Path) -> dict[str, str]:
    """Environment variables of a process whose kernels are counted."""
    compiler, log = Path(folder, "c++"), Path(folder, "kernels")
    compiler.write_text(CXX.format(log=log))
    compiler.chmod(0o755)
    log.touch()
    # Finding out what the CPU can do takes many runs of the compiler in every new folder, so the processes are told.
    return {"CXX": str(compiler), "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def kernels(folder: str | Path) -> Counter[str]:
    """How many kernels were compiled into each compiler's folder in `folder`."""
    lines = Path(folder, "kernels").read_text().splitlines()
    return Counter(Path(line).relative_to(folder).parts[0] for line in lines)
