"""From the start of a process to the first result of a model: a package, eager, and torch.compile with a cold and a warm cache.

    python benchmarks/packages.py              the GPT of examples/train_gpt.py, forward, on two Gloo ranks (tp=2)
    python benchmarks/packages.py --ranks 4 --rounds 3
    python benchmarks/packages.py --model moe  the layer of examples/moe.py on two ranks (ep=2), whose sizes are data

One process without a job exports the model. Then every way starts its ranks anew, `--rounds` times, in turns; the slowest rank
counts, and the best round. "model" is the time until the model and its input are there, which is the same work for all; "first"
from there to the first result (loading, tracing, compiling); "start" is all, from the start of the process; "again" a later
call. Every result is compared with the eager one. Compiled code is cached in folders of this run alone. Exits with 1 when a
package is not the quickest of the ways that compile.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import moe
import train_gpt

CALLS, TOLERANCE = 20, 1e-5
WAYS = ("eager", "package", "compile cold", "compile warm")


# ── one process ──


def gpt(ranks: int):
    """The example's model and a batch of tokens, on the ranks of the job, or simulated."""
    mesh = sw.init_mesh(tp=ranks)
    model = train_gpt.distribute(train_gpt.GPT(), mesh)
    tokens = torch.randint(train_gpt.VOCAB, (train_gpt.BATCH, train_gpt.LENGTH))
    return mesh, model, sw.distribute_tensor(tokens, mesh, {})


def experts(ranks: int):
    """The example's layer of experts, and tokens that are sharded like them."""
    mesh = sw.init_mesh(ep=ranks)
    return (
        mesh,
        moe.MoE(128, 256, experts=16, mesh=mesh),
        sw.distribute_tensor(torch.randn(512, 128), mesh, {"ep": sw.Shard(0)}),
    )


MODELS = {"gpt": gpt, "moe": experts}


def model_and_input(model: str, ranks: int):
    torch.set_num_threads(1)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch.manual_seed(0)
    return MODELS[model](ranks)


def export(name: str, folder: Path, ranks: int) -> None:
    """Write the package."""
    mesh, model, given = model_and_input(name, ranks)
    start = time.monotonic()
    sw.export(model, (given,), mesh, folder / "model.pt2")
    print(f"exported by one process in {time.monotonic() - start:.1f} s", flush=True)


def work(name: str, way: str, folder: Path, rank: int, ranks: int) -> None:
    """One rank: its times go to a file, and from rank 0 also its result."""
    started = float(os.environ["STARTED"])
    store = dist.FileStore(os.environ["STORE"], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    _, model, given = model_and_input(name, ranks)
    ready = time.time()
    with torch.no_grad():
        call = model
        if way == "package":
            call = sw.load_package(folder / "model.pt2", model)
        elif way != "eager":
            call = torch.compile(model, fullgraph=True)
        result = call(given).full_tensor()
        first = time.time()
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            call(given)
            times.append(time.perf_counter() - start)
    whole = result if rank == 0 else None
    torch.save((ready - started, first - ready, statistics.median(times), whole), f"{os.environ['STORE']}.{rank}")
    dist.destroy_process_group()


# ── all of them ──


def run_ranks(name: str, way: str, folder: Path, ranks: int, turn: int):
    """Start the ranks of one way, and give what each measured."""
    store = folder / f"{way.replace(' ', '-')}-{turn}"
    cache = folder / f"cache-{turn}" if way.startswith("compile") else folder / "none"
    env = {**os.environ, "STORE": str(store), "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    env |= {"GLOO_SOCKET_IFNAME": env.get("GLOO_SOCKET_IFNAME", "lo"), "STARTED": str(time.time())}
    command = [
        sys.executable,
        __file__,
        "--model",
        name,
        "--ranks",
        str(ranks),
        "--folder",
        str(folder),
        "--way",
        way,
        "--rank",
    ]
    started = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(ranks)]
    if any([process.wait() for process in started]):
        sys.exit(f"a rank of {way!r} failed")
    return [torch.load(f"{store}.{rank}") for rank in range(ranks)]


def compare(name: str, folder: Path, ranks: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Way to its times: the slowest rank of the best round."""
    found, want = {way: [] for way in WAYS}, None
    for turn in range(rounds):
        for way in WAYS:
            reports = run_ranks(name, way, folder, ranks, turn)
            result = reports[0][-1]
            want = result if want is None else want
            if (result - want).abs().max() > TOLERANCE:
                sys.exit(f"{way} gives other results than eager, by {(result - want).abs().max():.1e}")
            found[way].append(tuple(max(report[i] for report in reports) for i in range(3)))
    return {way: min(times, key=lambda t: t[0] + t[1]) for way, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "export":
        return export(options.model, options.folder, options.ranks)
    if options.way:
        return work(options.model, options.way, options.folder, options.rank, options.ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "export")}
        command = [
            sys.executable,
            __file__,
            "--model",
            options.model,
            "--ranks",
            str(options.ranks),
            "--folder",
            name,
            "--way",
            "export",
        ]
        subprocess.run(command, env=env, check=True)
        times = compare(options.model, folder, options.ranks, options.rounds)
    print(f"\n{'seconds':14}{'model':>8}{'first':>8}{'start':>8}  {'again, ms':>10}  {'start / package':>16}")
    for way, (model, first, again) in times.items():
        ratio = (model + first) / sum(times["package"][:2])
        print(f"{way:14}{model:8.2f}{first:8.2f}{model + first:8.2f}  {again * 1e3:10.2f}  {ratio:16.2f}")
    if sum(times["package"][:2]) >= min(sum(times[way][:2]) for way in WAYS if way.startswith("compile")):
        sys.exit("a package does not start before a warm torch.compile")


if __name__ == "__main__":
    main()
