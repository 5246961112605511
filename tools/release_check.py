"""Build the release, install it into clean environments, and run what a user would: `make release-check`.

    python tools/release_check.py                             this Python with every torch, other Pythons with the newest
    python tools/release_check.py --torch 2.12 --python python3.13
    python tools/release_check.py --all --drop                every pair; each environment is removed after its checks

The source archive is built, then the wheel from it. Each environment has the wheel with its `verify` extra, torch and what they
need. The checks run on the CPU, in a folder outside the checkout. Environments stay in `.release/` and are used again, with the
new wheel; `--fresh` installs them anew. Exits with 1 when one check fails; what it printed is in `.release/*.log`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".release"
TORCH = ("2.11", "2.12", "2.13")
LIMIT = 600

_PROBE = ("python", "probes.py")
_RANKS = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "probes.py")
CHECKS = {
    "command": (("shardwise", "--help"), ("shardwise", "verify", "aten.mm.default", "--workers", "1")),
    "README": ((*_PROBE, "readme"),),
    "guides": ((*_PROBE, "guides"),),
    "eager": ((*_PROBE, "eager"),),
    "processes": ((*_RANKS, "processes"),),
    "capture": ((*_PROBE, "capture"),),
    "compile": ((*_RANKS, "compiled"),),
    "packages": ((*_PROBE, "export"), (*_RANKS, "load")),
}


class Environment(NamedTuple):
    """A Python, by its command and version, and the series of torch that it gets."""

    command: str
    python: str
    torch: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"py{self.python}-torch{self.torch}"


class Failed(Exception):
    """A command that failed or took too long."""


def main() -> int:
    given = _parser().parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch))
        rows = [check(environment, wheel, given) for environment in environments(given)]
    print(table(rows))
    return int(any(cell.startswith("FAILED") for row in rows for cell in row))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=TORCH, metavar="SERIES", help="as 2.12: its latest release is taken")
    parser.add_argument("--python", nargs="*", metavar="COMMAND", help="as python3.12; those on the path, if left out")
    parser.add_argument("--all", action="store_true", help="every Python with every torch")
    parser.add_argument("--fresh", action="store_true", help="install environments anew")
    parser.add_argument("--drop", action="store_true", help="remove each environment after its checks")
    return parser


# ── what is released ──


def build(scratch: Path) -> Path:
    """The wheel, built as pip does it from the source archive; both hold what is tracked, the wheel only the package."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(scratch)], ROOT)
    (source,) = scratch.glob("*.tar.gz")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(scratch), str(source)], scratch)
    (wheel,) = scratch.glob("*.whl")
    tracked = {name for name in run(["git", "ls-files"], ROOT).splitlines() if not name.startswith(".ci/")}
    with tarfile.open(source) as archive:
        _same("the source archive", {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}, tracked)
    with zipfile.ZipFile(wheel) as archive:
        package = {name for name in tracked if name.startswith("shardwise/")}
        _same("the wheel", {name for name in archive.namelist() if ".dist-info/" not in name}, package)
    print("built", *(f"{file.name} ({file.stat().st_size // 1024} KiB)" for file in (source, wheel)), flush=True)
    return wheel


def _same(what: str, names: set[str], tracked: set[str]) -> None:
    if names != tracked:
        raise SystemExit(f"{what} has {sorted(names - tracked)} too many and lacks {sorted(tracked - names)}")


# ── environments ──


def environments(given: argparse.Namespace) -> Iterator[Environment]:
    """The first Python with every torch, the others with the newest, or each with all."""
    for place, (python, command) in enumerate(pythons(given.python).items()):
        for torch in given.torch if given.all or place == 0 else given.torch[-1:]:
            yield Environment(command, python, torch)


def pythons(commands: list[str] | None) -> dict[str, str]:
    """Commands by version, as "3.12". One on the path that does not run (a version manager's shim, say) is left out."""
    found = dict[str, str]()
    for command in commands or [sys.executable, *(f"python3.{minor}" for minor in range(11, 15))]:
        try:
            version = run([command, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], ROOT).strip()
        except (Failed, OSError) as error:
            if commands:
                raise SystemExit(f"{command} does not run: {error}") from None
            continue
        found.setdefault(version, command)
    return found


def install(environment: Environment, wheel: Path, fresh: bool) -> None:
    """Put the wheel into the environment; torch and the rest only if it is new."""
    ready = environment.folder / "installed"
    pip = [str(environment.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if fresh or not ready.exists():
        shutil.rmtree(environment.folder, ignore_errors=True)
        run([environment.command, "-m", "venv", str(environment.folder)], FOLDER)
        run([*pip, f"{wheel}[verify]", f"torch=={environment.torch}.*"], FOLDER, limit=3 * LIMIT)
        ready.touch()
    else:
        run([*pip, "--no-deps", "--force-reinstall", str(wheel)], FOLDER)
    run([*pip[:3], "check"], FOLDER)


# ── checks ──


def check(environment: Environment, wheel: Path, given: argparse.Namespace) -> list[str]:
    """One row of the table: versions, then what became of each check."""
    started, log = time.monotonic(), environment.folder.with_suffix(environment.folder.suffix + ".log")
    log.write_text("")
    try:
        install(environment, wheel, given.fresh)
        python = str(environment.folder / "bin" / "python")
        torch = run([python, "-c", "import torch; print(torch.__version__)"], FOLDER).strip()
    except Failed as error:
        log.write_text(str(error))
        return [environment.python, environment.torch, "FAILED: not installed", *["" for _ in CHECKS]]
    installed = time.monotonic()
    row = [environment.python, torch, f"{installed - started:.0f} s", *(attempt(name, environment, log) for name in CHECKS)]
    print(f"{environment.folder.name}: {', '.join(row[3:])} in {time.monotonic() - installed:.0f} s", flush=True)
    if given.drop:
        shutil.rmtree(environment.folder)
    return row


def attempt(name: str, environment: Environment, log: Path) -> str:
    """Run the commands of a check outside the checkout. Output goes to the log, the end of a failure's also to the screen."""
    with tempfile.TemporaryDirectory() as scratch:
        lay_out(Path(scratch))
        try:
            for command, *arguments in CHECKS[name]:
                output = run([str(environment.folder / "bin" / command), *arguments], Path(scratch))
                with log.open("a") as file:
                    file.write(f"── {name}: {command} {' '.join(arguments)}\n{output}\n")
        except Failed as error:
            with log.open("a") as file:
                file.write(f"── {name} FAILED\n{error}\n")
            print(f"{environment.folder.name}, {name}: {str(error)[-2000:]}", flush=True)
            return "FAILED"
    return "passed"


def lay_out(scratch: Path) -> None:
    """Copy the probes, the scripts of the documents and what compares their output, at the same places as in the checkout."""
    for name in run(["git", "ls-files", "docs/*.py", "tests/docs/scripts.py"], ROOT).split():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, scratch / name)
    shutil.copy(ROOT / "tools" / "release_probes.py", scratch / "probes.py")


def run(command: list[str], folder: Path, limit: float = LIMIT) -> str:
    """What a command printed, run with nothing of the checkout on Python's path and no compiled code from earlier runs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH"))}
    kept |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=kept, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
            raise Failed(f"{' '.join(command)} took more than {limit} s") from None
    if process.returncode:
        raise Failed(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    return output


def table(rows: list[list[str]]) -> str:
    """The results, for a terminal and for Markdown alike."""
    lines = [["Python", "torch", "install", *CHECKS], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]])


if __name__ == "__main__":
    sys.exit(main())
